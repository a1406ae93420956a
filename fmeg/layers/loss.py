"""Token cross-entropy over the vocabulary, with label smoothing and z-loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fmeg.config import TransformerConfig


class TokenLoss(NamedTuple):
    """Per-token terms [B, T]: what is minimized, and the parts of it that are reported."""

    loss_BT: Tensor
    nll_BT: Tensor
    z_loss_BT: Tensor


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, cfg: TransformerConfig) -> TokenLoss:
    """-log softmax(logits)[label], smoothed, plus z-loss; padded columns of the logits are -inf and take no part.

    loss = (1 - a) nll + a mean_v(-log p_v) + c logsumexp^2, with `a` label_smoothing, spread over all V classes
    (Szegedy et al. 2016), and `c` z_loss_coeff. Logits in at least fp32. Labels must be in [0, V).

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, vocab_size=4)
    >>> cross_entropy(torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]), torch.tensor([[3]]), cfg).loss_BT
    tensor([[0.4402]])
    """
    lse_BT = torch.logsumexp(logits_BTV, -1)
    nll_BT = lse_BT - logits_BTV.gather(-1, labels_BT[..., None]).squeeze(-1)
    z_loss_BT = cfg.z_loss_coeff * lse_BT.square()
    loss_BT = nll_BT
    if cfg.label_smoothing:
        column_V = torch.arange(logits_BTV.shape[-1], device=logits_BTV.device)
        mean_BT = torch.where(column_V < cfg.vocab_size, logits_BTV, 0.0).sum(-1) / cfg.vocab_size
        loss_BT = (1 - cfg.label_smoothing) * nll_BT + cfg.label_smoothing * (lse_BT - mean_BT)
    if cfg.z_loss_coeff:
        loss_BT = loss_BT + z_loss_BT
    return TokenLoss(loss_BT, nll_BT, z_loss_BT)

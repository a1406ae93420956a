"""Token cross-entropy over the vocabulary, with label smoothing and z-loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fmeg.config import TransformerConfig
from fmeg.layers.embedding import vocab_columns
from fmeg.sharding.collectives import all_reduce_max, all_reduce_of_equals
from fmeg.sharding.mesh import Ctx
from fmeg.sharding.spec import P


class TokenLoss(NamedTuple):
    """Per-token terms [B, T]: what is minimized, and the parts of it that are reported.

    On a mesh each is this rank's share: its sum over the ranks that hold the same tokens is the token's loss.
    """

    loss_BT: Tensor
    nll_BT: Tensor
    z_loss_BT: Tensor


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, cfg: TransformerConfig, ctx: Ctx = None) -> TokenLoss:
    """-log softmax(logits)[label], smoothed, plus z-loss; padded columns of the logits are -inf and take no part.

    loss = (1 - a) nll + a mean_v(-log p_v) + c logsumexp^2, with `a` label_smoothing, spread over all V classes
    (Szegedy et al. 2016), and `c` z_loss_coeff. Logits [B,T,V_tp] in at least fp32. Labels must be in [0, V).

    The label's logit and the sum of logits stay pending sums over the vocabulary's ranks, so that only the logsumexp
    communicates: its largest logit and its sum forward, nothing backward.

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, vocab_size=4)
    >>> cross_entropy(torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]), torch.tensor([[3]]), cfg).loss_BT
    tensor([[0.4402]])
    """
    column_V = vocab_columns(logits_BTV, ctx)
    lse_BT = _logsumexp(logits_BTV, ctx)
    label_BT, repeats = _label_logit(logits_BTV, labels_BT, ctx), same_tokens(ctx)
    nll_BT = lse_BT / repeats - label_BT
    z_loss_BT = cfg.z_loss_coeff * lse_BT.square() / repeats
    loss_BT = nll_BT
    if cfg.label_smoothing:
        mean_BT = torch.where(column_V < cfg.vocab_size, logits_BTV, 0.0).sum(-1) / cfg.vocab_size
        loss_BT = (1 - cfg.label_smoothing) * nll_BT + cfg.label_smoothing * (lse_BT / repeats - mean_BT)
    if cfg.z_loss_coeff:
        loss_BT = loss_BT + z_loss_BT
    return TokenLoss(loss_BT, nll_BT, z_loss_BT)


def same_tokens(ctx: Ctx) -> int:
    """How many ranks compute the loss of the same tokens: each of them reports its share."""
    return 1 if ctx is None else ctx.mesh.size(ctx.mesh.unused_axes(P("batch")))


def _logsumexp(logits_BTV: Tensor, ctx: Ctx) -> Tensor:
    axes = () if ctx is None else ctx.mesh.axes_of("vocab")
    if ctx is None or not axes:
        return torch.logsumexp(logits_BTV, -1)
    max_BT = all_reduce_max(logits_BTV.detach().amax(-1), axes, ctx)
    sum_BT = (logits_BTV - max_BT[..., None]).exp().sum(-1)
    # Every rank computes the same from this sum, so that its cotangents are equal and need not be added up.
    return all_reduce_of_equals(sum_BT, axes, ctx).log() + max_BT


def _label_logit(logits_BTV: Tensor, labels_BT: Tensor, ctx: Ctx) -> Tensor:
    """The label's logit on the rank that holds it, 0 on the others."""
    columns = None if ctx is None else ctx.positions("vocab", logits_BTV.shape[-1])
    if columns is None:
        return logits_BTV.gather(-1, labels_BT[..., None]).squeeze(-1)
    local_BT = labels_BT - columns[0]
    mine_BT = (local_BT >= 0) & (local_BT < logits_BTV.shape[-1])
    picked_BT = logits_BTV.gather(-1, torch.where(mine_BT, local_BT, 0)[..., None]).squeeze(-1)
    return torch.where(mine_BT, picked_BT, 0.0)

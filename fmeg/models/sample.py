"""Sampling text from a model."""

from __future__ import annotations

import torch
from torch import Tensor

from fmeg import random
from fmeg.config import TransformerConfig
from fmeg.models.gpt import gpt_forward
from fmeg.params import Params


def sample(
    params: Params, prompt: Tensor, cfg: TransformerConfig, *, num_tokens: int, temperature: float, key: Tensor
) -> Tensor:
    """Continue `prompt` [T] by `num_tokens` tokens drawn from softmax(logits / temperature); returns [T + num_tokens].

    Draws by the Gumbel trick, argmax(logits / temperature - log(-log u)); temperature 0 takes the most probable token.
    The context is the last max_position_embeddings tokens. Every token is a whole forward: for looking, not for serving.

    >>> from fmeg.models.gpt import init_params
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> prompt = torch.tensor([1, 2])
    >>> sample(init_params(cfg), prompt, cfg, num_tokens=3, temperature=1.0, key=random.key(0)).shape
    torch.Size([5])
    """
    tokens = prompt.long()
    for step in range(num_tokens):
        context = tokens[-cfg.max_position_embeddings :]
        logits_V = gpt_forward(params, context[None], cfg)[0, -1]
        if temperature > 0:
            u_V = random.uniform(random.fold_in(key, step), (cfg.vocab_size,), low=torch.finfo(torch.float32).tiny)
            logits_V = logits_V / temperature - (-u_V.log()).log()
        tokens = torch.cat((tokens, logits_V.argmax(-1, keepdim=True)))
    return tokens

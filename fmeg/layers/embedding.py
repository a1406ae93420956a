"""Token and position embeddings, and the projection to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg.config import TransformerConfig
from fmeg.layers.attention import RESIDUAL
from fmeg.layers.dropout import DropoutKey, dropout
from fmeg.layers.linear import matmul
from fmeg.layers.norm import at_least_fp32
from fmeg.params import Params, ParamSpec, Specs, normal
from fmeg.sharding.reshard import Mesh, reshard
from fmeg.sharding.spec import P


def embedding_specs(cfg: TransformerConfig) -> Specs:
    """tokens [V,D], stored padded; with learned positions, positions [max_position_embeddings, D]."""
    std = cfg.init_method_std if cfg.embedding_init_method_std is None else cfg.embedding_init_method_std
    specs = {"tokens": _vocab_spec(cfg, std)}
    if cfg.position_embedding_type == "learned_absolute":
        specs["positions"] = ParamSpec((cfg.max_position_embeddings, cfg.hidden_size), P("positions", "embed"), normal(std))
    return specs


def output_specs(cfg: TransformerConfig) -> Specs:
    """weight [V,D], stored padded. Not there when the token embedding is used instead."""
    return {"weight": _vocab_spec(cfg, cfg.init_method_std)}


def _vocab_spec(cfg: TransformerConfig, std: float) -> ParamSpec:
    V, Vp, D = cfg.vocab_size, cfg.padded_vocab_size, cfg.hidden_size
    return ParamSpec((V, D), P("vocab", "embed"), normal(std), storage_shape=(Vp, D))


def embed(
    params: Params,
    tokens_BT: Tensor,
    positions_T: Tensor,
    cfg: TransformerConfig,
    ctx: Mesh,
    *,
    key: DropoutKey | None = None,
) -> Tensor:
    """tokens[B,T] -> x[B,T,D]: a row of the token table, plus the row of each position where positions are learned."""
    x_BTD = F.embedding(tokens_BT, params["tokens"])
    x_BTD = reshard(x_BTD, P("batch", "seq", "embed", unreduced="vocab"), RESIDUAL, ctx)
    if cfg.position_embedding_type == "learned_absolute":
        # As a lookup, not a slice: positions are data, so that a rank may hold any part of the sequence.
        x_BTD = x_BTD + F.embedding(positions_T, params["positions"])
    return dropout(x_BTD, cfg.hidden_dropout, key)


def unembed(weight_VD: Tensor, x_BTD: Tensor, cfg: TransformerConfig, ctx: Mesh) -> Tensor:
    """x[B,T,D] . W[V_tp,D] -> logits[B,T,V_tp] in at least fp32; the columns of the padding are -inf."""
    x_BTD = reshard(x_BTD, RESIDUAL, P("batch", "seq", "embed"), ctx)
    logits_BTV = at_least_fp32(matmul(x_BTD, weight_VD.t()))
    if cfg.padded_vocab_size == cfg.vocab_size:
        return logits_BTV
    column_V = torch.arange(cfg.padded_vocab_size, device=x_BTD.device)
    return torch.where(column_V < cfg.vocab_size, logits_BTV, -torch.inf)

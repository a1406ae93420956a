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
from fmeg.sharding.mesh import Ctx
from fmeg.sharding.reshard import reshard
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
    ctx: Ctx,
    *,
    key: DropoutKey | None = None,
) -> Tensor:
    """tokens[B,T] -> x[B,T,D]: a row of the token table, plus the row of each position where positions are learned."""
    x_BTD = reshard(lookup(params["tokens"], tokens_BT, ctx), P("batch", "seq", "embed", unreduced="vocab"), RESIDUAL, ctx)
    if cfg.position_embedding_type == "learned_absolute":
        # As a lookup, not a slice: positions are data, so that a rank may hold any part of the sequence.
        positions_T = reshard(positions_T, P("seq"), P("residual_seq"), ctx)
        x_BTD = x_BTD + F.embedding(positions_T, params["positions"])
    return dropout(x_BTD, cfg.hidden_dropout, key, RESIDUAL, ctx)


def lookup(table_VD: Tensor, ids_BT: Tensor, ctx: Ctx) -> Tensor:
    """ids[B,T] -> x[B,T,D] {U_tp}: rows of the table; zeros for ids whose rows other ranks hold."""
    rows = None if ctx is None else ctx.positions("vocab", len(table_VD))
    if rows is None:
        return F.embedding(ids_BT, table_VD)
    local_BT = ids_BT - rows[0]
    mine_BT = (local_BT >= 0) & (local_BT < len(table_VD))
    x_BTD = F.embedding(torch.where(mine_BT, local_BT, 0), table_VD)
    return torch.where(mine_BT[..., None], x_BTD, 0.0)


def unembed(weight_VD: Tensor, x_BTD: Tensor, cfg: TransformerConfig, ctx: Ctx) -> Tensor:
    """x[B,T,D] . W[V_tp,D] -> logits[B,T,V_tp] in at least fp32; the columns of the padding are -inf.

    `x` is normalized, and whole over positions: `reshard` it from RESIDUAL before.
    """
    logits_BTV = at_least_fp32(matmul(x_BTD, weight_VD.t(), cfg))
    if cfg.padded_vocab_size == cfg.vocab_size:
        return logits_BTV
    return torch.where(vocab_columns(logits_BTV, ctx) < cfg.vocab_size, logits_BTV, -torch.inf)


def vocab_columns(logits_BTV: Tensor, ctx: Ctx) -> Tensor:
    """Which ids this rank's columns of the logits are: int64 [V_tp]."""
    size = logits_BTV.shape[-1]
    columns = None if ctx is None else ctx.positions("vocab", size)
    return torch.arange(size, device=logits_BTV.device) if columns is None else columns

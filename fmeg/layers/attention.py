"""Causal self-attention: multi-head, grouped-query and multi-query, with rotary positions, q/k norms and windows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg.autodiff import apply_function
from fmeg.config import TransformerConfig
from fmeg.layers.dropout import DropoutKey, dropout
from fmeg.layers.linear import linear, linear_specs
from fmeg.layers.norm import at_least_fp32, norm, norm_specs
from fmeg.layers.rotary import Rotary, apply_rotary
from fmeg.params import Params, Specs, normal
from fmeg.remat import selective
from fmeg.sharding.mesh import Ctx
from fmeg.sharding.reshard import reshard
from fmeg.sharding.spec import P

RESIDUAL = P("batch", "residual_seq", "embed")
"""The layout of the residual stream, which every sublayer takes and gives."""


def attention_specs(cfg: TransformerConfig) -> Specs:
    """query [D,N,H], key and value [D,K,H], output [N,H,D], and with qk_layernorm one norm over H for each of q and k."""
    D, N, K, H = cfg.hidden_size, cfg.num_attention_heads, cfg.query_groups, cfg.head_dim
    start = normal(cfg.init_method_std)
    out_start = normal(cfg.init_method_std / math.sqrt(2 * cfg.num_layers))
    bias = cfg.add_bias_linear or cfg.add_qkv_bias
    specs = {
        "query": linear_specs({"embed": D}, {"heads": N, "head_dim": H}, init=start, bias=bias),
        "key": linear_specs({"embed": D}, {"kv_heads": K, "head_dim": H}, init=start, bias=bias),
        "value": linear_specs({"embed": D}, {"kv_heads": K, "head_dim": H}, init=start, bias=bias),
        "output": linear_specs({"heads": N, "head_dim": H}, {"embed": D}, init=out_start, bias=cfg.add_bias_linear),
    }
    if cfg.qk_layernorm:
        specs |= {name: norm_specs(cfg, H, "head_dim") for name in ("query_norm", "key_norm")}
    return specs


def attention(
    params: Params,
    x_BTD: Tensor,
    cfg: TransformerConfig,
    ctx: Ctx,
    *,
    rotary: Rotary | None = None,
    key: DropoutKey | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """x[B,T,D] -> y[B,T,D]. `window` (left, 0): position t sees t - left .. t; None: everything before it.

    x[B,T,D] . Wq[D,N_tp,H] -> q[B,T,N_tp,H];  x . Wk[D,K_tp,H] -> k[B,S,K_tp,H];  x . Wv -> v[B,S,K_tp,H]
    softmax(q k^T * scale + causal) v -> o[B,T,N_tp,H];  o . Wo[N_tp,H,D] -> y[B,T,D] {U_tp}
    """
    x_BTD = reshard(x_BTD, RESIDUAL, P("batch", "seq", "embed"), ctx)
    heads, kv_heads = P("batch", "seq", "heads", "head_dim"), P("batch", "seq", "kv_heads", "head_dim")
    q_BTNH = linear(params["query"], x_BTD, cfg, ctx, src=heads, dst=heads)
    k_BSKH = linear(params["key"], x_BTD, cfg, ctx, src=kv_heads, dst=kv_heads)
    v_BSKH = linear(params["value"], x_BTD, cfg, ctx, src=kv_heads, dst=kv_heads)
    if cfg.qk_layernorm:
        q_BTNH, k_BSKH = norm(params["query_norm"], q_BTNH, cfg), norm(params["key_norm"], k_BSKH, cfg)
    if rotary is not None:
        q_BTNH, k_BSKH = apply_rotary(q_BTNH, rotary, cfg), apply_rotary(k_BSKH, rotary, cfg)
    mask_TS = None if window is None else causal_mask(x_BTD.shape[1], window[0], x_BTD.device)
    core = selective("core_attn", dot_product_attention, cfg)
    o_BTNH = core(q_BTNH, k_BSKH, v_BSKH, cfg, ctx, mask_TS=mask_TS, key=key)
    partial = P("batch", "seq", "embed", unreduced="heads")
    return linear(params["output"], o_BTNH, cfg, ctx, src=partial, dst=RESIDUAL, contract=2)


def causal_mask(length: int, left: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Bool [T, S]: True where position t may attend to s, that is t - left <= s <= t; without `left`, s <= t.

    >>> causal_mask(3, 1).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    t = torch.arange(length, device=device)
    distance_TS = t[:, None] - t[None, :]
    return distance_TS >= 0 if left is None else (distance_TS >= 0) & (distance_TS <= left)


def dot_product_attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    cfg: TransformerConfig,
    ctx: Ctx = None,
    *,
    mask_TS: Tensor | None = None,
    key: DropoutKey | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v -> o[B,T,N,H]; query head n uses key head n // (N / K). Softmax in at least fp32.

    `mask_TS`: bool, True where attention is allowed; None: causal. A row with nothing to attend to gives zeros.
    """
    if cfg.matmul_kernel == "fp32" and q_BTNH.dtype == torch.bfloat16 and q_BTNH.device.type == "cpu":
        q_wide, k_wide, v_wide = (t.float() for t in (q_BTNH, k_BSKH, v_BSKH))
        return dot_product_attention(q_wide, k_wide, v_wide, cfg, ctx, mask_TS=mask_TS, key=key).to(q_BTNH.dtype)
    scale = cfg.head_dim**-0.5 if cfg.softmax_scale is None else cfg.softmax_scale
    drop = key is not None and cfg.attention_dropout > 0
    if cfg.attention_backend == "unfused" or drop:
        if mask_TS is None:
            mask_TS = causal_mask(q_BTNH.shape[1], None, q_BTNH.device)
        return _unfused(q_BTNH, k_BSKH, v_BSKH, mask_TS, scale, cfg.attention_dropout, key, ctx)
    q_BNTH, k_BKSH, v_BKSH = (t.transpose(1, 2) for t in (q_BTNH, k_BSKH, v_BSKH))
    if q_BTNH.device.type == "cpu":
        bias_TS = None if mask_TS is None else torch.where(mask_TS, 0.0, -torch.inf).to(q_BNTH.dtype)
        o_BNTH, _ = apply_function(_FlashCPU, q_BNTH, k_BKSH, v_BKSH, bias_TS, scale)
    else:
        o_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKSH, v_BKSH, attn_mask=mask_TS, is_causal=mask_TS is None, scale=scale, enable_gqa=True
        )
    return o_BNTH.transpose(1, 2)


def _unfused(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask_TS: Tensor,
    scale: float,
    rate: float,
    key: DropoutKey | None,
    ctx: Ctx,
) -> Tensor:
    """Attention by plain products: differentiable in every mode, with keyed dropout."""
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.unflatten(2, (K, q_BTNH.shape[2] // K))
    scores_BKGTS = at_least_fp32(torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH)) * scale
    # The smallest finite number instead of -inf: a row without any allowed position stays finite, and is zeroed below.
    scores_BKGTS = torch.where(mask_TS, scores_BKGTS, torch.finfo(scores_BKGTS.dtype).min)
    probs_BKGTS = torch.where(mask_TS, torch.softmax(scores_BKGTS, -1), 0.0)
    probs_BNTS = dropout(probs_BKGTS.flatten(1, 2), rate, key, P("batch", "heads", "seq", None), ctx).to(v_BSKH.dtype)
    probs_BKGTS = probs_BNTS.unflatten(1, q_BTKGH.shape[2:4])
    return torch.einsum("bkgts,bskh->btkgh", probs_BKGTS, v_BSKH).flatten(2, 3)


_FIRST_ORDER_ONLY = (
    "fused attention has first reverse-mode derivatives only: "
    "for jvp, Hessians or gradients of gradients use attention_backend='unfused'"
)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise ValueError(_FIRST_ORDER_ONLY)


def _fold_vmap(function: type[torch.autograd.Function], info: Any, in_dims: Any, args: Any) -> tuple[Any, Any]:
    """A vmap rule: the mapped dimension joins the batch, so that one kernel call serves all of it."""
    n = info.batch_size

    def fold(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor) or x.ndim - (dim is not None) == 2:  # a scalar, or the bias [T, S]
            if dim is not None:
                raise ValueError("fused attention under vmap takes one mask for all: use attention_backend='unfused'")
            return x
        x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    outs = apply_function(function, *(fold(x, dim) for x, dim in zip(args, in_dims, strict=True)))
    return tuple(o.unflatten(0, (n, -1)) for o in outs), (0,) * len(outs)


class _FlashCPU(torch.autograd.Function):
    """torch's CPU flash kernel: (o[B,N,T,H], logsumexp). `bias` [T, S] is added to scores; grouped heads need no expansion."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, bias, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, bias, *output)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, _: Any) -> tuple[Any, ...]:
        q, k, v, bias, o, lse = ctx.saved_tensors
        grads = apply_function(_FlashCPUBackward, grad_o, q, k, v, o, lse, bias, ctx.scale)
        return *grads, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        return _fold_vmap(_FlashCPU, info, in_dims, args)

    jvp = staticmethod(_refuse)


class _FlashCPUBackward(torch.autograd.Function):
    """The kernel's backward as a Function of its own, so that vmap has a rule and a second derivative a clear refusal."""

    @staticmethod
    def forward(
        grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(grad_o, q, k, v, o, lse, 0.0, bias is None, attn_mask=bias, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        return _fold_vmap(_FlashCPUBackward, info, in_dims, args)

    backward = staticmethod(_refuse)
    jvp = staticmethod(_refuse)

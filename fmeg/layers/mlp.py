"""The MLP of a layer, plain or gated (Shazeer 2020)."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from fmeg.config import TransformerConfig
from fmeg.layers.attention import RESIDUAL
from fmeg.layers.dropout import DropoutKey
from fmeg.layers.linear import linear, linear_specs
from fmeg.params import Params, Specs, normal
from fmeg.sharding.mesh import Ctx
from fmeg.sharding.reshard import reshard
from fmeg.sharding.spec import P


def mlp_specs(cfg: TransformerConfig) -> Specs:
    """up [D,F], down [F,D], and gate [D,F] where gated."""
    D, F_ = cfg.hidden_size, cfg.ffn_size
    start = normal(cfg.init_method_std)
    out_start = normal(cfg.init_method_std / math.sqrt(2 * cfg.num_layers))
    ups = ("gate", "up") if cfg.gated_linear_unit else ("up",)
    specs = {name: linear_specs({"embed": D}, {"mlp": F_}, init=start, bias=cfg.add_bias_linear) for name in ups}
    return specs | {"down": linear_specs({"mlp": F_}, {"embed": D}, init=out_start, bias=cfg.add_bias_linear)}


def mlp(params: Params, x_BTD: Tensor, cfg: TransformerConfig, ctx: Ctx, *, key: DropoutKey | None = None) -> Tensor:
    """x[B,T,D] -> y[B,T,D]: act(x Wup) Wdown, or (act(x Wgate) * x Wup) Wdown. Has no dropout of its own.

    x[B,T,D] . Wup[D,F_tp] -> h[B,T,F_tp];  h . Wdown[F_tp,D] -> y[B,T,D] {U_tp}
    """
    x_BTD = reshard(x_BTD, RESIDUAL, P("batch", "seq", "embed"), ctx)
    hidden = P("batch", "seq", "mlp")
    h_BTF = linear(params["up"], x_BTD, cfg, ctx, src=hidden, dst=hidden)
    if cfg.gated_linear_unit:
        h_BTF = activation(linear(params["gate"], x_BTD, cfg, ctx, src=hidden, dst=hidden), cfg.activation) * h_BTF
    else:
        h_BTF = activation(h_BTF, cfg.activation)
    return linear(params["down"], h_BTF, cfg, ctx, src=P("batch", "seq", "embed", unreduced="mlp"), dst=RESIDUAL)


def activation(x: Tensor, name: str) -> Tensor:
    """`x` through the named activation.

    >>> import torch
    >>> activation(torch.tensor([-1.0, 2.0]), "squared_relu")
    tensor([0., 4.])
    """
    if name == "gelu":
        return F.gelu(x)
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "silu":
        return F.silu(x)
    if name == "squared_relu":
        return F.relu(x).square()
    raise ValueError(f"activation is {name!r}: must be gelu, gelu_tanh, silu or squared_relu")

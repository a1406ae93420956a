"""Linear layers. Column- and row-parallel are the same function under another annotation."""

from __future__ import annotations

import math

from torch import Tensor

from fmeg.backends.matmul import matmul_kernel
from fmeg.config import TransformerConfig
from fmeg.params import ZEROS, Init, Params, ParamSpec, Specs
from fmeg.sharding.mesh import Ctx
from fmeg.sharding.reshard import reshard
from fmeg.sharding.spec import P


def linear_specs(inputs: dict[str, int], outputs: dict[str, int], *, init: Init, bias: bool) -> Specs:
    """Weight [*inputs, *outputs] and, with `bias`, bias [*outputs]; dicts of logical axis to size.

    >>> linear_specs({"embed": 8}, {"heads": 2, "head_dim": 4}, init=ZEROS, bias=False)["weight"].shape
    (8, 2, 4)
    """
    shape_in, shape_out = tuple(inputs.values()), tuple(outputs.values())
    specs = {"weight": ParamSpec((*shape_in, *shape_out), P(*inputs, *outputs), init, decay=True)}
    if bias:
        specs["bias"] = ParamSpec(shape_out, P(*outputs), ZEROS, decay=False)
    return specs


def linear(params: Params, x: Tensor, cfg: TransformerConfig, ctx: Ctx, *, src: P, dst: P, contract: int = 1) -> Tensor:
    """x[..., I] . W[I, O] -> y[..., O], over the last `contract` dimensions of `x`, then `reshard` and the bias.

    `src` is the layout of the product, `dst` the wanted one. Where `src` has a pending sum, the bias is added after it.

    x[B,T,D] . W[D,F_tp] -> h[B,T,F_tp];  h[B,T,F_tp] . W[F_tp,D] -> y[B,T,D] {U_tp}
    """
    weight = params["weight"]
    y = reshard(matmul(x, weight, cfg, contract), src, dst, ctx)
    return y + params["bias"] if "bias" in params else y


def matmul(x: Tensor, weight: Tensor, cfg: TransformerConfig, contract: int = 1) -> Tensor:
    """x[..., I] . W[I, O] -> [..., O] as one matrix product over the flattened dimensions, by the config's kernel.

    >>> import torch
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, vocab_size=96)
    >>> matmul(torch.ones(2, 3, 4), torch.ones(4, 5, 6), cfg).shape
    torch.Size([2, 3, 5, 6])
    """
    split = x.ndim - contract
    outputs = weight.shape[contract:]
    x_MI = x.reshape(-1, math.prod(x.shape[split:]))
    w_IO = weight.reshape(-1, math.prod(outputs))
    return matmul_kernel(x, cfg).product(x_MI, w_IO).reshape(*x.shape[:split], *outputs)

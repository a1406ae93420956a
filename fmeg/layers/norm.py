"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from fmeg.config import TransformerConfig
from fmeg.params import ONES, ZEROS, Params, ParamSpec, Specs
from fmeg.sharding.spec import P


def norm_specs(cfg: TransformerConfig, size: int, axis: str = "embed") -> Specs:
    """Scale [size] and, for LayerNorm, bias [size]. A zero-centred scale is stored as its distance from 1."""
    start = ZEROS if cfg.layernorm_zero_centered_gamma else ONES
    specs = {"scale": ParamSpec((size,), P(axis), start, full_precision=True)}
    if cfg.normalization == "LayerNorm":
        specs["bias"] = ParamSpec((size,), P(axis), ZEROS, full_precision=True)
    return specs


def norm(params: Params, x: Tensor, cfg: TransformerConfig) -> Tensor:
    """x[..., D] -> y[..., D], normalized over the last dimension, statistics in at least fp32, result in x's dtype.

    RMSNorm: y = scale * x / sqrt(mean(x^2) + eps).  LayerNorm: y = scale * (x - mean) / sqrt(var + eps) + bias.
    """
    x32 = at_least_fp32(x)
    if cfg.normalization == "LayerNorm":
        x32 = x32 - x32.mean(-1, keepdim=True)
    y = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + cfg.layernorm_epsilon)
    y = y * (params["scale"] + 1) if cfg.layernorm_zero_centered_gamma else y * params["scale"]
    if "bias" in params:
        y = y + params["bias"]
    return y.to(x.dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64 if it is."""
    return x if x.dtype == torch.float64 else x.float()

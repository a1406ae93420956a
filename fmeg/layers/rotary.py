"""Rotary position embedding (Su et al. 2021), with Llama 3.1's and YaRN's frequency scaling."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fmeg.config import Llama3RopeScaling, TransformerConfig, YarnRopeScaling
from fmeg.fusion import materialize


class Rotary(NamedTuple):
    """Cosine and sine of position times frequency, each [T, R]."""

    cos_TR: Tensor
    sin_TR: Tensor


def rotary_table(cfg: TransformerConfig, positions_T: Tensor) -> Rotary | None:
    """The table for these positions, angles in fp32 (bf16 cannot hold integers above 256). None without rope."""
    if cfg.position_embedding_type != "rope":
        return None
    freqs_R = inverse_frequencies(cfg).to(positions_T.device)
    angles_TR = positions_T.float()[:, None] * freqs_R[None, :]
    scale = _concentration(cfg.rope_scaling) if isinstance(cfg.rope_scaling, YarnRopeScaling) else 1.0
    return Rotary(materialize(angles_TR.cos() * scale), materialize(angles_TR.sin() * scale))


def inverse_frequencies(cfg: TransformerConfig) -> Tensor:
    """Radians per position of each rotated pair, fp32 [R]: base^(-2i/d), then scaled.

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, vocab_size=8,
    ...     position_embedding_type="rope", rotary_base=5e5, rope_scaling=Llama3RopeScaling(factor=32.0))
    >>> (inverse_frequencies(cfg.replace(rope_scaling=None)) / inverse_frequencies(cfg))[[15, 16, 17, 31]]
    tensor([ 1.6513,  3.2923,  9.6667, 32.0000])
    """
    d, scaling = cfg.rotary_dim, cfg.rope_scaling
    freqs_R = 1.0 / (cfg.rotary_base ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(freqs_R, scaling)
    if isinstance(scaling, YarnRopeScaling):
        return _yarn(freqs_R, scaling, cfg)
    return freqs_R


def _llama3(freqs_R: Tensor, s: Llama3RopeScaling) -> Tensor:
    """Interpolate between freq / factor and freq by how many wavelengths fit into the original context."""
    turns_R = s.original_max_position_embeddings * freqs_R / (2 * math.pi)
    keep_R = ((turns_R - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return (1 - keep_R) * freqs_R / s.factor + keep_R * freqs_R


def _yarn(freqs_R: Tensor, s: YarnRopeScaling, cfg: TransformerConfig) -> Tensor:
    """Interpolate between freq / factor and freq by dimension: equation 23 of the paper, with its code's rounding."""

    def dimension(turns: float) -> float:
        """The (fractional) pair index whose wavelength fits `turns` times into the original context."""
        ratio = s.original_max_position_embeddings / (turns * 2 * math.pi)
        return cfg.rotary_dim * math.log(ratio) / (2 * math.log(cfg.rotary_base))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, cfg.rotary_dim - 1)
    high = high + 0.001 if low == high else high  # the paper's code, against a division by zero
    ramp_R = ((torch.arange(len(freqs_R), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freqs_R / s.factor * ramp_R + freqs_R * (1 - ramp_R)


def _concentration(s: YarnRopeScaling) -> float:
    """What cosine and sine are multiplied by, so that scores grow by its square."""
    if s.attention_factor is not None:
        return s.attention_factor

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0

    return mscale(s.mscale) / mscale(s.mscale_all_dim)


def apply_rotary(x_BTNH: Tensor, rotary: Rotary, cfg: TransformerConfig) -> Tensor:
    """Rotate each pair of the first `rotary_dim` dimensions of every head by its angle; the rest passes.

    Pairs are (i, i + R), or (2i, 2i + 1) with `rotary_interleaved`. Computed in at least fp32, returned in x's dtype.
    """
    R = cfg.rotary_dim // 2
    wide = torch.promote_types(x_BTNH.dtype, torch.float32)
    cos_T1R, sin_T1R = (t[:, None, :].to(wide) for t in rotary)
    x_rot, x_pass = x_BTNH[..., : 2 * R], x_BTNH[..., 2 * R :]
    if cfg.rotary_interleaved:
        a, b = x_rot.unflatten(-1, (R, 2)).to(wide).unbind(-1)
    else:
        a, b = x_rot.to(wide).split(R, -1)
    rotated = (a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R)
    y_rot = torch.stack(rotated, -1).flatten(-2) if cfg.rotary_interleaved else torch.cat(rotated, -1)
    return torch.cat((y_rot.to(x_BTNH.dtype), x_pass), -1) if x_pass.shape[-1] else y_rot.to(x_BTNH.dtype)

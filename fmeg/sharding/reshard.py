"""`reshard(x, src, dst, ctx)`: the only way in which a layer communicates."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from fmeg.sharding.spec import P

Mesh: TypeAlias = None
"""The mesh that a program runs on. A single device is None, the only mesh there is so far."""


def require_single_device(mesh: object) -> None:
    """Refuse a mesh where only a single device is supported."""
    if mesh is not None:
        raise ValueError(f"mesh is {mesh!r}: fmeg runs on a single device so far; pass mesh=None")


def reshard(x: Tensor, src: P, dst: P, ctx: Mesh) -> Tensor:
    """Move `x` from layout `src` to layout `dst`. On a single device both are the whole array, and nothing happens.

    Errors: ValueError when a layout has another rank than `x`, or when `dst` keeps a sum pending that `src` does not.

    >>> import torch
    >>> x_BTD = torch.zeros(2, 3, 4)
    >>> reshard(x_BTD, P("batch", "seq", "embed", unreduced="mlp"), P("batch", "residual_seq", "embed"), None) is x_BTD
    True
    """
    require_single_device(ctx)
    for name, spec in (("src", src), ("dst", dst)):
        if len(spec) != x.ndim:
            raise ValueError(
                f"reshard: {name} {spec} names {len(spec)} dimensions, but the array has {x.ndim}: {tuple(x.shape)}"
            )
    extra = set(dst.unreduced) - set(src.unreduced)
    if extra:
        raise ValueError(f"reshard: dst {dst} leaves {sorted(extra)} unreduced, but src {src} has no such pending sum")
    return x

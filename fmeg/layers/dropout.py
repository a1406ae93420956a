"""Dropout (Srivastava et al. 2014) whose mask is a function of a key and of each element's place in the global array."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fmeg import random
from fmeg.sharding.mesh import Ctx
from fmeg.sharding.spec import P


class DropoutKey(NamedTuple):
    """A key, and the rows of the global batch that these sequences are: int64 [B].

    A row draws the same mask whichever microbatch or rank it is computed on.
    """

    key: Tensor
    rows_B: Tensor

    def split(self, num: int) -> list[DropoutKey]:
        """`num` independent keys for places in a model; the i-th does not depend on `num`."""
        return [self._replace(key=k) for k in random.split(self.key, num).unbind(0)]


def dropout(x: Tensor, rate: float, key: DropoutKey | None, spec: P, ctx: Ctx) -> Tensor:
    """Zero elements of x[B, ...] with probability `rate` and scale the others by 1 / (1 - rate); no key, no dropout.

    `spec`: the layout of `x`, from which each element's place in the global array follows.

    >>> rows = torch.arange(2)
    >>> y = dropout(torch.ones(2, 1000), 0.5, DropoutKey(random.key(0), rows), P("batch", "embed"), None)
    >>> sorted(set(y.flatten().tolist()))
    [0.0, 2.0]
    """
    if key is None or rate == 0:
        return x
    sizes: list[int] = list(x.shape[1:])
    index: list[Tensor | None] = [None] * (x.ndim - 1)
    if ctx is not None:
        sizes = [n * ctx.mesh.size(ctx.mesh.axes_of(axis)) for n, axis in zip(x.shape[1:], spec[1:], strict=True)]
        index = [ctx.positions(axis, n) for n, axis in zip(x.shape[1:], spec[1:], strict=True)]
    # The leading dimension's size does not enter an element's row-major index; rows_B does. Its size here is that of the
    # largest batch, not of this part of one, so that the index of no row wraps around.
    shape = (2**62 // max(math.prod(sizes), 1), *sizes)
    keep = random.bernoulli(key.key, 1 - rate, shape, index=(key.rows_B, *index))
    return torch.where(keep, x / (1 - rate), torch.zeros((), dtype=x.dtype, device=x.device))

"""Dropout (Srivastava et al. 2014) whose mask is a function of a key and of each element's place in the global array."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fmeg import random


class DropoutKey(NamedTuple):
    """A key, and the rows of the global batch that these sequences are: int64 [B].

    A row draws the same mask whichever microbatch or rank it is computed on.
    """

    key: Tensor
    rows_B: Tensor

    def split(self, num: int) -> list[DropoutKey]:
        """`num` independent keys for places in a model; the i-th does not depend on `num`."""
        return [self._replace(key=k) for k in random.split(self.key, num).unbind(0)]


def dropout(x: Tensor, rate: float, key: DropoutKey | None) -> Tensor:
    """Zero elements of x[B, ...] with probability `rate` and scale the others by 1 / (1 - rate); no key, no dropout.

    >>> rows = torch.arange(2)
    >>> y = dropout(torch.ones(2, 1000), 0.5, DropoutKey(random.key(0), rows))
    >>> sorted(set(y.flatten().tolist()))
    [0.0, 2.0]
    """
    if key is None or rate == 0:
        return x
    # The leading dimension's size does not enter an element's row-major index; rows_B does. Its size here is that of the
    # largest batch, not of this part of one, so that the index of no row wraps around.
    shape = (2**62 // max(math.prod(x.shape[1:]), 1), *x.shape[1:])
    keep = random.bernoulli(key.key, 1 - rate, shape, index=(key.rows_B, *[None] * (x.ndim - 1)))
    return torch.where(keep, x / (1 - rate), torch.zeros((), dtype=x.dtype, device=x.device))

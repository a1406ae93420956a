"""What the compiler may inline and what it must store."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def materialize(x: Tensor) -> Tensor:
    """The identity, as a view that inductor does not look through: `x` is stored once and read by all its users.

    Inductor inlines cheap-looking elementwise values into each user's loop. For a power or a cosine that every element of
    a large array would repeat, and for long chains of integer operations, whose inlined copies multiply, that is slow
    to run or to compile. Eager code gets `x` back: a view for each round of a draw is a fifth of the draw's time.

    >>> materialize(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    traced = torch.compiler.is_compiling() or get_proxy_mode() is not None
    return x.as_strided(x.shape, x.stride()) if traced else x

"""What the compiler may inline and what it must store."""

from __future__ import annotations

from torch import Tensor


def materialize(x: Tensor) -> Tensor:
    """The identity, as a view that inductor does not look through: `x` is stored once and read by all its users.

    Inductor inlines cheap-looking elementwise values into each user's loop. For a power or a cosine that every element of
    a large array would repeat, and for long chains of integer operations, whose inlined copies multiply, that is slow
    to run or to compile. Eager code is not affected.

    >>> import torch
    >>> materialize(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return x.as_strided(x.shape, x.stride())

"""What a model tells the compiler: what to store, where layers begin, what to compute late. Nothing of it changes a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fmeg.autodiff import apply_function


def materialize(x: Tensor) -> Tensor:
    """The identity, as a view that inductor does not look through: `x` is stored once and read by all its users.

    Inductor inlines cheap-looking elementwise values into each user's loop. For a power or a cosine that every element of
    a large array would repeat, and for long chains of integer operations, whose inlined copies multiply, that is slow
    to run or to compile. Eager code gets `x` back: a view for each round of a draw is a fifth of the draw's time.

    >>> materialize(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return x.as_strided(x.shape, x.stride()) if is_traced() else x


def layer_boundary(x: Tensor) -> Tensor:
    """The identity, as a mark between layers in the graph of a step: what `x` is here, forward, and its cotangent, backward.

    A step is planned, and if wanted compiled, layer by layer between these marks (fmeg/program.py). Put one before each layer
    and one after the last, on what flows from layer to layer.

    >>> layer_boundary(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return apply_function(_Boundary, x, False) if is_traced() else x


def after(x: Tensor, g: Tensor) -> Tensor:
    """The identity on `x`, as a mark that what is computed from it is computed when `g` is there, and for no one before."""
    return apply_function(_After, x, g) if is_traced() else x


def is_traced() -> bool:
    """Whether a graph is being made."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


@torch.library.custom_op("fmeg::boundary", mutates_args=())
def _boundary(x: Tensor, backward: bool) -> Tensor:
    return x.clone()


@torch.library.custom_op("fmeg::after", mutates_args=())
def _after(x: Tensor, g: Tensor) -> Tensor:
    return x.clone()


# The marks are taken out of the graph before it is compiled: only these stand-ins ever run.
_boundary.register_fake(lambda x, backward: torch.empty_like(x))
_after.register_fake(lambda x, g: torch.empty_like(x))
_boundary.register_vmap(lambda info, in_dims, x, backward: (_boundary(x, backward), in_dims[0]))
_after.register_vmap(lambda info, in_dims, x, g: (_after(x, g), in_dims[0]))
BOUNDARY, AFTER = torch.ops.fmeg.boundary.default, torch.ops.fmeg.after.default


class _Boundary(torch.autograd.Function):
    """A mark, whose cotangent is marked too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, backward: bool) -> Tensor:
        return _boundary(x, backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.backward_mark = not inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return apply_function(_Boundary, g, ctx.backward_mark), None


class _After(torch.autograd.Function):
    """A mark without a derivative of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, g: Tensor) -> Tensor:
        return _after(x, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return g, None

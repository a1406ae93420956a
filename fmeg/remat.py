"""Activation recomputation: a function whose backward computes it again (Chen et al. 2016; Korthikanti et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fmeg import tree
from fmeg.autodiff import apply_function, pull_back
from fmeg.config import TransformerConfig
from fmeg.fusion import after

A = ParamSpec("A")
R = TypeVar("R")


def remat(fn: Callable[A, R]) -> Callable[A, R]:
    """`fn`, which keeps only its arguments for the backward and computes the rest again there: less memory, more time.

    Arguments and results are trees of tensors and constants. Gradients go to the arguments alone, so that a tensor that is to
    have one must not come in by a closure. A dropout key is an argument too: the mask is drawn again, the same. Reverse mode
    only.

    >>> twice = remat(lambda p, x: torch.tanh(p["w"] * x) * 2)
    >>> torch.func.grad(lambda p: twice(p, torch.tensor(0.0)))({"w": torch.tensor(3.0)})
    {'w': tensor(0.)}
    """

    def run(*args: A.args, **kwargs: A.kwargs) -> R:
        flat, treedef = tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        structure: list[tree.PyTreeSpec] = []

        def flat_fn(*tensors: Tensor) -> tuple[Tensor, ...]:
            leaves = list(flat)
            for i, tensor in zip(places, tensors, strict=True):
                leaves[i] = tensor
            again_args, again_kwargs = tree.unflatten(treedef, leaves)
            outs, out_treedef = tree.flatten(fn(*again_args, **again_kwargs))
            structure[:] = [out_treedef]
            return tuple(outs)

        outs = apply_function(_Remat, flat_fn, *(flat[i] for i in places))
        return tree.unflatten(structure[0], list(outs))

    return run


def selective(module: str, fn: Callable[A, R], cfg: TransformerConfig) -> Callable[A, R]:
    """`fn`, recomputed if the config says so of this module."""
    return remat(fn) if module in cfg.recomputed_modules else fn


class _Remat(torch.autograd.Function):
    """(fn, *tensors) -> fn(*tensors). Backward: the gradient of `fn` at the saved tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(fn: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return fn(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.fn = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # Marked, or the compiler would find these expressions equal to the forward's and keep those.
        tensors = [after(t, grads[0]) for t in ctx.saved_tensors]
        places = [i for i, t in enumerate(tensors) if t.is_floating_point()]

        def of_floats(*floats: Tensor) -> tuple[Tensor, ...]:
            now = list(tensors)
            for i, t in zip(places, floats, strict=True):
                now[i] = t
            return ctx.fn(*now)

        out: list[Tensor | None] = [None] * len(tensors)
        for i, grad in zip(places, pull_back(of_floats, tuple(tensors[i] for i in places), grads), strict=True):
            out[i] = grad
        return None, *out

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ValueError("recomputation has reverse-mode derivatives only: for jvp use recompute_granularity=None")

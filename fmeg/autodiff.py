"""The doors to differentiation: how a loss is differentiated, a cotangent pulled back and a custom Function applied.

`torch.compile` over `torch.func.grad` drops the backward of an autograd.Function that is applied directly to a
differentiated input (seen on torch 2.11 to 2.14). All doors alias their tensors first, which avoids it; a lint rule
forbids the bare calls elsewhere. `fmeg.jit` is not affected: it traces before it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmeg import tree


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` on aliases of the tensors in `args`."""
    return function.apply(*(a.view_as(a) if isinstance(a, Tensor) else a for a in args))


def value_and_grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """A function that gives `(value, gradient)` of scalar `fn` with respect to its first argument, a tree of tensors.

    With `has_aux`, `fn` returns `(value, aux)` and so does the result: `((value, aux), gradient)`.

    >>> value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
    (tensor(5.), {'w': tensor([2., 4.])})
    """

    def aliased(params: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(tree.map(lambda t: t.view_as(t), params), *args, **kwargs)

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        gradient, value = torch.func.grad_and_value(aliased, has_aux=has_aux)(params, *args, **kwargs)
        return value, gradient

    return run


def pull_back(fn: Callable[..., Any], primals: tuple[Tensor, ...], cotangents: Any) -> tuple[Tensor, ...]:
    """The vector-Jacobian product of `fn` at `primals`: what each of them gets of the `cotangents` of its result.

    >>> pull_back(lambda x: x**2, (torch.tensor(3.0),), torch.tensor(1.0))
    (tensor(6.),)
    """
    _, pullback, *_ = torch.func.vjp(lambda *inputs: fn(*(t.view_as(t) for t in inputs)), *primals)
    return pullback(cotangents)


def is_concrete(x: Tensor) -> bool:
    """Whether `x` holds values that can be looked at: it is not traced, mapped, differentiated or fake.

    >>> is_concrete(torch.ones(1)), torch.func.vmap(lambda x: x * is_concrete(x))(torch.ones(1))
    (True, tensor([0.]))
    """
    plain = type(x) in (Tensor, torch.nn.Parameter)
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(x) and not torch.compiler.is_compiling()

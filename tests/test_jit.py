"""jit: custom backwards are honoured, donation is safe, nothing is compiled twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import fmeg
from fmeg.autodiff import apply_function, value_and_grad


class Hundred(torch.autograd.Function):
    """Identity whose backward multiplies by 100."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 100 * g


class Reduce(torch.autograd.Function):
    """Sum over simulated ranks (the mapped dimension), whose backward is the identity."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        raise AssertionError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.view_as(g)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        return x.sum(0, keepdim=True).expand_as(x), 0


class Copy(Reduce):
    """Identity, whose backward is the sum over simulated ranks."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return apply_function(Reduce, g)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x.movedim(in_dims[0], 0).clone(), 0


def test_custom_backward_survives_compilation() -> None:
    """A Function applied directly to the differentiated input: torch.compile alone gives [1, 2] here."""

    def gradient(x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0])
        return torch.func.grad(lambda x: (Hundred.apply(x) * weights).sum())(x)

    want = torch.tensor([100.0, 200.0])
    torch.testing.assert_close(gradient(torch.ones(2)), want)
    torch.testing.assert_close(fmeg.jit(gradient)(torch.ones(2)), want)


def test_the_safe_helpers_survive_dynamo_too() -> None:
    """apply_function and value_and_grad are right under torch.compile itself."""

    def loss(x: Tensor) -> Tensor:
        return (apply_function(Hundred, x) * torch.tensor([1.0, 2.0])).sum()

    def gradient(x: Tensor) -> Tensor:
        return value_and_grad(loss)(x)[1]

    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(2)), torch.tensor([100.0, 200.0]))


def test_tensor_parallel_pair_on_two_simulated_ranks() -> None:
    """Copy before and reduce after local weights [1, 10] * (rank + 1): gradient [3, 30] on both ranks."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return apply_function(Reduce, (apply_function(Copy, x) * w).sum())

    def gradient(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.vmap(lambda x, w: value_and_grad(loss)(x, w)[1])(x, w)

    x, w = torch.ones(2, 2), torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    want = torch.tensor([[3.0, 30.0], [3.0, 30.0]])
    torch.testing.assert_close(gradient(x, w), want)
    torch.testing.assert_close(fmeg.jit(gradient)(x, w), want)


def test_donation_writes_in_place_and_keeps_other_results_old() -> None:
    """Outputs that share memory with a donated input keep the value that they had."""

    def swap(pair: tuple[Tensor, Tensor], scale: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        a, b = pair
        return (b, a * scale), a, a.t()[0]

    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.full((2, 2), 7.0)
    want = swap((a.clone(), b.clone()), torch.tensor(10.0))
    run = fmeg.jit(swap, donate=(0,))
    (a2, b2), old, old_row = run((a, b), torch.tensor(10.0))
    assert a2.data_ptr() == a.data_ptr()
    assert b2.data_ptr() == b.data_ptr()
    for have, expected in zip((a2, b2, old, old_row), (*want[0], *want[1:]), strict=True):
        torch.testing.assert_close(have, expected)


def test_without_donation_inputs_are_unchanged() -> None:
    x = torch.ones(3)
    y = fmeg.jit(lambda x: x + 1)(x)
    torch.testing.assert_close(x, torch.ones(3))
    assert y.data_ptr() != x.data_ptr()


def test_one_compilation_per_signature() -> None:
    """Other values compile nothing; another shape, dtype, layout or Python value does."""
    run = fmeg.jit(lambda x, n: x * n)
    before = counters["aot_autograd"]["total"]
    for x in (torch.ones(2, 3), torch.zeros(2, 3)):
        run(x, 2)
    assert (run.num_compiled, counters["aot_autograd"]["total"] - before) == (1, 1)
    run(torch.ones(3, 2).t(), 2)
    run(torch.ones(2, 3), 3)
    assert run.num_compiled == 3
    torch.testing.assert_close(run(torch.ones(3, 2).t(), 2), torch.full((2, 3), 2.0))


def test_repeated_work_is_done_once() -> None:
    """The graph shares equal expressions: two callers of the same norm cost one."""
    graph = fmeg.jit(lambda x: (x.norm() + 1, x.norm() * 2)).trace(torch.ones(3)).graph
    assert sum("norm" in str(node.target) for node in graph.graph.nodes) == 1


def test_python_values_and_none_pass_through() -> None:
    out = fmeg.jit(lambda x: {"y": x + 1, "name": "model", "none": None, "n": 3})(torch.ones(1))
    assert (out["name"], out["none"], out["n"], out["y"].item()) == ("model", None, 3, 2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fmeg.jit(lambda x, y: (x, y), donate=(1,)), "must be the leading ones"),
        (lambda: fmeg.jit(lambda x: x + 1, donate=(0,))(torch.ones(1)), "must be a tuple"),
        (lambda: fmeg.jit(lambda x: (x[:1],), donate=(0,))(torch.ones(2)), r"torch.float32 \(2,\) but torch.float32 \(1,\)"),
    ],
)
def test_bad_donations_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_nested_calls_become_part_of_the_outer_transform() -> None:
    inner = fmeg.jit(lambda x: x.sin() * 2)
    x = torch.tensor([0.5, 1.0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(inner))(x), 2 * x.cos())
    torch.testing.assert_close(fmeg.jit(lambda x: inner(x) + 1)(x), 2 * x.sin() + 1)
    assert inner.num_compiled == 0


def test_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match=r"positional arguments only, got the keywords \['x'\]"):
        fmeg.jit(lambda x: x)(x=torch.ones(1))

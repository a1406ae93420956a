"""Tests of the tests: a parity check sees every wrong backward, gradient law, loss share and dropout position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import RELATIVE, assert_trees_close, random_batch, small_config
from torch import Tensor

import fmeg
from fmeg import random, train_step, tree
from fmeg.layers import loss
from fmeg.models import gpt
from fmeg.sharding import collectives
from fmeg.sharding.collectives import all_gather, all_reduce, forward_context, reduce_scatter
from fmeg.sharding.mesh import Context, Ctx, Mesh
from fmeg.sharding.reshard import reshard
from fmeg.sharding.spec import TP, P

Patch = pytest.MonkeyPatch


def check_model(sp: bool) -> None:
    """Every gradient of a model with repeated key/value heads, biases and dropout, on all kinds of mesh axes."""
    cfg = small_config(
        params_dtype=torch.float64,
        num_layers=1,
        add_bias_linear=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        label_smoothing=0.1,
        tensor_model_parallel_size=4,
        sequence_parallel=sp,
    )
    mesh, alone = fmeg.simulated_mesh(cfg, data_parallel_size=2), one_device(cfg)
    params, batch, key = fmeg.init_params(alone), random_batch(cfg, length=8), random.key(1)
    want, want_metrics = fmeg.make_grad_step(alone, compile=False, key=key)(params, batch)
    step = fmeg.make_grad_step(cfg, mesh=mesh, compile=False, key=key)
    grads, metrics = step(fmeg.shard_params(params, cfg, mesh), batch)
    assert_trees_close(fmeg.unshard_params(grads, cfg, mesh), want, rtol=RELATIVE[torch.float64])
    assert_trees_close(metrics, want_metrics, rtol=RELATIVE[torch.float64])


def one_device(cfg: fmeg.TransformerConfig) -> fmeg.TransformerConfig:
    return cfg.replace(tensor_model_parallel_size=1, sequence_parallel=False)


def check_all_to_all() -> None:
    """The gradient of a function of a resharded array, which no dense model has: sum(w * x^2)."""
    mesh = Mesh((("tp", 2),), TP)
    x, w = (torch.arange(16.0, dtype=torch.float64).view(4, 4).sin() + i for i in range(2))

    def run(ctx: Context, rows: Tensor, columns: Tensor) -> Tensor:
        """This rank's rows of the gradient, from a loss of its columns."""
        return torch.func.grad(lambda rows: (columns * reshard(rows, P("mlp", None), P(None, "mlp"), ctx).square()).sum())(rows)

    parts = fmeg.on_mesh(run, mesh)(torch.stack(x.chunk(2)), torch.stack(w.chunk(2, 1)))
    assert_trees_close(parts.flatten(0, 1), 2 * w * x, rtol=RELATIVE[torch.float64])


def backward(name: str, wrong: Callable[[Any, Tensor], Tensor]) -> Callable[[Patch], None]:
    """A collective's backward replaced."""

    def apply(patch: Patch) -> None:
        patch.setattr(getattr(collectives, name), "backward", staticmethod(lambda ctx, g: (wrong(ctx, g), None, None)))

    return apply


def ranks(ctx: Any) -> int:
    return ctx.mesh.size(ctx.axes)


def first_part(ctx: Any, g: Tensor) -> Tensor:
    """Of the right shape, but the same part on every rank, and nothing summed."""
    return g.narrow(ctx.dims[0], 0, g.shape[ctx.dims[0]] // ranks(ctx))


def repeated(ctx: Any, g: Tensor) -> Tensor:
    return torch.cat([g] * ranks(ctx), ctx.dims[0])


def other_axis(ctx: Any, g: Tensor) -> Tensor:
    return all_reduce(g, ("dp",), forward_context(ctx))


def skip(axis: str) -> Callable[[Patch], None]:
    """The gradient law without one axis."""

    def reduce_grads(grads: Any, specs: Any, ctx: Ctx, *, bucket_size: int) -> Any:
        if ctx is None:
            return grads

        def reduce(grad: Tensor, spec: fmeg.ParamSpec) -> Tensor:
            axes = tuple(a for a in ctx.mesh.unused_axes(spec.axes) if a != axis)
            return all_reduce(grad, axes, ctx)

        return tree.map(reduce, grads, specs)

    return lambda patch: patch.setattr(train_step, "reduce_grads", reduce_grads)


def whole_share(*modules: Any) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        for module in modules:
            patch.setattr(module, "same_tokens", lambda ctx: 1)

    return apply


def local_positions(*dims: int) -> Callable[[Patch], None]:
    """Dropout that takes a rank's place in some dimensions for the first one's."""
    real = random.bernoulli

    def bernoulli(key: Tensor, p: float, shape: Any, *, index: Any) -> Tensor:
        moved = [i if i is None or d not in dims else i - i[:1] for d, i in enumerate(index)]
        return real(key, p, shape, index=tuple(moved))

    return lambda patch: patch.setattr(random, "bernoulli", bernoulli)


MUTATIONS: dict[str, tuple[Callable[[Patch], None], bool]] = {
    "all_reduce as identity": (backward("_AllReduce", lambda ctx, g: g), False),
    "all_reduce as a mean": (
        backward("_AllReduce", lambda ctx, g: all_reduce(g, ctx.axes, forward_context(ctx)) / ranks(ctx)),
        False,
    ),
    "all_reduce over another axis": (backward("_AllReduce", other_axis), False),
    "all_reduce_of_equals as identity": (backward("_AllReduceOfEquals", lambda ctx, g: g), False),
    "all_reduce_of_equals as identity, sequence parallel": (backward("_AllReduceOfEquals", lambda ctx, g: g), True),
    "all_gather as a slice": (backward("_AllGather", first_part), True),
    "all_gather as a mean": (
        backward("_AllGather", lambda ctx, g: reduce_scatter(g, ctx.dims[0], ctx.axes, forward_context(ctx)) / ranks(ctx)),
        True,
    ),
    "all_gather in reverse": (
        backward("_AllGather", lambda ctx, g: reduce_scatter(g, ctx.dims[0], ctx.axes, forward_context(ctx)).flip(ctx.dims[0])),
        True,
    ),
    "reduce_scatter as repetition": (backward("_ReduceScatter", repeated), True),
    "reduce_scatter times the ranks": (
        backward("_ReduceScatter", lambda ctx, g: all_gather(g, ctx.dims[0], ctx.axes, forward_context(ctx)) * ranks(ctx)),
        True,
    ),
    "no sum over dp": (skip("dp"), False),
    "no sum over tp_kv": (skip("tp_kv"), False),
    "no sum over tp_rep": (skip("tp_rep"), False),
    "no sum over tp_kv, sequence parallel": (skip("tp_kv"), True),
    "no sum over tp_rep, sequence parallel": (skip("tp_rep"), True),
    "loss share not divided": (whole_share(loss), False),
    "token count not divided": (whole_share(gpt), False),
    # Both wrong leave the mean and its gradient right; only the count of tokens tells.
    "neither divided": (whole_share(loss, gpt), False),
    "dropout without a rank's rows": (local_positions(0), False),
    "dropout without a rank's heads": (local_positions(1), False),
    "dropout without a rank's positions": (local_positions(1), True),
}


@pytest.mark.parametrize("sp", [False, True])
def test_without_a_mutation_the_check_passes(sp: bool) -> None:
    check_model(sp)
    check_all_to_all()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(name: str, monkeypatch: Patch) -> None:
    mutate, sp = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="differs by"):
        check_model(sp)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ctx, g: g.mT,
        lambda ctx, g: collectives.all_to_all(g, ctx.dims[1], ctx.dims[0], ctx.axes, forward_context(ctx)).flip(0),
    ],
    ids=["transposed", "in reverse"],
)
def test_a_mutation_of_all_to_all_is_seen(wrong: Any, monkeypatch: Patch) -> None:
    backward("_AllToAll", wrong)(monkeypatch)
    with pytest.raises(AssertionError):
        check_all_to_all()

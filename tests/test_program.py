"""A step in segments, and recomputation: nothing of either changes a number, and both are seen in the graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, random_batch, small_config
from torch._subclasses.fake_tensor import FakeTensorMode

import fmeg
from fmeg import tree
from fmeg.autodiff import value_and_grad
from fmeg.jit import Traced
from fmeg.program import Program, run_in_turn
from fmeg.remat import remat

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED: list[dict[str, Any]] = [
    FULL,
    FULL | {"recompute_num_layers": 2},
    FULL | {"recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
]


def trace(cfg: fmeg.TransformerConfig) -> Traced:
    with FakeTensorMode(allow_non_fake_inputs=True):
        params, batch = fmeg.init_params(cfg), tree.map(torch.clone, random_batch(cfg))
        return fmeg.make_grad_step(cfg).trace(params, batch)[0]


def texts(program: Program) -> list[str]:
    return [str(segment.graph.graph) for segment in program.segments]


def products(traced: Traced) -> int:
    return sum(str(node.target).startswith("aten.mm") for node in traced.graph.graph.nodes)


def saved_bytes(program: Program) -> int:
    """What the layers' forwards made and something after them uses."""
    middle = len(program.segments) // 2
    metas = dict(program.metas)
    for segment in program.segments:
        (output,) = segment.graph.graph.find_nodes(op="output")
        metas |= zip(segment.outputs, (node.meta["val"] for node in output.args[0]), strict=True)
    made = {value for segment in program.segments[1:middle] for value in segment.outputs}
    used = {value for segment in program.segments[middle:] for value in segment.inputs}
    return sum(metas[value].nbytes for value in made & used)


def test_equal_layers_are_equal_segments() -> None:
    """Before the layers, each layer, the loss with its gradient, each layer backward, the rest."""
    segments = texts(trace(small_config(num_layers=4, matmul_kernel="torch")).program)
    assert len(segments) == 1 + 4 + 1 + 4 + 1
    assert sorted(Counter(segments).values()) == [1, 1, 1, 4, 4]


def test_a_program_computes_what_its_flat_graph_does_and_compiles_each_kind_of_segment_once() -> None:
    cfg = small_config(num_layers=4, matmul_kernel="torch")
    params, batch = fmeg.init_params(cfg), random_batch(cfg)

    def step(params: Any, batch: Any) -> Any:
        return value_and_grad(lambda params: fmeg.gpt_forward_step(params, batch, cfg, None)[0])(params)

    traced = fmeg.jit(step).trace(params, batch)
    inputs = [*tree.leaves((params, batch)), *traced.constants]
    compiled = []

    def compile(graph: Any, fakes: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph

    have = run_in_turn(traced.program, compile)(*inputs)
    assert len(compiled) == 5
    assert_trees_close(have, traced.graph(*inputs), rtol=1e-6)


def test_what_a_backward_can_cheaply_compute_again_is_not_kept() -> None:
    """What is: what products take and give, but for the second half of a sum; attention's logsumexp; two norms' factors."""
    cfg = small_config(num_layers=4, matmul_kernel="torch", num_query_groups=4)
    per_layer = saved_bytes(trace(cfg).program) / 4 / (4 * 16 * 4)  # fp32 numbers per token
    taken = 32 + 2 * 32 + 32 + 48  # of q, k and v; of the output projection, twice; of gate and up; of down
    assert per_layer == taken + 32 + 3 * 32 + 32 + 2 * 48 + 4 + 2  # the stream; q, k and v; the output; gate and up


@pytest.mark.parametrize("change", RECOMPUTED, ids=str)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_recomputation_changes_no_gradient(change: dict[str, Any], tp: int, rate: float) -> None:
    """Dropout draws the same masks again; sharded, recomputed collectives are the forward's."""
    layout: Any = {"tensor_model_parallel_size": tp, "sequence_parallel": tp == 2}
    rates = {"hidden_dropout": rate, "attention_dropout": rate}
    cfg = small_config(num_layers=3, params_dtype=torch.float64, **rates, **layout)
    key = fmeg.random.key(1) if rate else None
    params, batch = fmeg.init_params(cfg.on_one_device()), random_batch(cfg)
    want, _ = fmeg.make_grad_step(cfg.on_one_device(), compile=False, key=key)(params, batch)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2) if tp == 2 else None
    cfg = cfg.replace(**change)
    have, _ = fmeg.make_grad_step(cfg, mesh=mesh, compile=False, key=key)(fmeg.shard_params(params, cfg, mesh), batch)
    assert_trees_close(fmeg.unshard_params(have, cfg, mesh), want, rtol=1e-9)


def test_a_recomputed_layer_keeps_its_input() -> None:
    """Four of them, and what the last layer gives."""
    cfg = small_config(num_layers=4, matmul_kernel="torch")
    plain, full = trace(cfg), trace(cfg.replace(**FULL))
    residual = 4 * 16 * 32 * 4
    assert saved_bytes(full.program) <= 5 * residual
    assert saved_bytes(full.program) < 0.25 * saved_bytes(plain.program)
    assert products(full) - products(plain) == 4 * 6  # q, k, v, output, gate and up; down is not needed again


def test_blocks_and_units() -> None:
    cfg = small_config(num_layers=5)
    assert cfg.replace(**FULL | {"recompute_num_layers": 2}).recompute_units == ((2, True), (2, True), (1, True))
    block = cfg.replace(**FULL | {"recompute_method": "block", "recompute_num_layers": 2})
    assert block.recompute_units == ((1, True),) * 2 + ((1, False),) * 3
    assert cfg.recompute_units == ((1, False),) * 5


def test_recomputation_under_other_transforms() -> None:
    p = torch.linspace(0.1, 1, 3, dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * p).exp()

    def slope(f: Any) -> Any:
        return lambda x: value_and_grad(lambda x: f(x).sum())(x)[1]

    xs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for transform in (slope, lambda f: torch.func.vmap(slope(f)), lambda f: slope(slope(f))):
        torch.testing.assert_close(transform(remat(f))(xs), transform(f)(xs))
    with pytest.raises(ValueError, match="reverse-mode derivatives only: for jvp use recompute_granularity=None"):
        torch.func.jvp(remat(f), (xs,), (xs,))


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, FULL], ids=["kept", "recomputed"])
def test_engines_give_the_same_step(change: dict[str, Any]) -> None:
    cfg = small_config(num_layers=3, hidden_dropout=0.1, **change)
    opt, key = fmeg.sgd(0.1, momentum=0.9), fmeg.random.key(3)
    state, batch = fmeg.init_state(cfg, opt), random_batch(cfg)
    want, metrics = fmeg.make_train_step(cfg, opt, compile=False, key=key)(state, batch)
    for engine in ("whole", "layerwise"):
        step = fmeg.make_train_step(cfg, opt, engine=engine, donate=True, key=key)  # type: ignore[arg-type]
        have, have_metrics = step(tree.map(torch.clone, state), batch)
        assert_trees_close(have.params, want.params, rtol=2e-5)
        assert_trees_close(have.opt_state, want.opt_state, rtol=1e-4)
        assert_trees_close(have_metrics, metrics, rtol=2e-5)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="engine is fast: must be whole or layerwise"):
        fmeg.make_train_step(small_config(), fmeg.sgd(0.1), engine="fast")  # type: ignore[arg-type]

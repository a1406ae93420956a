"""Collectives have work beside them in the compiled step, gradients are sent in buckets, and no number depends on either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, random_batch, small_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fmeg
from fmeg import tree
from fmeg.overlap import WAIT, is_start, overlap, split_stacks
from fmeg.sharding.mesh import planned_mesh

ROOT = Path(__file__).parents[1]
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def step_graph(cfg: fmeg.TransformerConfig, dp: int = 1) -> GraphModule:
    """Of a gradient step, as one real rank would compile it."""
    mesh = planned_mesh(fmeg.simulated_mesh(cfg, data_parallel_size=dp))
    with FakeTensorMode(allow_non_fake_inputs=True):
        params, batch = fmeg.init_params(cfg, mesh=mesh), tree.map(torch.clone, random_batch(cfg))
        return fmeg.make_grad_step(cfg, mesh=mesh)._whole.trace(params, batch, None).graph  # type: ignore[attr-defined]


def tensor_parallel(**changes: Any) -> fmeg.TransformerConfig:
    return small_config(num_layers=3, matmul_kernel="torch", tensor_model_parallel_size=2, sequence_parallel=True, **changes)


def is_product(node: Node) -> bool:
    return str(node.target).startswith(("aten.mm", "aten.bmm"))


def is_view(node: Node) -> bool:
    return str(node.target).startswith(("aten.split", "aten.unbind", "<built-in function getitem")) or getattr(
        node.target, "is_view", False
    )


def ancestors(node: Node) -> set[Node]:
    found, waiting = {node}, [node]
    while waiting:
        fresh = [arg for arg in waiting.pop().all_input_nodes if arg not in found]
        found.update(fresh)
        waiting += fresh
    return found


@pytest.mark.parametrize("cfg", [tensor_parallel(), tensor_parallel(bf16=True), small_config(num_layers=3)])
def test_the_order_changes_and_nothing_else(cfg: fmeg.TransformerConfig) -> None:
    before = step_graph(cfg, dp=2)
    after = overlap(before)
    after.graph.lint()
    lines = [sorted(node.format_node() or "" for node in graph.graph.nodes if node.op != "output") for graph in (before, after)]
    assert lines[0] == lines[1]
    (have,), (want,) = (graph.graph.find_nodes(op="output") for graph in (after, before))
    assert str(have.args) == str(want.args)
    assert str(overlap(step_graph(cfg, dp=2)).graph) == str(after.graph)


def test_a_weight_gradient_is_computed_while_its_input_gradient_is_sent() -> None:
    """Each sublayer's reduce-scatter in the backward has all its weight gradients between start and wait."""
    nodes = list(overlap(step_graph(tensor_parallel())).graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    backward = next(i for i, node in enumerate(nodes) if node.target is FLASH_BACKWARD)
    beside = []
    for node in nodes[backward:]:
        if "reduce_scatter" in str(node.target):
            (wait,) = (user for user in node.users if user.target is WAIT)
            beside.append(sum(is_product(other) for other in nodes[place[node] : place[wait]]))
    # From the last attention to the first: query, key, value and output, then gate, up and down.
    assert beside == [4, 3, 4, 3, 4]


def test_every_wait_comes_before_its_first_use() -> None:
    nodes = list(overlap(step_graph(tensor_parallel(), dp=2)).graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if node.target is WAIT and node.users:
            views = {node}
            for other in nodes[place[node] + 1 :]:
                if not is_view(other) or not set(other.all_input_nodes) & views:
                    break
                views.add(other)
            assert set(other.all_input_nodes) & views, f"{other} comes between {node} and its use"


def test_buckets_leave_while_the_backward_is_at_work() -> None:
    """A bucket for each layer: it is sent before the next layer's attention goes backward, and needs nothing of it."""
    cfg = small_config(num_layers=3, matmul_kernel="torch", ddp_bucket_size=5000)
    nodes = list(overlap(step_graph(cfg, dp=2)).graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    layers = [node for node in nodes if node.target is FLASH_BACKWARD]
    assert len(layers) == 3
    buckets = [node for node in nodes if is_start(node) and node.meta["val"].numel() >= 5000]
    assert [len(ancestors(bucket) & set(layers)) for bucket in buckets][:2] == [1, 2]
    assert place[layers[0]] < place[buckets[0]] < place[layers[1]] < place[buckets[1]] < place[layers[2]]
    waits = [place[user] for bucket in buckets for user in bucket.users]
    assert min(waits) > place[layers[2]]


def test_rows_of_a_stack_are_taken_directly() -> None:
    def stacked(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        both = torch.stack([a * 2, b * 3]).view(2, 6).double()
        return [row + 1 for row in both.unbind(0)] + [torch.stack([a, b], 1).unbind(0)[1]]

    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    graph = make_fx(stacked, tracing_mode="fake")(a, b)
    split_stacks(graph)
    assert_trees_close(graph(a, b), stacked(a, b), rtol=0)
    stacks = [node for node in graph.graph.nodes if node.target is torch.ops.aten.stack.default and node.users]
    assert len(stacks) == 1  # the one along another dimension


@pytest.mark.parametrize("bucket_size", [1, 1500, 10**9])
def test_gradients_do_not_depend_on_the_bucket_size(bucket_size: int) -> None:
    cfg = tensor_parallel(params_dtype=torch.float64, ddp_bucket_size=bucket_size)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    grads, _ = fmeg.make_grad_step(cfg, mesh=mesh, compile=False)(fmeg.init_params(cfg, mesh=mesh), random_batch(cfg))
    alone = cfg.replace(tensor_model_parallel_size=1, sequence_parallel=False)
    want, _ = fmeg.make_grad_step(alone, compile=False)(fmeg.init_params(alone), random_batch(cfg))
    assert_trees_close(fmeg.unshard_params(tree.map(lambda g: g, grads), cfg, mesh), want, rtol=1e-9)


def test_a_bucket_holds_its_size_or_a_little_more() -> None:
    """Of 3 layers with 9 parameters each, and 3 others; the losses' and counts' sum is one more."""
    counts = {}
    for size in (1, 5000, 10**9):
        cfg = small_config(num_layers=3, ddp_bucket_size=size)
        said = fmeg.explain(cfg, fmeg.simulated_mesh(cfg, data_parallel_size=2)).collectives
        counts[size] = next(c.count for c in said if c.direction == "gradient") - 1
    assert counts[1] == 3 * 9 + 3 and counts[10**9] == 1
    layer = 2 * 32 + 32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48
    assert counts[5000] == 3 * layer // 5000 + 1


@pytest.mark.slow
def test_inductor_keeps_the_order() -> None:
    """In the generated code every collective starts, and is waited for, where the graph says."""
    program = ROOT / "tests" / "multiproc" / "generated.py"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in order" in done.stdout

"""What `explain` says of a step is what its compiled graph does, and the page about it is made from it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_batch, small_config
from torch._subclasses.fake_tensor import FakeTensorMode

import fmeg
from fmeg import tree
from fmeg.autodiff import value_and_grad
from fmeg.explain import KINDS
from fmeg.params import ZEROS, ParamSpec
from fmeg.sharding.mesh import Context, Mesh, planned_mesh
from fmeg.sharding.spec import TP, TP_SP, Rules

PAGE = (Path(__file__).parents[1] / "docs" / "parallelism.md").read_text()


def kinds(graph: torch.fx.Graph) -> Counter[str]:
    """The collectives of a graph, by torch's names."""
    names = [str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("_c10d_functional")]
    return Counter(KINDS[name] for name in names if name != "wait_tensor")


@pytest.mark.parametrize(("tp", "sp", "dp"), [(2, False, 1), (4, True, 2), (1, False, 4)])
def test_the_parts_say_what_the_whole_compiled_step_does(tp: int, sp: bool, dp: int) -> None:
    cfg, opt = small_config(tensor_model_parallel_size=tp, sequence_parallel=sp), fmeg.adamw(0.1)
    mesh = planned_mesh(fmeg.simulated_mesh(cfg, data_parallel_size=dp))
    with FakeTensorMode(allow_non_fake_inputs=True):
        state, batch = fmeg.init_state(cfg, opt, mesh=mesh), tree.map(torch.clone, random_batch(cfg))
        step = fmeg.make_train_step(cfg, opt, mesh=mesh)
        graph = step._whole.trace(state, batch, None).graph.graph  # type: ignore[attr-defined]
    said: Counter[str] = Counter()
    for one in fmeg.explain(cfg, mesh).collectives:
        said[one.kind.removesuffix(" max")] += one.count
    assert said == kinds(graph) and said


def test_on_one_device_nothing_is_sent() -> None:
    said = fmeg.explain(small_config())
    assert said.collectives == () and said.mesh == ()


@pytest.mark.parametrize("sp", [False, True])
def test_microbatches_repeat_forward_and_backward_but_not_the_reduction(sp: bool) -> None:
    cfg = small_config(tensor_model_parallel_size=2, sequence_parallel=sp)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    once, thrice = (fmeg.explain(cfg, mesh, num_microbatches=n) for n in (1, 3))
    for a, b in zip(once.collectives, thrice.collectives, strict=True):
        times = 1 if a.direction == "gradient" else 3
        assert b == replace(a, count=times * a.count, bytes=times * a.bytes)


@pytest.mark.parametrize("opt", [fmeg.adamw(0.1), fmeg.sgd(0.1), fmeg.sgd(0.1, momentum=0.9)])
def test_bytes_are_those_of_the_arrays_that_a_rank_holds(opt: fmeg.Optimizer) -> None:
    cfg = small_config(tensor_model_parallel_size=4, vocab_size=200)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    state = fmeg.init_state(cfg, opt, mesh=mesh)

    def of_one_rank(arrays: Any) -> int:
        return sum(leaf[0].numel() * leaf.element_size() for leaf in tree.leaves(arrays))

    said = fmeg.explain(cfg, mesh, opt=opt)
    assert (said.parameter_bytes, said.optimizer_bytes) == (of_one_rank(state.params), of_one_rank(state.opt_state))
    assert said.gradient_bytes == said.parameter_bytes
    assert said.parameters == fmeg.count_params(fmeg.gpt_specs(cfg))


def test_bytes_of_a_layer_are_those_of_the_residual_stream() -> None:
    """One all-reduce of [B, T, D] in fp32 after each sublayer, another before each in the backward."""
    cfg = small_config(tensor_model_parallel_size=2)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    two, three = (fmeg.explain(cfg.replace(num_layers=n), mesh, batch=random_batch(cfg)).collectives for n in (2, 3))
    for direction in ("forward", "backward"):
        a, b = (next(c for c in said if (c.direction, c.kind) == (direction, "all-reduce")) for said in (two, three))
        assert (b.count - a.count, b.bytes - a.bytes) == (2, 2 * (2 * 16 * 32 * 4))


def test_thousands_of_ranks_are_planned_without_them() -> None:
    cfg = small_config(num_attention_heads=8, num_query_groups=8, ffn_hidden_size=64, tensor_model_parallel_size=8)
    said = fmeg.explain(cfg, fmeg.simulated_mesh(cfg, data_parallel_size=2048))
    assert said.mesh == (("dp", 2048), ("tp", 8)) and said.batch["tokens"] == (2048, 32)
    few = fmeg.explain(cfg, fmeg.simulated_mesh(cfg, data_parallel_size=2))
    assert said.collectives == few.collectives  # what a rank sends does not depend on how many receive it


def test_another_model_is_explained_by_its_own_specs() -> None:
    cfg, specs = small_config(), {"w": ParamSpec((8,), fmeg.P("embed"), ZEROS)}

    def forward_step(params: Any, batch: Any, cfg: Any, ctx: Any, *, key: Any = None) -> Any:
        return (batch["x"] * params["w"]).sum(), torch.tensor(1.0), {}

    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    batch = {"x": torch.empty(4, 8, device="meta")}
    said = fmeg.explain(cfg, mesh, batch=batch, forward_step=forward_step, specs=specs, opt=fmeg.sgd(0.1))
    assert [(c.kind, c.axes, c.count, c.bytes) for c in said.collectives] == [("all-reduce", ("dp",), 2, 8 + 32)]
    assert said.parameters == 8


def test_json_holds_all_of_it() -> None:
    cfg = small_config(tensor_model_parallel_size=2)
    said = fmeg.explain(cfg, fmeg.simulated_mesh(cfg))
    read = json.loads(said.to_json())
    assert read["parameter_bytes"] == said.parameter_bytes and read["mesh"] == [["tp", 2]]
    assert [fmeg.Collective(**c | {"axes": tuple(c["axes"])}) for c in read["collectives"]] == list(said.collectives)


def test_a_config_is_refused_as_by_the_step() -> None:
    cfg = small_config(tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"^tensor_model_parallel_size is 2 but mesh is None"):
        fmeg.explain(cfg)


def test_the_rank_is_not_in_the_graph() -> None:
    """Two ranks trace the same program, so that a compiler cache that they share serves both."""
    cfg, opt = small_config(tensor_model_parallel_size=2, sequence_parallel=True), fmeg.adamw(0.1)
    code = []
    for rank in (0, 3):
        plan = planned_mesh(fmeg.simulated_mesh(cfg, data_parallel_size=2))
        mesh = Mesh(plan.axes, plan.rules, plan.groups, torch.tensor(rank))
        with FakeTensorMode(allow_non_fake_inputs=True):
            state, batch = fmeg.init_state(cfg, opt, mesh=mesh), tree.map(torch.clone, random_batch(cfg))
        code.append(fmeg.make_train_step(cfg, opt, mesh=mesh)._whole.trace(state, batch, None).graph.code)  # type: ignore[attr-defined]
    assert code[0] == code[1]


ROWS = {
    "sharded -> replicated": (fmeg.P("mlp", None), fmeg.P(None, None)),
    "unreduced -> replicated": (fmeg.P(None, None, unreduced="mlp"), fmeg.P(None, None)),
    "unreduced -> sharded": (fmeg.P(None, None, unreduced="mlp"), fmeg.P("mlp", None)),
    "sharded on i -> sharded on j": (fmeg.P("mlp", None), fmeg.P(None, "mlp")),
    "replicated -> sharded": (fmeg.P(None, None), fmeg.P("mlp", None)),
}
LOCAL = {"index_select": "slice", "index_add": "pad with zeros"}


def sent(src: fmeg.P, dst: fmeg.P) -> tuple[str, str]:
    """What reshard becomes, forward and backward, from the traced graph of its gradient."""
    mesh = planned_mesh(Mesh((("tp", 4),), TP))
    assert mesh.rank is not None
    ctx = Context(mesh, mesh.rank)

    def reshard(x: torch.Tensor) -> torch.Tensor:
        return fmeg.reshard(x, src, dst, ctx).square().sum()

    names = []
    for fn in (reshard, value_and_grad(reshard)):
        graph = fmeg.jit(fn).trace(torch.ones(4, 4)).graph.graph
        targets = [str(node.target).split(".")[1] for node in graph.nodes if node.op == "call_function"]
        names.append([(KINDS | LOCAL)[target] for target in targets if target in KINDS | LOCAL])
    (forward,), (again, backward) = names
    assert again == forward
    return forward, backward


def test_the_table_of_reshard() -> None:
    table = ["| src -> dst | forward | backward |", "|---|---|---|"]
    table += [f"| {name} | {' | '.join(sent(src, dst))} |" for name, (src, dst) in ROWS.items()]
    assert "\n".join(table) + "\n" in PAGE, "docs/parallelism.md should hold\n" + "\n".join(table)


def per_layer(rules: Rules | None) -> str:
    """What one more layer sends, forward and backward."""
    cfg = small_config(tensor_model_parallel_size=1 if rules is None else 2, sequence_parallel=rules == TP_SP)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    counts: list[Counter[tuple[str, str]]] = []
    for layers in (1, 2):
        said = fmeg.explain(cfg.replace(num_layers=layers), mesh).collectives
        counts.append(Counter({(c.direction, c.kind): c.count for c in said if c.direction != "gradient"}))
    more = sorted((counts[1] - counts[0]).items())
    cells = [[f"{n} {kind}s" for (which, kind), n in more if which == direction] for direction in ("forward", "backward")]
    return " | ".join(", ".join(cell) or "-" for cell in cells)


def test_the_table_of_a_layer() -> None:
    rows = {"one device, or `dp` alone": None, "`TP`": TP, "`TP_SP`": TP_SP}
    table = ["| rules | forward | backward |", "|---|---|---|"]
    table += [f"| {name} | {per_layer(rules)} |" for name, rules in rows.items()]
    assert "\n".join(table) + "\n" in PAGE, "docs/parallelism.md should hold\n" + "\n".join(table)

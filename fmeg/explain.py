"""`explain(cfg, mesh)`: what a step sends and what a rank holds, read from the traced graph of the real step."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from fmeg import tree
from fmeg.backends.matmul import choose_kernels
from fmeg.config import TransformerConfig
from fmeg.jit import Traced
from fmeg.models.gpt import gpt_forward_step, gpt_specs
from fmeg.optim import Optimizer, adamw
from fmeg.params import ParamSpec, Specs, count_params
from fmeg.sharding.mesh import Mesh, check_mesh, planned_mesh
from fmeg.sharding.spec import Axes
from fmeg.train_step import Batch, ForwardStep, TrainState, make_train_step

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """What one rank sends of one kind, over some mesh axes together, in one step.

    `kind`: all-reduce (or "all-reduce max"), all-gather, reduce-scatter or all-to-all. `direction`: forward, backward or
    gradient, which is all that follows the last microbatch. `bytes`: of the arrays, whole, not of the messages: what an
    all-gather makes, what the others take, added up over `count` calls.
    """

    direction: str
    kind: str
    axes: Axes
    count: int
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """A step's collectives and a rank's memory; prints as a table. Bytes are per rank."""

    mesh: tuple[tuple[str, int], ...]
    rules: str
    batch: dict[str, tuple[int, ...]]
    num_microbatches: int
    matmul_kernel: str
    """The kernel that "auto" was resolved to on this machine, or the named one."""
    parameters: int
    """Number of parameters of the model, padding not counted."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    collectives: tuple[Collective, ...]

    def to_json(self) -> str:
        """All of it as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh) or "one device"
        sizes = (("parameters", self.parameter_bytes), ("gradients", self.gradient_bytes), ("optimizer", self.optimizer_bytes))
        lines = [
            f"{self.parameters:,} parameters on {axes}, rules {self.rules}; matmul kernel {self.matmul_kernel}",
            f"bytes per rank: {', '.join(f'{name} {size:,}' for name, size in sizes)}",
        ]
        if not self.collectives:
            return "\n".join([*lines, "no collectives"])
        rows = [("direction", "collective", "axes", "count", "bytes per step")]
        rows += [(c.direction, c.kind, " ".join(c.axes), f"{c.count:,}", f"{c.bytes:,}") for c in self.collectives]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [x.rjust(w) if i > 2 else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def explain(
    cfg: TransformerConfig,
    mesh: Mesh | None = None,
    *,
    opt: Optimizer | None = None,
    batch: Batch | None = None,
    num_microbatches: int = 1,
    forward_step: ForwardStep = gpt_forward_step,
    specs: Specs | None = None,
) -> Explanation:
    """The collectives of one train step and the bytes that one rank holds, without running or allocating anything.

    `mesh`: that of the processes, or `simulated_mesh(cfg, ...)` of any size as a plan. `opt`: AdamW if not given. `batch`:
    tensors of the global batch's shapes, on the meta device if you like; if not given one sequence of the longest length
    for each data-parallel rank and microbatch. The rest are `make_train_step`'s. The step is traced as it would be for a
    process of a real mesh, on tensors without storage.

    Errors: those of `make_train_step`.

    >>> cfg = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=96, hidden_dropout=0.0,
    ...     attention_dropout=0.0, max_position_embeddings=16)
    >>> print(explain(cfg))
    3,424 parameters on one device, rules UNSHARDED; matmul kernel ...
    bytes per rank: parameters 15,744, gradients 15,744, optimizer 31,496
    no collectives
    >>> from fmeg.sharding.mesh import simulated_mesh
    >>> tp = cfg.replace(tensor_model_parallel_size=2)
    >>> explain(tp, simulated_mesh(tp, data_parallel_size=512)).collectives[0]
    Collective(direction='forward', kind='all-reduce', axes=('tp',), count=6, bytes=2624)
    """
    check_mesh(cfg, mesh)
    cfg = choose_kernels(cfg, mesh)
    specs = gpt_specs(cfg) if specs is None else specs
    opt = adamw(1e-3) if opt is None else opt
    plan = None if mesh is None else planned_mesh(mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = tree.map(lambda spec: torch.zeros(_local_shape(spec, plan), dtype=cfg.params_dtype), specs)
        state = TrainState(torch.zeros((), dtype=torch.int64), params, opt.init(params))
        if batch is None:
            size = num_microbatches * (1 if plan is None else plan.size(plan.axes_of("batch")))
            shape = (size, cfg.max_position_embeddings)
            batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}
        else:
            batch = {name: torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in batch.items()}
        step = make_train_step(
            cfg, opt, mesh=plan, forward_step=forward_step, specs=specs, num_microbatches=num_microbatches, check=None
        )
        gradient, finish = step.trace(state, batch)
    counted = Counter(_forward_and_backward(gradient, plan) * num_microbatches + _collectives(finish, "gradient", plan))
    return Explanation(
        mesh=() if plan is None else plan.axes,
        rules="UNSHARDED" if plan is None else plan.rules.name,
        batch={name: tuple(leaf.shape) for name, leaf in batch.items()},
        num_microbatches=num_microbatches,
        matmul_kernel=cfg.matmul_kernel,
        parameters=count_params(specs),
        parameter_bytes=_bytes(state.params),
        gradient_bytes=_bytes(tree.map(lambda node: node.meta["val"], gradient.outputs[0])),
        optimizer_bytes=_bytes(state.opt_state),
        collectives=_merge(counted),
    )


def _local_shape(spec: ParamSpec, mesh: Mesh | None) -> tuple[int, ...]:
    return spec.stored if mesh is None else mesh.local_shape(spec.stored, spec.axes)


class _Call(NamedTuple):
    direction: str
    kind: str
    axes: Axes
    bytes: int


def _forward_and_backward(gradient: Traced, mesh: Mesh | None) -> list[_Call]:
    """What the sums of losses and counts are made from is the forward, the rest of the graph the backward."""
    forward: set[Node] = set()
    waiting = [node for node in tree.leaves(gradient.outputs[1]) if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node not in forward:
            forward.add(node)
            waiting += node.all_input_nodes
    return _collectives(gradient, "forward", mesh, forward) + _collectives(
        gradient, "backward", mesh, set(gradient.graph.graph.nodes) - forward
    )


def _collectives(traced: Traced, direction: str, mesh: Mesh | None, nodes: set[Node] | None = None) -> list[_Call]:
    """Each collective among some of a graph's nodes, in order."""
    if mesh is None or mesh.groups is None:
        return []
    axes_of = {name: axes for axes, name in mesh.groups}
    calls = []
    for node in traced.graph.graph.nodes:
        kind = KINDS.get(getattr(node.target, "__name__", "").split(".")[0])
        if kind is None or node.target.namespace != "_c10d_functional" or (nodes is not None and node not in nodes):
            continue
        if "max" in node.args:
            kind += " max"
        size = max(_bytes(node.meta["val"]), _bytes(node.args[0].meta["val"]))
        calls.append(_Call(direction, kind, axes_of[node.args[-1]], size))
    return calls


def _merge(counted: Counter[_Call]) -> tuple[Collective, ...]:
    """Calls of one kind together, whatever their sizes, in the order of the first."""
    total: dict[tuple[str, str, Axes], list[int]] = {}
    for call, count in counted.items():
        sums = total.setdefault((call.direction, call.kind, call.axes), [0, 0])
        sums[0] += count
        sums[1] += count * call.bytes
    return tuple(Collective(*what, *sums) for what, sums in total.items())


def _bytes(tensors: Any) -> int:
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in tree.leaves(tensors) if isinstance(leaf, Tensor))

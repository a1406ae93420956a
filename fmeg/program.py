"""A traced step in segments: cut where layers begin, planned and compiled once for each kind of layer.

A model calls `layer_boundary(x)` between layers. In the flat graph of a step these marks delimit segments: what comes before
the layers, each layer's forward, the part that has forward and backward together, each layer's backward in reverse, and
the rest. A layer's two segments are partitioned anew by a minimum cut, so that the backward computes cheap things again
instead of loading them; then the program is one flat graph again, or a list of graphs of which the equal ones are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.dialect.common.cse_pass import CSEPass

from fmeg.fusion import AFTER, BOUNDARY


class Segment(NamedTuple):
    """A graph whose placeholders are `inputs` and whose results are `outputs`: values of the program, by number.

    Its nodes are named by their place, so that graphs that compute the same are written the same.
    """

    graph: GraphModule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Program(NamedTuple):
    """Segments in order over numbered values. `metas`: a fake tensor for each value that a segment takes."""

    inputs: tuple[int, ...]
    segments: tuple[Segment, ...]
    outputs: tuple[int, ...]
    metas: dict[int, Any]


def plan(graph: GraphModule) -> Program:
    """The program of a flat graph: cut at the marks, equal expressions shared, each layer's backward planned."""
    program, pairs, marked = _cut(graph)
    segments = list(program.segments)
    paired = {i for pair in pairs for i in pair}
    for i in range(len(segments)):
        if i not in paired:
            segments[i] = _share_equal_expressions(segments[i])
    fresh = itertools.count(1 + max(program.metas, default=0))
    planned: dict[Any, tuple[GraphModule, GraphModule, _Wires]] = {}
    for f, b in pairs:
        segments[f], segments[b] = _plan_pair(program, f, b, marked, planned, fresh)
    return program._replace(segments=tuple(_without_after(segment) for segment in segments))


def flatten(program: Program) -> GraphModule:
    """The program as one flat graph."""
    graph = Graph()
    env = {value: _placeholder(graph, program.metas[value], f"x_{i}") for i, value in enumerate(program.inputs)}
    for segment in program.segments:
        env |= zip(segment.outputs, _copy_into(graph, segment.graph, [env[v] for v in segment.inputs]), strict=True)
    graph.output([env[value] for value in program.outputs])
    return GraphModule({}, graph)


def run_in_turn(program: Program, compile: Callable[[GraphModule, list[Tensor]], Callable[..., Any]]) -> Callable[..., Any]:
    """A function of the program's inputs that runs one compiled segment after another. Equal segments are compiled once."""
    metas = dict(program.metas)
    compiled: dict[Any, Callable[..., Any]] = {}
    calls: list[tuple[Callable[..., Any], Segment]] = []
    for segment in program.segments:
        metas |= zip(segment.outputs, (node.meta["val"] for node in _outputs(segment.graph)), strict=True)
        fakes = [metas[value] for value in segment.inputs]
        key = (_text(segment.graph), tuple(map(_description, fakes)))
        if key not in compiled:
            compiled[key] = compile(segment.graph, fakes)
        calls.append((compiled[key], segment))
    last_use = {value: i for i, segment in enumerate(program.segments) for value in segment.inputs}
    dead = [
        [value for value in {*segment.inputs, *segment.outputs} if last_use.get(value, i) <= i and value not in program.outputs]
        for i, segment in enumerate(program.segments)
    ]

    def run(*tensors: Tensor) -> list[Tensor]:
        env = dict(zip(program.inputs, tensors, strict=True))
        for (call, segment), done in zip(calls, dead, strict=True):
            env |= zip(segment.outputs, call(*(env[value] for value in segment.inputs)), strict=True)
            for value in done:
                del env[value]
        return [env[value] for value in program.outputs]

    return run


def _cut(graph_module: GraphModule) -> tuple[Program, list[tuple[int, int]], set[int]]:
    """The segments between marks, the pairs of a layer's forward and backward, and the values that were marked."""
    place: dict[Node, int] = {}
    same: dict[Node, Node] = {}  # a mark is the value that it marks
    members: list[list[Node]] = [[]]
    pairs: list[tuple[int, int]] = []
    open_marks: list[int] = []  # for each mark whose backward has not come: the segment that it begins
    ended: tuple[int, int] | None = None  # the last backward mark: the segment that its forward began, and its own
    marked: set[Node] = set()
    for node in graph_module.graph.nodes:
        if node.target is BOUNDARY:
            x, backward = node.args
            same[node] = same.get(x, x)
            members.append([])
            here = len(members) - 1
            if not backward:
                marked.add(same[node])
                open_marks.append(here)
                ended = None
            elif open_marks:
                began = open_marks.pop()
                if ended is not None and ended[0] == began + 1 and ended[1] == here - 1:
                    pairs.append((began, here - 1))
                ended = (began, here)
        elif node.op == "call_function":
            place[node] = len(members) - 1
            members[-1].append(node)
    number = {node: i for i, node in enumerate(graph_module.graph.nodes)}

    def value(node: Node) -> Node:
        return same.get(node, node)

    result = [value(node) for node in _outputs(graph_module)]
    uses: dict[Node, set[int]] = {node: {-1} for node in result}
    takes: list[dict[Node, None]] = [{} for _ in members]
    for i, nodes in enumerate(members):
        for arg in (value(arg) for node in nodes for arg in node.all_input_nodes):
            uses.setdefault(arg, set()).add(i)
            if place.get(arg) != i:
                takes[i][arg] = None
    segments = []
    for i, nodes in enumerate(members):
        gives = [node for node in nodes if uses.get(node, {i}) - {i}]
        module = _extract(nodes, list(takes[i]), gives, value)
        segments.append(Segment(module, tuple(number[n] for n in takes[i]), tuple(number[n] for n in gives)))
    inputs = tuple(number[n] for n in graph_module.graph.nodes if n.op == "placeholder")
    metas = {number[n]: n.meta["val"] for n in number if n.op == "placeholder" or n in place}
    program = Program(inputs, tuple(segments), tuple(number[n] for n in result), metas)
    return program, pairs, {number[n] for n in marked}


def _extract(nodes: Sequence[Node], takes: list[Node], gives: list[Node], value: Callable[[Node], Node]) -> GraphModule:
    graph = Graph()
    env = {node: _placeholder(graph, node.meta["val"], f"x_{i}") for i, node in enumerate(takes)}
    for node in nodes:
        env[node] = _copy_node(graph, node, lambda arg: env[value(arg)])
    graph.output([env[value(node)] for node in gives])
    return GraphModule({}, graph)


def _share_equal_expressions(segment: Segment) -> Segment:
    """Compute equal expressions once; inductor alone would compute each."""
    shared = CSEPass()(segment.graph)
    assert shared is not None  # a pass may return nothing by its type; this one never does
    return segment._replace(graph=_renamed(shared.graph_module))


def _without_after(segment: Segment) -> Segment:
    """Take out the marks of what is to be computed late: the plan is made."""
    same: dict[Node, Node] = {}
    for node in segment.graph.graph.nodes:
        if node.target is AFTER:
            same[node] = same.get(node.args[0], node.args[0])
    return segment._replace(graph=_renamed(segment.graph, same)) if same else segment


class _Wires(NamedTuple):
    """How the two graphs of a planned layer are connected, by place in lists of the original one's values."""

    saved: int
    """How many values the forward gives besides its original outputs that are used elsewhere."""
    sources: tuple[tuple[str, int], ...]
    """For each input of the backward: ("saved", i), ("primal", i) or ("tangent", i)."""
    primals: tuple[int, ...]
    """Which primals the forward still takes."""


def _plan_pair(
    program: Program,
    f: int,
    b: int,
    marked: set[int],
    planned: dict[Any, tuple[GraphModule, GraphModule, _Wires]],
    fresh: Iterator[int],
) -> tuple[Segment, Segment]:
    """A layer's forward and backward, with what passes from one to the other chosen anew. Equal layers are planned once."""
    forward, backward = program.segments[f], program.segments[b]
    elsewhere = {v for i, s in enumerate(program.segments) if i != b for v in s.inputs} | set(program.outputs)
    kept = [v for v in forward.outputs if v in elsewhere]
    before = set(program.inputs).union(*(s.outputs for s in program.segments[:f]))
    primals = [*forward.inputs, *(v for v in backward.inputs if v in before and v not in forward.inputs)]
    tangents = [v for v in backward.inputs if v not in before and v not in forward.outputs]
    order = {v: ("primal", i) for i, v in enumerate(primals)} | {v: ("tangent", i) for i, v in enumerate(tangents)}
    order |= {v: ("forward", i) for i, v in enumerate(forward.outputs)}
    key = (
        _text(forward.graph),
        _text(backward.graph),
        tuple(order[v] for v in backward.inputs),
        tuple(order[v] for v in kept),
        tuple(_description(program.metas[v]) for v in (*primals, *tangents)),
    )
    if key not in planned:
        joint = _joint(program, forward, backward, primals, tangents, kept)
        static = [i for i, v in enumerate(primals) if v not in marked]
        planned[key] = _partition(joint, len(kept), static)
    first, second, wires = planned[key]
    saved = [next(fresh) for _ in range(wires.saved)]
    values = {"saved": saved, "primal": primals, "tangent": tangents}
    return (
        Segment(first, tuple(primals[i] for i in wires.primals), (*kept, *saved)),
        Segment(second, tuple(values[kind][i] for kind, i in wires.sources), backward.outputs),
    )


def _joint(
    program: Program, forward: Segment, backward: Segment, primals: list[int], tangents: list[int], kept: list[int]
) -> GraphModule:
    """One graph of (primals, tangents), named as the partitioner wants them, to (kept, the backward's outputs)."""
    graph, env = Graph(), {}
    for kind, values in (("primals", primals), ("tangents", tangents)):
        for i, v in enumerate(values):
            env[v] = _placeholder(graph, program.metas[v], f"{kind}_{i + 1}")
    for segment in (forward, backward):
        env |= zip(segment.outputs, _copy_into(graph, segment.graph, [env[v] for v in segment.inputs]), strict=True)
    output = graph.output([env[v] for v in (*kept, *backward.outputs)])
    output.meta["desc"] = [None] * len(output.args[0])
    return GraphModule({}, graph)


def _partition(joint: GraphModule, num_kept: int, static: list[int]) -> tuple[GraphModule, GraphModule, _Wires]:
    """torch's min-cut partitioner (the one of AOTAutograd). `static`: primals that live through the step anyway."""
    forward, backward = min_cut_rematerialization_partition(
        joint, None, num_fwd_outputs=num_kept, static_lifetime_input_indices=static
    )
    primal_of = {n.name: int(n.name.removeprefix("primals_")) - 1 for n in joint.graph.nodes if n.name.startswith("primals_")}
    given = _outputs(forward)
    saved = [node for node in given[num_kept:] if node.name not in primal_of]
    index = {node.name: i for i, node in enumerate(saved)}

    def source(node: Node) -> tuple[str, int]:
        if node.name in primal_of:
            return "primal", primal_of[node.name]
        if node.name in index:
            return "saved", index[node.name]
        return "tangent", int(str(node.target).removeprefix("tangents_")) - 1

    sources = tuple(source(node) for node in backward.graph.nodes if node.op == "placeholder")
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    nodes = [node for node in forward.graph.nodes if node.op == "call_function"]
    first = _extract(nodes, inputs, [*given[:num_kept], *saved], lambda node: node)
    return first, _renamed(backward), _Wires(len(saved), sources, tuple(primal_of[node.name] for node in inputs))


def _renamed(module: GraphModule, same: Mapping[Node, Node] = MappingProxyType({})) -> GraphModule:
    """A copy whose nodes are named by their place, with the nodes of `same` replaced."""
    nodes = list(module.graph.nodes)
    takes = [node for node in nodes if node.op == "placeholder"]
    rest = [node for node in nodes if node.op == "call_function" and node not in same]
    return _extract(rest, takes, _outputs(module), lambda node: same.get(node, node))


def _copy_into(graph: Graph, module: GraphModule, inputs: list[Node]) -> list[Node]:
    """Append a module's nodes to a graph; returns its results there."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    env = dict(zip(placeholders, inputs, strict=True))
    for node in module.graph.nodes:
        if node.op == "call_function":
            env[node] = _copy_node(graph, node, env.__getitem__)
    return [env[node] for node in _outputs(module)]


def _copy_node(graph: Graph, node: Node, image: Callable[[Node], Node]) -> Node:
    new = graph.create_node("call_function", node.target, map_arg(node.args, image), map_arg(node.kwargs, image))
    new.meta["val"] = node.meta.get("val")
    return new


def _placeholder(graph: Graph, val: Any, name: str) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = val
    return node


def _outputs(module: GraphModule) -> list[Node]:
    return list(next(node for node in reversed(module.graph.nodes) if node.op == "output").args[0])


def _text(module: GraphModule) -> str:
    return str(module.graph)


def _description(val: Tensor) -> Any:
    return tuple(val.shape), tuple(val.stride()), val.dtype, val.device

"""Overlap in a compiled sharded step: where in the graph a collective starts, and where it is waited for.

A traced graph waits for each collective at once. `overlap` moves a start up to where what it sends is there, a wait down to
where its result is first used, and puts between the two what the collective does not need. Nothing of it changes a number.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
_PACKING = {_aten.cat.default, _aten.stack.default, _aten.clone.default, _aten._to_copy.default}
_LISTS_OF_VIEWS = {_aten.split_with_sizes.default, _aten.unbind.int, operator.getitem}
_VIEWS_OF_ROWS = {_aten.view.default, _aten._unsafe_view.default}


def is_start(node: Node) -> bool:
    """Whether a node starts a collective; its result is there after a wait."""
    return (
        node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not WAIT
    )


def has_collectives(graph_module: GraphModule) -> bool:
    """Whether anything is sent in a graph."""
    return any(map(is_start, graph_module.graph.nodes))


def overlap(graph_module: GraphModule) -> GraphModule:
    """The same graph in an order in which collectives have work beside them.

    A start follows the last thing it sends; what only packs it (views, a cast, a concatenation) goes with it. A wait, and the
    views of its result, come before its first use. Of the work before a start that will be waited for soon, what the start
    needs comes first. Work is carried past two such starts at most, and past no wait, so that nothing is kept for long. The
    order depends on the graph alone: it is the same on every rank.
    """
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in _needed_first(_early_and_late(list(graph_module.graph.nodes))):
        env[node] = graph.node_copy(node, env.__getitem__)
    return GraphModule({}, graph)


def split_stacks(graph_module: GraphModule) -> None:
    """Take each row of a stack directly: `unbind(stack(rows))`, with views and casts between, becomes the rows.

    The gradient of stacked layers is the stack of the layers' gradients; a bucket of some layers' gradients would wait
    for all layers.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not _aten.unbind.int or (len(node.args) > 1 and node.args[1] != 0):
            continue
        chain: list[Node] = []
        source: Any = node.args[0]
        rows = source.meta["val"].shape[:1]
        while source.target in _VIEWS_OF_ROWS | {_aten._to_copy.default} and source.args[0].meta["val"].shape[:1] == rows:
            chain.append(source)
            source = source.args[0]
        if source.target is not _aten.stack.default or (len(source.args) > 1 and source.args[1] != 0):
            continue
        for user in list(node.users):
            row = source.args[0][user.args[1]]
            with graph.inserting_before(user):
                for link in reversed(chain):
                    row = _on_a_row(graph, link, row)
            user.replace_all_uses_with(row)
            graph.erase_node(user)
        for dead in (node, *chain, source):
            if not dead.users:
                graph.erase_node(dead)
    graph_module.recompile()


def _on_a_row(graph: Graph, link: Node, row: Node) -> Node:
    args = (row, list(link.meta["val"].shape[1:])) if link.target in _VIEWS_OF_ROWS else (row,)
    new = graph.call_function(link.target, args, link.kwargs)  # type: ignore[arg-type]
    new.meta["val"] = link.meta["val"][0]
    return new


def _early_and_late(nodes: list[Node]) -> list[Node]:
    """Starts as soon as their arguments are there, waits and the views of their results before the first use."""
    late: set[Node] = set()
    for node in nodes:
        if node.target is WAIT or (_is_view(node) and any(arg in late for arg in node.all_input_nodes)):
            late.add(node)
    packing = {n for n in nodes if (_is_view(n) or n.target in _PACKING) and n not in late and _is_only_sent(n)}
    # A start that sends what another one received stays where it was: sooner would mean to wait sooner.
    chained = {node for node in packing if any(arg in late for arg in node.all_input_nodes)}
    for node in nodes:
        if (node in packing or is_start(node)) and any(arg in chained or arg in late for arg in node.all_input_nodes):
            chained.add(node)
    place = {node: i for i, node in enumerate(nodes)}
    started: dict[Node, list[Node]] = {}  # by the last of the other nodes that a start needs
    for node in nodes:
        if is_start(node) and node not in chained:
            needs = _closure(node, packing)
            last = max((arg for n in needs for arg in n.all_input_nodes if arg not in needs), key=place.__getitem__)
            started.setdefault(last, []).append(node)
    order: dict[Node, None] = {}

    def emit(node: Node) -> None:
        for arg in node.all_input_nodes:
            if arg not in order:
                emit(arg)  # a late one, or what packs a start: nothing else is missing here
        order[node] = None
        for start in started.get(node, ()):
            if start not in order:
                emit(start)

    for node in nodes:
        if node not in order and node not in late and (node not in packing or node in chained):
            emit(node)
    for node in nodes:  # results that nobody waits to use
        if node not in order:
            order[node] = None
    output = next(node for node in order if node.op == "output")
    del order[output]
    return [*order, output]


def _needed_first(nodes: list[Node]) -> list[Node]:
    """Between one collective and the next start: first what the start needs, then the start, then the rest."""
    urgent = _urgent_starts(nodes)
    order: list[Node] = []
    carried: list[Node] = []  # over a start already
    region: list[Node] = []
    for node in nodes:
        if node in urgent:
            needs = _closure(node, {*carried, *region})
            order += [n for n in (*carried, *region) if n in needs]
            order += [node, *(n for n in carried if n not in needs)]
            carried, region = [n for n in region if n not in needs], []
        elif node.target is WAIT or node.op != "call_function":
            order += [*carried, *region, node]
            carried, region = [], []
        else:
            region.append(node)
    return order + carried + region


def _urgent_starts(nodes: list[Node]) -> set[Node]:
    """Those that others depend on, and that are waited for before a later one has come and gone: gradients have time."""
    urgent = set()
    under_way: dict[Node, bool] = {}  # in the order of the starts: whether a later one has come and gone
    for node in nodes:
        if is_start(node):
            under_way[node] = False
        elif node.target is WAIT:
            (start,) = node.all_input_nodes
            for other in list(under_way)[: list(under_way).index(start)]:
                under_way[other] = True
            if not under_way.pop(start):
                urgent.add(start)
    leads_to_a_start: set[Node] = set()
    for node in reversed(nodes):
        if any(is_start(user) or user in leads_to_a_start for user in node.users):
            leads_to_a_start.add(node)
    return urgent & leads_to_a_start


def _closure(node: Node, within: set[Node]) -> set[Node]:
    """A node and what it needs of some others, directly or through one another."""
    found, waiting = {node}, [node]
    while waiting:
        fresh = [arg for arg in waiting.pop().all_input_nodes if arg in within and arg not in found]
        found.update(fresh)
        waiting += fresh
    return found


def _is_only_sent(node: Node) -> bool:
    """Whether all uses of a node are starts, of itself or of what packs it."""
    return bool(node.users) and all(
        is_start(user) or ((_is_view(user) or user.target in _PACKING) and _is_only_sent(user)) for user in node.users
    )


def _is_view(node: Node) -> bool:
    return node.target in _LISTS_OF_VIEWS or getattr(node.target, "is_view", False)

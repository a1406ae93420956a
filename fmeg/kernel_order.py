"""What keeps inductor to the order of a graph. Imported when something is compiled: it loads inductor's scheduler."""

from __future__ import annotations

import heapq
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomSchedulerPass, get_hash_for_files
from torch._inductor.scheduler import BaseSchedulerNode


def keep_order() -> AbstractContextManager[Any]:
    """Inductor's settings under which kernels come in the order of the graph's nodes."""
    return torch._inductor.config.patch(
        reorder_for_locality=False, reorder_for_peak_memory=False, _post_fusion_custom_pass=_WhereTheLastWas()
    )


class _WhereTheLastWas(CustomSchedulerPass):
    """Fused kernels at the place of the last of their parts.

    Inductor alone puts one at the place of the first, after all that the other parts need: a wait, say, far too early.
    """

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        maker = {name: node for node in nodes for name in node.get_buffer_names()}
        missing = {node: {maker[dep.name] for dep in node.unmet_dependencies if dep.name in maker} - {node} for node in nodes}
        users: dict[BaseSchedulerNode, list[BaseSchedulerNode]] = {node: [] for node in nodes}
        for node, needs in missing.items():
            for need in needs:
                users[need].append(node)
        place = {node: (node.max_order, i) for i, node in enumerate(nodes)}
        ready = [(place[node], node) for node in nodes if not missing[node]]
        heapq.heapify(ready)
        order = []
        while ready:
            _, node = heapq.heappop(ready)
            order.append(node)
            for user in users[node]:
                missing[user].discard(node)
                if not missing[user]:
                    heapq.heappush(ready, (place[user], user))
        return order

    def uuid(self) -> Any:
        """What inductor's disk cache knows this pass by."""
        return get_hash_for_files((__file__,))

"""`P`: the layout of an array in terms of *logical* axes, the names that layers and parameters use.

A rules table maps logical axes to the axes of a mesh. On a single device nothing is mapped, so every layout is the whole
array and a `P` only documents and checks what a layer says about its arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LOGICAL_AXES = {
    "batch": "sequences of a batch",
    "seq": "positions, inside attention and MLP",
    "residual_seq": "positions of the residual stream, norms and dropout (sharded by sequence parallelism)",
    "embed": "model width D",
    "heads": "query heads N",
    "kv_heads": "key/value heads K",
    "head_dim": "size of one head H",
    "mlp": "MLP width F",
    "vocab": "vocabulary V",
    "positions": "rows of the learned position table",
    "layers": "stacked layers L",
}


Axes = tuple[str, ...]
"""Mesh axes, major to minor."""


class Rules(NamedTuple):
    """Which mesh axes each logical axis is sharded over. What the table does not name is replicated."""

    name: str
    table: tuple[tuple[str, Axes], ...]

    def axes_of(self, logical: str | None) -> Axes:
        """The mesh axes of a logical axis."""
        return dict(self.table).get(logical, ()) if logical is not None else ()


_TENSOR = (("heads", ("tp",)), ("kv_heads", ("tp_kv",)), ("mlp", ("tp",)), ("vocab", ("tp",)))
UNSHARDED = Rules("UNSHARDED", ())
TP = Rules("TP", (("batch", ("dp",)), *_TENSOR))
TP_SP = Rules("TP_SP", (("batch", ("dp",)), ("residual_seq", ("tp",)), *_TENSOR))
"""Data parallelism is in every table: a mesh axis of size 1 vanishes."""


class P(tuple[str | None, ...]):
    """A PartitionSpec: one logical axis (or None) per dimension, and the axes over which a sum is still pending.

    `P("batch", "seq", "embed", unreduced="mlp")` is what a matrix product over a sharded `mlp` axis leaves: every rank
    holds a partial sum of the whole array.

    >>> P("batch", "seq", "embed", unreduced="mlp")
    P('batch', 'seq', 'embed', unreduced='mlp')
    >>> P("batch", "time")
    Traceback (most recent call last):
    ValueError: unknown logical axis 'time' in P('batch', 'time'): use batch, seq, residual_seq, embed, heads, kv_heads, ...
    """

    unreduced: tuple[str, ...]

    def __new__(cls, *axes: str | None, unreduced: str | Iterable[str] = ()) -> P:
        self = super().__new__(cls, axes)
        self.unreduced = (unreduced,) if isinstance(unreduced, str) else tuple(unreduced)
        for axis in (*axes, *self.unreduced):
            if axis is not None and axis not in LOGICAL_AXES:
                raise ValueError(f"unknown logical axis {axis!r} in {self}: use {', '.join(LOGICAL_AXES)} or None")
        named = [axis for axis in (*axes, *self.unreduced) if axis is not None]
        for axis in named:
            if named.count(axis) > 1:
                raise ValueError(f"logical axis {axis!r} appears twice in {self}: a layout uses each axis once")
        return self

    def __repr__(self) -> str:
        parts = [repr(axis) for axis in self]
        if self.unreduced:
            parts.append("unreduced=" + (repr(self.unreduced[0]) if len(self.unreduced) == 1 else repr(self.unreduced)))
        return f"P({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and tuple(self) == tuple(other) and self.unreduced == other.unreduced

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.unreduced))

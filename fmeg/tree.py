"""The one door to pytrees: nested dicts, tuples and NamedTuples of leaves. `None` holds no leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

Tree = Any
PyTreeSpec = optree.PyTreeSpec


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn` to every leaf of `tree`, with the leaves of `rest` at the same place.

    >>> map(lambda a, b: a + b, {"x": 1, "y": (2,)}, {"x": 10, "y": (20,)})
    {'x': 11, 'y': (22,)}
    """
    return optree.tree_map(fn, tree, *rest)


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`map`, with the leaf's path as the first argument of `fn`.

    >>> map_with_path(lambda path, leaf: f"{path}={leaf}", {"mlp": {"up": 1}})
    {'mlp': {'up': 'mlp/up=1'}}
    """
    return optree.tree_map_with_accessor(lambda path, *leaves: fn(_join(path), *leaves), tree, *rest)


def leaves(tree: Tree) -> list[Any]:
    """The leaves, dict keys in sorted order.

    >>> leaves({"b": 1, "a": (2, None, 3)})
    [2, 3, 1]
    """
    return optree.tree_leaves(tree)


def flatten(tree: Tree) -> tuple[list[Any], PyTreeSpec]:
    """Leaves and the structure that `unflatten` puts them back into; structures compare and hash by value."""
    flat, treedef = optree.tree_flatten(tree)
    return flat, treedef


def unflatten(treedef: PyTreeSpec, flat: list[Any]) -> Tree:
    """The inverse of `flatten`.

    >>> flat, treedef = flatten({"b": 1, "a": 2})
    >>> unflatten(treedef, flat)
    {'b': 1, 'a': 2}
    """
    return optree.tree_unflatten(treedef, flat)


def flatten_with_path(tree: Tree) -> list[tuple[str, Any]]:
    """Pairs of path and leaf: dict keys, field names and indices, joined by slashes.

    >>> flatten_with_path({"layers": {"up": 1, "down": (2,)}})
    [('layers/down/0', 2), ('layers/up', 1)]
    """
    paths, flat, _ = optree.tree_flatten_with_accessor(tree)
    return [(_join(path), leaf) for path, leaf in zip(paths, flat, strict=True)]


def from_paths(items: dict[str, Any]) -> dict[str, Any]:
    """A nested dict from leaves named by path; the inverse of `flatten_with_path` for nested dicts.

    >>> from_paths({"layers/up": 1, "norm": 2})
    {'layers': {'up': 1}, 'norm': 2}
    """
    out: dict[str, Any] = {}
    for path, leaf in items.items():
        node = out
        *parents, last = path.split("/")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return out


def _join(path: optree.PyTreeAccessor) -> str:
    return "/".join(str(part.field if isinstance(part, optree.NamedTupleEntry) else part.entry) for part in path)

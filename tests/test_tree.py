"""Pytrees: order, paths, and what is a leaf."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from fmeg import tree

NAMES = st.text("abc_", min_size=1, max_size=3)
NESTED = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=8)
DICTS = st.dictionaries(NAMES, NESTED, min_size=1, max_size=3)


class Pair(NamedTuple):
    """A NamedTuple with a field that is a tree."""

    left: Any
    right: Any


@given(DICTS)
@settings(deadline=None, derandomize=True)
def test_flatten_and_paths_have_inverses(nested: dict[str, Any]) -> None:
    flat, treedef = tree.flatten(nested)
    assert tree.unflatten(treedef, flat) == nested
    paths = tree.flatten_with_path(nested)
    assert [leaf for _, leaf in paths] == flat == tree.leaves(nested)
    assert tree.from_paths(dict(paths)) == nested


@given(DICTS)
@settings(deadline=None, derandomize=True)
def test_the_order_in_which_a_dict_was_filled_does_not_matter(nested: dict[str, Any]) -> None:
    def reverse(node: Any) -> Any:
        return {k: reverse(v) for k, v in reversed(node.items())} if isinstance(node, dict) else node

    assert tree.flatten(reverse(nested)) == tree.flatten(nested)
    assert hash(tree.flatten(reverse(nested))[1]) == hash(tree.flatten(nested)[1])


def test_paths_name_keys_fields_and_indices() -> None:
    value = {"a": Pair({"x": 1}, (2, [3, None])), "b": None}
    assert tree.flatten_with_path(value) == [("a/left/x", 1), ("a/right/0", 2), ("a/right/1/0", 3)]


def test_map_keeps_the_structure_and_takes_leaves_of_the_same_place() -> None:
    a, b = Pair({"x": 1, "y": None}, (2,)), Pair({"x": 10, "y": None}, (20,))
    assert tree.map(lambda x, y: x + y, a, b) == Pair({"x": 11, "y": None}, (22,))
    assert tree.map_with_path(lambda path, x, y: (path, x - y), {"p": a}, {"p": b}) == {
        "p": Pair({"x": ("p/left/x", -9), "y": None}, (("p/right/0", -18),))
    }

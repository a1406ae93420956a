"""What the configs are checked with: errors of one line, with the value, what is allowed and what to do."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints


class Replaceable:
    """`replace` for the config classes."""

    def replace(self, **changes: Any) -> Self:
        """A copy with the fields changed, validated again.

        >>> from fmeg import TrainConfig
        >>> TrainConfig(train_iters=10).replace(train_iters=20).train_iters
        20
        """
        known = [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        for name in changes:
            if name not in known:
                close = difflib.get_close_matches(name, known, 3) or sorted(known)
                raise TypeError(f"{type(self).__name__} has no field {name!r}; did you mean {', '.join(close)}?")
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def check_types(cfg: Any) -> None:
    """Every field holds a value of its annotation; an int may stand for a float, a bool for nothing but a bool."""
    for name, annotation in get_type_hints(type(cfg)).items():
        value = getattr(cfg, name)
        classes = {get_origin(option) or option for option in _options(annotation)}
        if Literal in classes:
            continue
        if float in classes and type(value) is int:
            continue
        if not isinstance(value, tuple(classes)) or (isinstance(value, bool) and bool not in classes):
            names = either("None" if c is type(None) else c.__name__ for c in sorted(classes, key=str))
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: must be of type {names}")


def check_literals(cfg: Any) -> None:
    """Every field annotated `Literal[...]`, or that or None, holds one of its values."""
    for name, annotation in get_type_hints(type(cfg)).items():
        value, options = getattr(cfg, name), _options(annotation)
        if get_origin(options[0]) is Literal:
            allowed = [*get_args(options[0]), *(None for option in options[1:])]
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}: must be {either(repr(a) for a in allowed)}")


def _options(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)


def require(ok: bool, name: str, value: Any, allowed: str) -> None:
    """Refuse a value that is not `allowed`."""
    if not ok:
        raise ValueError(f"{name} is {value}: must be {allowed}")


def positive_int(name: str, value: Any) -> None:
    """Refuse what is no integer above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}: must be a positive integer")


def divisors(n: int) -> list[int]:
    """Every divisor of `n`, in order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def either(values: Iterable[Any]) -> str:
    """Values as text: a, b or c."""
    *first, last = [str(v) for v in values]
    return f"{', '.join(first)} or {last}" if first else last

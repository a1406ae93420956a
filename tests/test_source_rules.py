"""Rules that every file of fmeg/ keeps, read from its syntax tree: the doors to differentiation, no hidden state, examples."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import fmeg

ROOT = Path(fmeg.__file__).parent
FILES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
FUNCTIONAL_DOOR = "autodiff.py"
DERIVATIVES = {"grad", "grad_and_value", "vjp"}
RANDOM_FUNCTIONS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"),
    *("multinomial", "poisson", "binomial", "manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state"),
    *("Generator", "default_generator", "dropout", "alpha_dropout", "feature_dropout", "native_dropout", "gumbel_softmax"),
}
RANDOM_METHODS = {
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
    *("manual_seed", "multinomial", "bernoulli"),
}
MUTATING = {
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update", "setdefault", "popitem"),
    *("add", "discard", "__setitem__"),
}

every_file = pytest.mark.parametrize("name", FILES)


def imports(module: ast.Module) -> dict[str, str]:
    """What each imported name stands for: `import torch.nn.functional as F` makes F of it."""
    found = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def references(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is looked up on an imported name, and of the imports themselves."""
    known = imports(module)
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in known:
            yield node.lineno, ".".join([known[inner.id], *reversed(parts)])


def method_calls(module: ast.Module) -> Iterator[tuple[int, ast.expr, str]]:
    """Line, receiver and name of every `x.name(...)`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, node.func.value, node.func.attr


def functions_of_autograd(module: ast.Module) -> set[str]:
    return {
        node.name
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)
    }


ALL_FUNCTIONS = set().union(*(functions_of_autograd(module) for module in FILES.values()))


def bare_applies(module: ast.Module) -> list[int]:
    """Lines where a custom Function is applied without the door: `F.apply(...)`, or a mention of `F.apply`."""
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and node.attr == "apply"
        and ast.unparse(node.value).rpartition(".")[2] in ALL_FUNCTIONS | {"function"}
    ]


def derivatives(module: ast.Module) -> list[tuple[int, str]]:
    owners = ("torch.func", "torch._functorch", "functorch", "torch.autograd")
    return [
        (line, name) for line, name in references(module) if name.startswith(owners) and name.rpartition(".")[2] in DERIVATIVES
    ]


def stateful_random(module: ast.Module) -> list[tuple[int, str]]:
    found = [
        (line, name)
        for line, name in references(module)
        if (name.rpartition(".")[2] in RANDOM_FUNCTIONS and name.startswith(("torch", "numpy")))
        or name.startswith(("random.", "numpy.random", "secrets."))
    ]
    known = imports(module)
    for line, receiver, method in method_calls(module):
        ours = isinstance(receiver, ast.Name) and known.get(receiver.id) == "fmeg.random"
        if method in RANDOM_METHODS and not ours:
            found.append((line, f"{ast.unparse(receiver)}.{method}"))
    return found


def environment(module: ast.Module) -> list[tuple[int, str]]:
    return [(line, name) for line, name in references(module) if name.startswith(("os.environ", "os.getenv", "os.putenv"))]


def module_level_containers(module: ast.Module) -> set[str]:
    """Names that the module's own body binds to a list, dict or set."""
    kinds = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    names = set()
    for node in module.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        made = isinstance(value, ast.Call) and ast.unparse(value.func) in {"list", "dict", "set", "defaultdict", "deque"}
        if isinstance(value, kinds) or made:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


ALL_CONTAINERS = set().union(*(module_level_containers(module) for module in FILES.values()))


def mutations(module: ast.Module) -> list[tuple[int, str]]:
    """Where a function changes a container of a module, under its own or an imported name."""
    found = [
        (line, receiver.id)
        for line, receiver, method in method_calls(module)
        if isinstance(receiver, ast.Name) and receiver.id in ALL_CONTAINERS and method in MUTATING
    ]
    for node in ast.walk(module):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        for target in targets:
            owner = target.value if isinstance(target, ast.Subscript) else None
            if isinstance(owner, ast.Name) and owner.id in ALL_CONTAINERS:
                found.append((node.lineno, owner.id))
    return found


MEASUREMENTS = {"_seconds"}
"""What may be remembered for the process, because it is a property of the machine: measured twice it would differ by noise."""


def caches(module: ast.Module) -> list[int]:
    """Functions of a module or class that remember results: state too, unlike what a closure remembers while it lives."""
    bodies = [module.body, *(node.body for node in module.body if isinstance(node, ast.ClassDef))]
    return [
        node.lineno
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef)
        and node.name not in MEASUREMENTS
        and any(ast.unparse(d).partition("(")[0].endswith(("lru_cache", "cache")) for d in node.decorator_list)
    ]


@every_file
def test_custom_functions_and_derivatives_go_through_the_door(name: str) -> None:
    if name != FUNCTIONAL_DOOR:
        assert bare_applies(FILES[name]) == [], "use fmeg.autodiff.apply_function"
        assert derivatives(FILES[name]) == [], "use fmeg.autodiff.value_and_grad"


@every_file
def test_nothing_is_read_or_kept_outside_of_arguments(name: str) -> None:
    module = FILES[name]
    assert [node.lineno for node in ast.walk(module) if isinstance(node, ast.Global)] == [], "no global variables"
    assert environment(module) == [], "no environment variables"
    assert mutations(module) == [], "a module's containers are constants"
    assert caches(module) == [], "no caches that outlive their maker"


@every_file
def test_nothing_draws_from_a_stateful_generator(name: str) -> None:
    assert stateful_random(FILES[name]) == [], "use fmeg.random"


@every_file
def test_nothing_is_printed(name: str) -> None:
    """But by the loop around the step, whose output it is."""
    if not name.startswith("training/"):
        calls = [n for n in ast.walk(FILES[name]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        assert [n.lineno for n in calls if n.func.id == "print"] == []  # type: ignore[attr-defined]


def test_the_rules_see_what_they_forbid() -> None:
    """Each rule on a line that breaks it and on one that does not."""
    function = next(iter(ALL_FUNCTIONS))
    container = next(iter(ALL_CONTAINERS))
    broken = {
        bare_applies: [f"y = {function}.apply(x)", f"f = attention.{function}.apply"],
        derivatives: [
            "import torch\ng = torch.func.grad(f)",
            "from torch.func import vjp",
            "import torch.func as tf\ntf.grad_and_value(f)",
            "import torch\ntorch.autograd.grad(y, x)",
        ],
        stateful_random: [
            "import torch\ntorch.randn(3)",
            "import torch.nn.functional as F\nF.dropout(x)",
            "import torch\nx = torch.empty(3).normal_()",
            "import random\nrandom.random()",
            "import numpy as np\nnp.random.default_rng(0)",
            "from torch import rand",
        ],
        environment: ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"],
        mutations: [f"{container}['a'] = 1", f"{container}.update(a=1)", f"{container} += [1]\ndel {container}[0]"],
        caches: ["import functools\n@functools.lru_cache(None)\ndef f(): ..."],
    }
    fine = """
import functools
import torch
import torch.nn.functional as F
from fmeg import random
y = apply_function(_FlashCPU, x)
z = layer.attention.apply(p, x)
value_and_grad(f)(params)
torch.func.vmap(f)(F.gelu(x))
random.bernoulli(key, 0.5, (3,)), random.normal(key, (3,))
def f():
    @functools.cache
    def g(): ...
seen = []
seen.append(1)
"""
    for rule, sources in broken.items():
        for source in sources:
            assert rule(ast.parse(source)) != [], f"{rule.__name__} misses {source!r}"
        assert rule(ast.parse(fine)) == [], rule.__name__


def is_plain_data(value: object) -> bool:
    """A NamedTuple or a dataclass: its fields say what it is."""
    return inspect.isclass(value) and (hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__"))


@pytest.mark.parametrize("name", fmeg.__all__)
def test_a_public_name_has_a_docstring_with_an_example(name: str) -> None:
    value = getattr(fmeg, name)
    doc = value.__doc__ or ""
    # Without a docstring a dataclass or NamedTuple shows its signature there.
    assert doc and not doc.startswith(f"{name}("), f"fmeg.{name} has no docstring"
    if not is_plain_data(value):
        assert ">>>" in doc, f"fmeg.{name} has no example"


def test_the_public_names_are_those_imported() -> None:
    bound = imports(FILES["__init__.py"])
    assert sorted(bound) == sorted(fmeg.__all__)

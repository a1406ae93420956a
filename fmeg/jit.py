"""`jit(fn, donate)`: trace a pure function to one flat graph, edit the graph, compile it.

Tracing first (`make_fx` runs eager functorch, so every custom backward is honoured) and compiling the flat graph after is
what makes compiled gradients equal eager ones: `torch.compile` over `torch.func.grad` can drop a custom backward silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fmeg import tree
from fmeg.autodiff import is_concrete
from fmeg.overlap import has_collectives, overlap, split_stacks
from fmeg.program import Program, flatten, plan, run_in_turn
from fmeg.validation import either, require

A = ParamSpec("A")
R = TypeVar("R")
Engine = Literal["whole", "layerwise"]
"""whole: one graph is compiled, and all of it can be fused and scheduled together. layerwise: the segments between layers are
compiled, equal ones once, so that the time to compile does not grow with the number of layers."""


class Traced(NamedTuple):
    """A flat graph over the tensor leaves of the arguments, and the structure of its result."""

    graph: GraphModule
    program: Program
    """The same in segments, as its layers are marked."""
    treedef: tree.PyTreeSpec
    leaves: list[Any]
    """The result's leaves: None where the graph gives a tensor, else the Python value itself."""
    constants: list[Tensor]
    """Tensors that the function closed over: further inputs of the graph, so that the graph is the same on every rank."""

    @property
    def outputs(self) -> Any:
        """The function's result, with the graph's nodes in place of the tensors."""
        nodes = iter(next(n for n in self.graph.graph.nodes if n.op == "output").args[0])
        return tree.unflatten(self.treedef, [next(nodes) if leaf is None else leaf for leaf in self.leaves])


def jit(fn: Callable[A, R], *, donate: Sequence[int] = (), engine: Engine = "whole") -> Jitted[A, R]:
    """A compiled `fn`, a pure function of trees of tensors. Positional arguments only.

    Compiled once per structure, shapes, strides, dtypes and devices of the arguments; a Python number or string is part of
    the structure, so pass what changes as a tensor. `donate`: positions of arguments whose memory the result may take:
    argument i is overwritten by the i-th element of the result, a tuple, and must not be used again. `engine`: how the graph
    is compiled, "whole" or "layerwise". Called inside another jit, vmap or grad, the function simply becomes part of it.

    >>> double = jit(lambda x: {"y": 2 * x["x"]})
    >>> double({"x": torch.ones(2)})
    {'y': tensor([2., 2.])}
    >>> double.num_compiled
    1
    """
    if list(donate) != list(range(len(donate))):
        raise ValueError(f"donate={tuple(donate)}: donated arguments must be the leading ones: (0,), (0, 1), ...")
    require(engine in get_args(Engine), "engine", engine, either(get_args(Engine)))
    return Jitted(fn, tuple(donate), engine)


class Jitted(Generic[A, R]):
    """What `jit` returns: call it like the function; `trace` gives the graph that is compiled."""

    def __init__(self, fn: Callable[A, R], donate: tuple[int, ...], engine: Engine) -> None:
        self._fn = fn
        self._donate = donate
        self._engine = engine
        self._compiled: dict[Any, tuple[Callable[..., Any], Traced]] = {}

    @property
    def num_compiled(self) -> int:
        """How many graphs have been compiled so far."""
        return len(self._compiled)

    def trace(self, *args: A.args, **kwargs: A.kwargs) -> Traced:
        """The flat graph for these arguments, with the donated buffers written at its end. Tensors may be fake."""
        return _trace(self._fn, self._donate, args)

    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> R:
        if kwargs:
            raise TypeError(f"a jitted function takes positional arguments only, got the keywords {sorted(kwargs)}")
        flat, treedef = tree.flatten(args)
        if not all(is_concrete(leaf) for leaf in flat if isinstance(leaf, Tensor)):
            return self._fn(*args, **kwargs)  # inside another trace or transform: become part of it
        signature = (treedef, tuple(_signature(leaf) for leaf in flat))
        if signature not in self._compiled:
            traced = _trace(self._fn, self._donate, args)
            if self._engine == "layerwise":
                compiled = run_in_turn(traced.program, _compile)
            else:
                compiled = _compile(traced.graph, [traced.program.metas[value] for value in traced.program.inputs])
            self._compiled[signature] = compiled, traced
        run, traced = self._compiled[signature]
        outs = iter(run(*(leaf for leaf in flat if isinstance(leaf, Tensor)), *traced.constants))
        return tree.unflatten(traced.treedef, [next(outs) if leaf is None else leaf for leaf in traced.leaves])


def _compile(graph: GraphModule, tensors: list[Tensor]) -> Callable[..., Any]:
    """Compile a flat graph for tensors of exactly these shapes and strides, which may be fake.

    Inductor is called directly: Dynamo would retrace the flat graph and check guards at every call, for nothing, since
    the signature is the guard. The fake tensors carry a shape environment because inductor's disk cache asks for one.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fakes: list[Any] = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
    from fmeg.kernel_order import keep_order

    sends = has_collectives(graph)
    with torch.no_grad(), keep_order() if sends else nullcontext():
        return torch._inductor.compile(overlap(graph) if sends else graph, fakes)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf


def _trace(fn: Callable[..., Any], donate: tuple[int, ...], args: tuple[Any, ...]) -> Traced:
    flat, treedef = tree.flatten(args)
    result: tuple[Any, Any] = ([], None)

    def run(*tensors: Tensor) -> list[Tensor]:
        nonlocal result
        source = iter(tensors)
        out = fn(*tree.unflatten(treedef, [next(source) if isinstance(leaf, Tensor) else leaf for leaf in flat]))
        _check_donation(args, out, donate)
        out_flat, out_treedef = tree.flatten(out)
        result = ([None if isinstance(leaf, Tensor) else leaf for leaf in out_flat], out_treedef)
        return [leaf for leaf in out_flat if isinstance(leaf, Tensor)]

    tensors = [leaf.detach() for leaf in flat if isinstance(leaf, Tensor)]
    graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    constants = _lift_constants(graph)
    if any(_writes(node) for node in graph.graph.nodes):
        functional = torch.func.functionalize(graph)
        graph = make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors, *constants)
    split_stacks(graph)
    _donate_buffers(graph, args, donate)
    program = plan(graph)
    return Traced(flatten(program), program, result[1], result[0], constants)


def _lift_constants(graph_module: GraphModule) -> list[Tensor]:
    """Make the tensors that were closed over inputs of the graph, after the others; returns them."""
    graph, constants = graph_module.graph, []
    last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        constants.append(getattr(graph_module, str(node.target)))
        with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
            last = graph.placeholder(f"constant_{len(constants)}")
        last.meta["val"] = constants[-1]
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    graph_module.recompile()
    return constants


def _writes(node: Node) -> bool:
    """Whether an operation writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _check_donation(args: tuple[Any, ...], out: Any, donate: tuple[int, ...]) -> None:
    for i in donate:
        if not isinstance(out, tuple) or i >= len(out):
            raise ValueError(f"donate={donate}: the result must be a tuple with an element {i}, but is {type(out).__name__}")
        want, have = dict(tree.flatten_with_path(args[i])), dict(tree.flatten_with_path(out[i]))
        for path in want.keys() | have.keys():
            a, b = want.get(path), have.get(path)
            if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
                raise ValueError(
                    f"donate={donate}: leaf {path!r} of argument {i} is {_describe(a)} but {_describe(b)} in element {i} "
                    "of the result: they must be tensors of the same shape and dtype"
                )


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{leaf!r}"


def _donate_buffers(graph_module: GraphModule, args: tuple[Any, ...], donate: tuple[int, ...]) -> None:
    """Append a copy of each donated argument's successor into the argument itself."""
    if not donate:
        return
    graph = graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    outs: list[Node] = list(output.args[0])
    # Donated arguments lead, and so do their successors, in the same structure: their leaves pair up in order.
    num = sum(isinstance(leaf, Tensor) for leaf in tree.leaves([args[i] for i in donate]))
    donated = inputs[:num]
    storages = {_storage(node) for node in donated}
    with graph.inserting_before(output):
        for j, out in enumerate(outs):
            # An output that shares memory with a donated input would see the new values: give it its own.
            kept = j < num and out is donated[j]
            if _storage(out) in storages and not kept:
                outs[j] = graph.call_function(torch.ops.aten.clone.default, (out,))
                outs[j].meta["val"] = out.meta["val"]
        for j, target in enumerate(donated):
            if outs[j] is not target:
                graph.call_function(torch.ops.aten.copy_.default, (target, outs[j])).meta["val"] = target.meta["val"]
            outs[j] = target
    output.args = (outs,)
    graph_module.recompile()


def _storage(node: Node) -> int:
    return node.meta["val"].untyped_storage()._cdata

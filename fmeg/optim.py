"""Gradient transformations, the optimizers made of them, and learning-rate schedules: pure functions on trees."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmeg import tree
from fmeg.fusion import materialize
from fmeg.sharding.collectives import all_reduce
from fmeg.sharding.mesh import Ctx

Params = Any  # nested dicts of tensors
Updates = Any  # the structure of Params
Specs = Any  # the structure of Params; its leaves have a bool attribute `decay`
State = Any  # NamedTuples and tuples of tensors, or of trees of tensors
Schedule = Callable[[Tensor | int], Tensor]


def _no_report(state: State) -> dict[str, Tensor]:
    return {}


class Optimizer(NamedTuple):
    """One gradient transformation, or a chain of them, as three pure functions.

    `init(params) -> state`; `update(grads, state, params, specs=None) -> (updates, state)`, where `updates` are to be
    added to `params`; `report(state)` gives by name the 0-d tensors that the next update will use.

    >>> optimizer = sgd(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> updates, state = optimizer.update({"w": torch.ones(2)}, optimizer.init(params), params)
    >>> apply_updates(params, updates)["w"].tolist()
    [0.5, 0.5]
    """

    init: Callable[[Params], State]
    update: Callable[..., tuple[Updates, State]]
    report: Callable[[State], dict[str, Tensor]] = _no_report


class EmptyState(NamedTuple):
    """State of a transformation that remembers nothing."""


class AdamState(NamedTuple):
    """Updates done (0-d integer), and the running means of gradient and square."""

    step: Tensor
    mu: Params
    nu: Params


class TraceState(NamedTuple):
    """Momentum buffers, one for each parameter."""

    buffer: Params


class LearningRateState(NamedTuple):
    """Updates done (0-d integer)."""

    step: Tensor


def _require(ok: bool, name: str, value: object, allowed: str, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}, but must be {allowed}: {remedy}")


def _at_least_fp32(leaf: Tensor) -> torch.dtype:
    return torch.promote_types(leaf.dtype, torch.float32)


def _zeros(params: Params) -> Params:
    return tree.map(lambda p: torch.zeros_like(p, dtype=_at_least_fp32(p)), params)


def _zero_count(params: Params) -> Tensor:
    # On the parameters' device, so that a step on an accelerator never waits for a copy from the host.
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def _empty_state(params: Params) -> EmptyState:
    return EmptyState()


def global_norm(tensors: Updates, specs: Specs = None, ctx: Ctx = None) -> Tensor:
    """L2 norm over all elements of all leaves, as a 0-d tensor, accumulated in fp32 (fp64 if a leaf is fp64).

    On a mesh every element of the whole arrays counts once: the squares of a leaf are summed over the axes that its spec
    uses, and not over those on which it is repeated. A tree without leaves is a ValueError.

    >>> global_norm({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(12.0)}).item()
    13.0
    """
    leaves = tree.leaves(tensors)
    if not leaves:
        raise ValueError("global_norm got a tree with 0 leaves, but needs at least 1: pass the gradients' tree")
    # Not linalg.vector_norm: in fp32 on CPUs it is half a percent off for tens of millions of elements.
    squares = [leaf.to(_at_least_fp32(leaf)).square().sum() for leaf in leaves]
    widest = functools.reduce(torch.promote_types, [square.dtype for square in squares])
    if ctx is None:
        return torch.stack([square.to(widest) for square in squares]).sum().sqrt()
    used = [tuple(a for a in ctx.mesh.names if a not in ctx.mesh.unused_axes(s.axes)) for s in tree.leaves(specs)]
    total = torch.zeros((), dtype=widest, device=leaves[0].device)
    for axes in sorted(set(used)):
        part = torch.stack([sq.to(widest) for sq, mine in zip(squares, used, strict=True) if mine == axes]).sum()
        total = total + all_reduce(part, axes, ctx)
    return total.sqrt()


def apply_updates(params: Params, updates: Updates) -> Params:
    """`params + updates` leaf by leaf, added in at least fp32 and cast back to each parameter's dtype.

    >>> apply_updates({"w": torch.ones(1, dtype=torch.bfloat16)}, {"w": torch.tensor([0.5])})["w"]
    tensor([1.5000], dtype=torch.bfloat16)
    """
    return tree.map(lambda p, u: (p.to(_at_least_fp32(p)) + u).to(p.dtype), params, updates)


def chain(*optimizers: Optimizer) -> Optimizer:
    """Apply the transformations in order, each to the one before's updates; the state is the tuple of their states.

    `report` merges the members' reports; two members that report the same name are a ValueError.

    >>> [type(s).__name__ for s in chain(trace(0.9), scale_by_learning_rate(0.1)).init({"w": torch.ones(1)})]
    ['TraceState', 'LearningRateState']
    """

    def init(params: Params) -> State:
        return tuple(optimizer.init(params) for optimizer in optimizers)

    def update(grads: Updates, state: State, params: Params, specs: Specs = None, ctx: Ctx = None) -> tuple[Updates, State]:
        new_state = []
        for optimizer, member in zip(optimizers, state, strict=True):
            grads, member = optimizer.update(grads, member, params, specs, ctx)
            new_state.append(member)
        return grads, tuple(new_state)

    def report(state: State) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for optimizer, member in zip(optimizers, state, strict=True):
            values = optimizer.report(member)
            shared = sorted(merged.keys() & values.keys())
            _require(not shared, "the set of names reported twice in the chain", shared, "empty", "keep one of them")
            merged |= values
        return merged

    return Optimizer(init, update, report)


def clip_by_global_norm(max_norm: float, eps: float = 1e-6) -> Optimizer:
    """Scale all gradients by `max_norm / (norm + eps)` where that is below 1 (Pascanu et al. 2013).

    `max_norm` (above 0) is in the gradients' unit; `norm` is their `global_norm`; `eps` is Megatron-LM's.

    >>> clip, grads = clip_by_global_norm(1.0), {"w": torch.tensor([3.0, 4.0])}
    >>> clip.update(grads, clip.init(grads), grads)[0]["w"]
    tensor([0.6000, 0.8000])
    """
    _require(0 < max_norm < math.inf, "max_norm", max_norm, "finite and above 0", "leave clipping out to turn it off")
    _require(0 <= eps < math.inf, "eps", eps, "finite and at least 0", "the default is 1e-6")

    def update(grads: Updates, state: State, params: Params, specs: Specs = None, ctx: Ctx = None) -> tuple[Updates, State]:
        scale = materialize((max_norm / (global_norm(grads, specs, ctx) + eps)).clamp(max=1.0))
        return tree.map(lambda g: g.to(_at_least_fp32(g)) * scale.to(_at_least_fp32(g)), grads), state

    return Optimizer(_empty_state, update)


def scale_by_adam(b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> Optimizer:
    """Adam's direction `m / (sqrt(v) + eps)`, with `m` and `v` bias-corrected (Kingma & Ba 2015, Algorithm 1).

    `b1` and `b2` in [0, 1) are the decay rates, per update, of the means of the gradient and of its square.

    >>> adam, grads = scale_by_adam(), {"w": torch.tensor([0.1, -7.0])}
    >>> adam.update(grads, adam.init(grads), grads)[0]["w"]
    tensor([ 1., -1.])
    """
    for name, beta in (("b1", b1), ("b2", b2)):
        _require(0 <= beta < 1, name, beta, "at least 0 and below 1", "common values are 0.9 to 0.999")
    _require(0 <= eps < math.inf, "eps", eps, "finite and at least 0", "the default is 1e-8")

    def init(params: Params) -> AdamState:
        return AdamState(_zero_count(params), _zeros(params), _zeros(params))

    def update(
        grads: Updates, state: AdamState, params: Params, specs: Specs = None, ctx: Ctx = None
    ) -> tuple[Updates, AdamState]:
        step = state.step + 1
        # In fp64: `1 - 0.999**1` would lose three of fp32's seven digits.
        mu_scale, nu_scale = (materialize(1 / (1 - beta ** step.to(torch.float64))) for beta in (b1, b2))
        mu = tree.map(lambda g, m: b1 * m + (1 - b1) * g.to(m.dtype), grads, state.mu)
        nu = tree.map(lambda g, v: b2 * v + (1 - b2) * g.to(v.dtype).square(), grads, state.nu)

        def direction(m: Tensor, v: Tensor) -> Tensor:
            return m * mu_scale.to(m.dtype) / ((v * nu_scale.to(v.dtype)).sqrt() + eps)

        return tree.map(direction, mu, nu), AdamState(step, mu, nu)

    return Optimizer(init, update)


def trace(momentum: float, nesterov: bool = False) -> Optimizer:
    """Momentum as in torch.optim.SGD: `buffer = momentum * buffer + g`, and the buffer is the update.

    `momentum` is in [0, 1); with `nesterov` the update is `g + momentum * buffer` (Sutskever et al. 2013).

    >>> heavy, grads = trace(0.5), {"w": torch.ones(1)}
    >>> _, state = heavy.update(grads, heavy.init(grads), grads)
    >>> heavy.update(grads, state, grads)[0]["w"].item()
    1.5
    """
    _require(0 <= momentum < 1, "momentum", momentum, "at least 0 and below 1", "a common value is 0.9")
    _require(momentum > 0 or not nesterov, "momentum", momentum, "above 0 with nesterov", "or pass nesterov=False")

    def update(
        grads: Updates, state: TraceState, params: Params, specs: Specs = None, ctx: Ctx = None
    ) -> tuple[Updates, TraceState]:
        buffer = tree.map(lambda g, b: momentum * b + g, grads, state.buffer)
        updates = tree.map(lambda g, b: g + momentum * b, grads, buffer) if nesterov else buffer
        return updates, TraceState(buffer)

    return Optimizer(lambda params: TraceState(_zeros(params)), update)


def add_decayed_weights(weight_decay: float) -> Optimizer:
    """Add `weight_decay * parameter` to each update that decays; placed after Adam this is AdamW's decoupled decay.

    A leaf decays where its spec says `decay`, or, with no specs, where it has two dimensions or more: a norm weight
    stacked over layers has two, so models with stacked layers need their specs. (Loshchilov & Hutter 2019)

    >>> decay, params = add_decayed_weights(0.5), {"b": torch.ones(1), "w": torch.ones(1, 1)}
    >>> decay.update({"b": torch.zeros(1), "w": torch.zeros(1, 1)}, decay.init(params), params)[0]
    {'b': tensor([0.]), 'w': tensor([[0.5000]])}
    """
    _require(0 <= weight_decay < math.inf, "weight_decay", weight_decay, "finite and at least 0", "0.0 turns it off")

    def update(grads: Updates, state: State, params: Params, specs: Specs = None, ctx: Ctx = None) -> tuple[Updates, State]:
        def add(update: Tensor, param: Tensor, decays: bool) -> Tensor:
            return update + weight_decay * param.to(_at_least_fp32(param)) if decays else update

        decays = tree.map(lambda p: p.ndim >= 2, params) if specs is None else tree.map(lambda s: s.decay, specs)
        return tree.map(add, grads, params, decays), state

    return Optimizer(_empty_state, update)


def scale_by_learning_rate(learning_rate: float | Schedule) -> Optimizer:
    """Multiply by minus the learning rate, which a schedule takes from the count of updates done (0 at the first).

    `learning_rate` is a number of at least 0, used at full precision, or a schedule, whose values are fp32.
    Reports `learning_rate`.

    >>> optimizer = scale_by_learning_rate(linear_schedule(max_lr=1.0, decay_steps=4))
    >>> optimizer.report(optimizer.init({"w": torch.ones(1)}))
    {'learning_rate': tensor(1.)}
    """
    schedule = learning_rate if callable(learning_rate) else constant_schedule(learning_rate)

    def init(params: Params) -> LearningRateState:
        return LearningRateState(_zero_count(params))

    def update(
        grads: Updates, state: LearningRateState, params: Params, specs: Specs = None, ctx: Ctx = None
    ) -> tuple[Updates, LearningRateState]:
        lr = materialize(schedule(state.step))

        def scale(update: Tensor) -> Tensor:
            update = update.to(_at_least_fp32(update))
            return update * (-lr.to(update.dtype) if callable(learning_rate) else -learning_rate)

        return tree.map(scale, grads), LearningRateState(state.step + 1)

    return Optimizer(init, update, lambda state: {"learning_rate": schedule(state.step)})


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip_grad: float | None = None,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019), equal to torch.optim.AdamW; `clip_grad` is the largest global norm let through.

    Arguments and errors are those of `clip_by_global_norm`, `scale_by_adam`, `add_decayed_weights` and
    `scale_by_learning_rate`, which it chains in this order.

    >>> optimizer, params = adamw(0.1, weight_decay=0.1), {"w": torch.ones(1, 1)}
    >>> updates, _ = optimizer.update({"w": torch.zeros(1, 1)}, optimizer.init(params), params)
    >>> apply_updates(params, updates)["w"]
    tensor([[0.9900]])
    """
    clip = Optimizer(_empty_state, lambda g, s, *_: (g, s)) if clip_grad is None else clip_by_global_norm(clip_grad)
    adam, decay = scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay)
    return chain(clip, adam, decay, scale_by_learning_rate(learning_rate))


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_grad: float | None = None,
) -> Optimizer:
    """Stochastic gradient descent, equal to torch.optim.SGD: weight decay joins the clipped gradient before momentum.

    Arguments and errors are those of `clip_by_global_norm`, `add_decayed_weights`, `trace` and
    `scale_by_learning_rate`, which it chains in this order; without momentum no buffers are kept.

    >>> [type(state).__name__ for state in sgd(0.1).init({"w": torch.ones(1)})]
    ['EmptyState', 'EmptyState', 'LearningRateState']
    """
    clip = Optimizer(_empty_state, lambda g, s, *_: (g, s)) if clip_grad is None else clip_by_global_norm(clip_grad)
    # Built even if unused, so that its arguments are checked.
    buffers = trace(momentum, nesterov)
    decay = add_decayed_weights(weight_decay)
    return chain(clip, decay, *((buffers,) if momentum else ()), scale_by_learning_rate(learning_rate))


def _check_schedule(max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int, init_lr: float) -> None:
    for name, lr in (("max_lr", max_lr), ("min_lr", min_lr), ("init_lr", init_lr)):
        _require(0 <= lr < math.inf, name, lr, "finite and at least 0", "pass a learning rate such as 1e-3")
    _require(min_lr <= max_lr, "min_lr", min_lr, f"at most max_lr, {max_lr!r}", "lower it or raise max_lr")
    _require(init_lr <= max_lr, "init_lr", init_lr, f"at most max_lr, {max_lr!r}", "lower it or raise max_lr")
    _require(warmup_steps >= 0, "warmup_steps", warmup_steps, "at least 0", "0 leaves the warm-up out")
    allowed = f"above warmup_steps, {warmup_steps!r}"
    _require(decay_steps > warmup_steps, "decay_steps", decay_steps, allowed, "it counts the warm-up's steps too")


def _warm_up(init_lr: float, max_lr: float, warmup_steps: int, after: Callable[[Tensor], Tensor]) -> Schedule:
    def schedule(count: Tensor | int) -> Tensor:
        n = torch.as_tensor(count).to(torch.float64)
        lr = after(n)
        if warmup_steps:
            lr = torch.where(n < warmup_steps, init_lr + (max_lr - init_lr) * n / warmup_steps, lr)
        return lr.to(torch.float32)

    return schedule


def _anneal(style: str, start: int, end: int, max_lr: float, min_lr: float) -> Callable[[Tensor], Tensor]:
    # From 1 at ratio 0 to exactly 0 at ratio 1, so that a ratio held at 1 stays at the minimum.
    curves: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda ratio: 1 - ratio,
        "cosine": lambda ratio: 0.5 * (1 + torch.cos(math.pi * ratio)),
        "exponential": lambda ratio: 2 * 0.5**ratio - 1,
        "minus_sqrt": lambda ratio: 1 - ratio.sqrt(),
    }
    _require(style in curves, "style", style, f"one of {', '.join(curves)}", "choose one of these")
    return lambda n: min_lr + (max_lr - min_lr) * curves[style](((n - start) / (end - start)).clamp(0.0, 1.0))


def constant_schedule(lr: float, *, warmup_steps: int = 0, init_lr: float = 0.0) -> Schedule:
    """`lr` at every count, after a linear warm-up from `init_lr` in the first `warmup_steps`.

    Negative or infinite numbers, and an `init_lr` above `lr`, are ValueErrors.

    >>> constant_schedule(0.5)(7)
    tensor(0.5000)
    """
    _require(0 <= lr < math.inf, "learning rate", lr, "finite and at least 0", "pass a number such as 1e-3")
    _require(warmup_steps >= 0, "warmup_steps", warmup_steps, "at least 0", "pass 0 for no warm-up")
    _require(0 <= init_lr <= lr, "init_lr", init_lr, f"in [0, {lr}]", "start the warm-up at or below the learning rate")
    return _warm_up(init_lr, lr, warmup_steps, lambda n: torch.full_like(n, lr))


def linear_schedule(
    *, max_lr: float, decay_steps: int, min_lr: float = 0.0, warmup_steps: int = 0, init_lr: float = 0.0
) -> Schedule:
    """Rise from `init_lr` to `max_lr` in `warmup_steps`, then a straight line to `min_lr` at step `decay_steps`.

    Steps are updates counted from 0; `decay_steps` includes the warm-up. ValueError for a negative number, for
    `min_lr` or `init_lr` above `max_lr`, and for `warmup_steps >= decay_steps`. (Megatron-LM, OptimizerParamScheduler)

    >>> [linear_schedule(max_lr=1.0, decay_steps=4, warmup_steps=2)(n).item() for n in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    _check_schedule(max_lr, min_lr, warmup_steps, decay_steps, init_lr)
    return _warm_up(init_lr, max_lr, warmup_steps, _anneal("linear", warmup_steps, decay_steps, max_lr, min_lr))


def cosine_schedule(
    *, max_lr: float, decay_steps: int, min_lr: float = 0.0, warmup_steps: int = 0, init_lr: float = 0.0
) -> Schedule:
    """As `linear_schedule`, but half a cosine wave from `max_lr` to `min_lr` (Loshchilov & Hutter 2017, equation 5).

    >>> cosine_schedule(max_lr=1.0, decay_steps=4)(2)
    tensor(0.5000)
    """
    _check_schedule(max_lr, min_lr, warmup_steps, decay_steps, init_lr)
    return _warm_up(init_lr, max_lr, warmup_steps, _anneal("cosine", warmup_steps, decay_steps, max_lr, min_lr))


def wsd_schedule(
    *,
    max_lr: float,
    decay_steps: int,
    wsd_decay_steps: int,
    style: str = "exponential",
    min_lr: float = 0.0,
    warmup_steps: int = 0,
    init_lr: float = 0.0,
) -> Schedule:
    """Warm up, hold `max_lr`, and fall to `min_lr` in the last `wsd_decay_steps` before `decay_steps`.

    `style` is linear, cosine, exponential or minus_sqrt; any other is a ValueError, as are `linear_schedule`'s and a
    fall of 0 steps or of more than `decay_steps - warmup_steps`. (Hu et al. 2024, MiniCPM; curves of Megatron-LM)

    >>> schedule = wsd_schedule(max_lr=1.0, decay_steps=8, wsd_decay_steps=4, style="linear")
    >>> [schedule(n).item() for n in (0, 4, 6, 8)]
    [1.0, 1.0, 0.5, 0.0]
    """
    _check_schedule(max_lr, min_lr, warmup_steps, decay_steps, init_lr)
    room = decay_steps - warmup_steps
    allowed = f"at least 1 and at most decay_steps - warmup_steps, {room}"
    _require(1 <= wsd_decay_steps <= room, "wsd_decay_steps", wsd_decay_steps, allowed, "or lengthen decay_steps")
    after = _anneal(style, decay_steps - wsd_decay_steps, decay_steps, max_lr, min_lr)
    return _warm_up(init_lr, max_lr, warmup_steps, after)


def inverse_square_root_schedule(
    *, max_lr: float, decay_steps: int, min_lr: float = 0.0, warmup_steps: int = 0, init_lr: float = 0.0
) -> Schedule:
    """As `linear_schedule`, but `max_lr * sqrt(warmup_steps / n)` until `decay_steps`, never below `min_lr`.

    Past `decay_steps` it drops to `min_lr`; a warm-up of 0 counts as 1 in the formula. (Megatron-LM)

    >>> inverse_square_root_schedule(max_lr=1.0, decay_steps=100, warmup_steps=4)(16)
    tensor(0.5000)
    """
    _check_schedule(max_lr, min_lr, warmup_steps, decay_steps, init_lr)

    def after(n: Tensor) -> Tensor:
        lr = max_lr * (max(warmup_steps, 1) / n.clamp(min=1)).sqrt()
        return torch.where(n > decay_steps, min_lr, lr.clamp(min=min_lr))

    return _warm_up(init_lr, max_lr, warmup_steps, after)

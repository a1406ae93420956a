"""Optimizers against torch.optim leaf by leaf, schedules against closed forms, and the contract both keep."""

import doctest
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fmeg import optim, tree

MAX_LR, MIN_LR, INIT_LR, WARMUP, END, ANNEAL = 3e-3, 2e-4, 1e-4, 5, 23, 7
F64 = torch.float64
RAMP: dict[str, Any] = {
    "max_lr": MAX_LR,
    "min_lr": MIN_LR,
    "init_lr": INIT_LR,
    "warmup_steps": WARMUP,
    "decay_steps": END,
}


@dataclass(frozen=True)
class Spec:
    """The one attribute that optimizers read from a leaf of specs."""

    decay: bool


SPECS = {"embed": Spec(True), "layers": {"norm": Spec(False), "up": Spec(True)}, "norm": Spec(False)}


def random_tree(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    return {"embed": draw(7, 4), "layers": {"norm": draw(2, 4), "up": draw(2, 4, 8)}, "norm": draw(4)}


def assert_same(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    pairs = zip(tree.flatten_with_path(actual), tree.flatten_with_path(expected), strict=True)
    for (path, a), (expected_path, e) in pairs:
        assert path == expected_path
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol, msg=f"{path}: {a} is not {e}")


def run_ours(optimizer: optim.Optimizer, dtype: torch.dtype, steps: int) -> list[Any]:
    params = random_tree(0, dtype)
    state = optimizer.init(params)
    trajectory = []
    for step in range(steps):
        updates, state = optimizer.update(random_tree(step + 1, dtype), state, params, SPECS)
        params = optim.apply_updates(params, updates)
        trajectory.append(params)
    return trajectory


def run_torch(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    weight_decay: float,
    clip: float | None,
    dtype: torch.dtype,
    steps: int,
) -> list[Any]:
    params = tree.map(lambda p: p.clone().requires_grad_(), random_tree(0, dtype))
    masked = list(zip(tree.leaves(params), tree.leaves(SPECS), strict=True))
    decayed, others = [p for p, s in masked if s.decay], [p for p, s in masked if not s.decay]
    optimizer = make([{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}])
    trajectory = []
    for step in range(steps):
        for p, g in zip(tree.leaves(params), tree.leaves(random_tree(step + 1, dtype)), strict=True):
            p.grad = g
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(tree.leaves(params), clip)
        optimizer.step()
        trajectory.append(tree.map(lambda p: p.detach().clone(), params))
    return trajectory


# --- parity with torch.optim ---


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.0)])
def test_adamw_equals_torch(dtype: torch.dtype, atol: float, clip: float | None, betas: tuple[float, float]) -> None:
    ours = optim.adamw(3e-3, b1=betas[0], b2=betas[1], weight_decay=0.1, clip_grad=clip)
    theirs = run_torch(lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=betas), 0.1, clip, dtype, 8)
    for actual, expected in zip(run_ours(ours, dtype, 8), theirs, strict=True):
        assert_same(actual, expected, atol=atol)


def test_adamw_defaults() -> None:
    theirs = run_torch(lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8), 0.01, None, F64, 3)
    assert_same(run_ours(optim.adamw(0.1), F64, 3)[-1], theirs[-1], atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_equals_torch(dtype: torch.dtype, atol: float, clip: float | None, momentum: float, nesterov: bool) -> None:
    ours = optim.sgd(0.01, momentum=momentum, nesterov=nesterov, weight_decay=0.1, clip_grad=clip)
    theirs = run_torch(
        lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=momentum, nesterov=nesterov), 0.1, clip, dtype, 8
    )
    for actual, expected in zip(run_ours(ours, dtype, 8), theirs, strict=True):
        assert_same(actual, expected, atol=atol)


# --- schedules ---


def expected_lr(name: str, n: int) -> float:
    """The schedules' formulas in Python floats, written with branches instead of clamps."""
    if n < WARMUP:
        return INIT_LR + (MAX_LR - INIT_LR) * n / WARMUP
    if n > END:
        return MIN_LR
    if name == "inverse_square_root":
        return max(MIN_LR, MAX_LR * WARMUP**0.5 / n**0.5)
    kind, _, style = name.partition(":")
    if kind == "wsd" and n <= END - ANNEAL:
        return MAX_LR
    r = (n - (END - ANNEAL)) / ANNEAL if kind == "wsd" else (n - WARMUP) / (END - WARMUP)
    coefficient = {
        "linear": 1 - r,
        "cosine": 0.5 * (1 + math.cos(math.pi * r)),
        "exponential": 2 * 0.5**r - 1,
        "minus_sqrt": 1 - math.sqrt(r),
    }[style or kind]
    return MIN_LR + coefficient * (MAX_LR - MIN_LR)


SCHEDULES: tuple[tuple[str, Callable[[], optim.Schedule]], ...] = (
    ("linear", lambda: optim.linear_schedule(**RAMP)),
    ("cosine", lambda: optim.cosine_schedule(**RAMP)),
    ("inverse_square_root", lambda: optim.inverse_square_root_schedule(**RAMP)),
    *(
        (f"wsd:{style}", lambda style=style: optim.wsd_schedule(**RAMP, wsd_decay_steps=ANNEAL, style=style))
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    ),
)


@pytest.mark.parametrize(("name", "make"), SCHEDULES, ids=[name for name, _ in SCHEDULES])
def test_schedule_equals_its_closed_form(name: str, make: Callable[[], optim.Schedule]) -> None:
    schedule = make()
    for n in range(END + 6):
        for count in (n, torch.tensor(n, dtype=torch.int32), torch.tensor(n)):
            lr = schedule(count)
            assert lr.dtype == torch.float32
            assert lr.shape == ()
            assert lr.item() == pytest.approx(expected_lr(name, n), rel=1e-6), n


def test_cosine_pinned() -> None:
    schedule = optim.cosine_schedule(max_lr=1e-3, min_lr=1e-4, warmup_steps=2, decay_steps=10)
    pinned = [0, 5e-4, 1e-3, 9.65746e-4, 8.68198e-4, 7.22208e-4, 5.5e-4, 3.77792e-4, 2.31802e-4, 1.34254e-4, 1e-4]
    assert [schedule(n).item() for n in range(11)] == pytest.approx(pinned, rel=2e-6)
    assert schedule(11).item() == pytest.approx(1e-4)


def test_wsd_style_defaults_to_exponential() -> None:
    schedule = optim.wsd_schedule(max_lr=1.0, decay_steps=4, wsd_decay_steps=4)
    assert schedule(2).item() == pytest.approx(2 * 0.5**0.5 - 1)


def test_no_warmup_starts_at_the_maximum() -> None:
    for make in (optim.linear_schedule, optim.cosine_schedule, optim.inverse_square_root_schedule):
        assert make(max_lr=0.5, decay_steps=9, init_lr=0.1)(0).item() == 0.5
    # A warm-up of 0 counts as 1 in this formula, so nothing divides by zero.
    assert optim.inverse_square_root_schedule(max_lr=0.5, decay_steps=9)(4).item() == 0.25


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(("linear", "cosine", "exponential", "minus_sqrt")))
def test_after_the_warmup_schedules_never_rise_and_end_at_the_minimum(data: st.DataObject, style: str) -> None:
    warmup = data.draw(st.integers(0, 30))
    end = warmup + data.draw(st.integers(1, 30))
    anneal = data.draw(st.integers(1, end - warmup))
    low, high = sorted(data.draw(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0))))
    ramp: dict[str, Any] = {"max_lr": high, "min_lr": low, "warmup_steps": warmup, "decay_steps": end}
    for schedule in (
        optim.linear_schedule(**ramp),
        optim.cosine_schedule(**ramp),
        optim.inverse_square_root_schedule(**ramp),
        optim.wsd_schedule(**ramp, wsd_decay_steps=anneal, style=style),
    ):
        values = schedule(torch.arange(warmup, end + 3))
        slack = 1e-7 * high
        assert bool((values.diff() <= slack).all())
        assert float(values[0]) == pytest.approx(high)
        assert float(values[-1]) == pytest.approx(low)


# --- single transformations ---


def test_global_norm_and_clipping_pinned() -> None:
    grads = {"a": torch.tensor([3.0]), "b": {"c": torch.tensor(4.0), "d": torch.tensor([[12.0]])}}
    assert optim.global_norm(grads).item() == 13.0
    clip = optim.clip_by_global_norm(1.0)
    clipped, _ = clip.update(grads, clip.init(grads), grads)
    assert_same(clipped, tree.map(lambda g: g / (13 + 1e-6), grads), rtol=1e-6)
    loose = optim.clip_by_global_norm(14.0)
    assert_same(loose.update(grads, loose.init(grads), grads)[0], grads)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float64, torch.bfloat16), torch.float64),
        ((torch.float16, torch.float16), torch.float32),
    ],
)
def test_global_norm_accumulates_in_at_least_fp32(dtypes: tuple[torch.dtype, ...], expected: torch.dtype) -> None:
    # Summed in the leaves' own half precision, 256**2 ones would stop growing early and 300**2 would overflow fp16.
    norm = optim.global_norm({str(i): torch.full((256, 256), 300.0, dtype=dtype) for i, dtype in enumerate(dtypes)})
    assert norm.dtype == expected
    assert norm.item() == pytest.approx(300 * 256 * math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_no_decay_on_one_dimensional_leaves(stacked: bool) -> None:
    lead = (2,) if stacked else ()
    params = {"matrix": torch.ones(*lead, 3, 3), "norm": torch.ones(*lead, 3)}
    specs = {"matrix": Spec(True), "norm": Spec(False)}
    for make in (optim.adamw, optim.sgd):
        optimizer = make(0.1, weight_decay=0.1)
        updates, _ = optimizer.update(tree.map(torch.zeros_like, params), optimizer.init(params), params, specs)
        after = optim.apply_updates(params, updates)
        torch.testing.assert_close(after["matrix"], 0.99 * params["matrix"])
        assert torch.equal(after["norm"], params["norm"])


def test_without_specs_leaves_of_two_dimensions_decay() -> None:
    params = {"bias": torch.ones(3), "matrix": torch.ones(3, 3), "scalar": torch.ones(())}
    decay = optim.add_decayed_weights(0.5)
    updates, _ = decay.update(tree.map(torch.zeros_like, params), decay.init(params), params)
    assert {name: float(u.sum()) for name, u in updates.items()} == {"bias": 0.0, "matrix": 4.5, "scalar": 0.0}


def test_half_precision_parameters_get_fp32_state_and_updates() -> None:
    params = random_tree(0, torch.bfloat16)
    for optimizer in (optim.adamw(0.1, clip_grad=1.0), optim.sgd(0.1, momentum=0.9, nesterov=True), optim.sgd(0.1)):
        updates, state = optimizer.update(random_tree(1, torch.bfloat16), optimizer.init(params), params, SPECS)
        assert {u.dtype for u in tree.leaves(updates)} == {torch.float32}
        assert not {torch.bfloat16} & {leaf.dtype for leaf in tree.leaves(state)}
        assert {p.dtype for p in tree.leaves(optim.apply_updates(params, updates))} == {torch.bfloat16}


def test_apply_updates_rounds_once() -> None:
    # 1 + 2**-8 is a tie in bfloat16; a larger update must not be rounded to it before the addition.
    params, updates = {"w": torch.ones(1, dtype=torch.bfloat16)}, {"w": torch.tensor([2.0**-8 + 2.0**-20])}
    assert optim.apply_updates(params, updates)["w"].item() == 1 + 2.0**-7


def test_scalar_leaves_keep_their_dtype() -> None:
    params = {"temperature": torch.tensor(1.0)}
    optimizer = optim.adamw(optim.constant_schedule(0.1), clip_grad=1.0)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["temperature"].dtype == torch.float32
    assert state[1].mu["temperature"].dtype == torch.float32


# --- chains, state and purity ---


def test_chain_applies_in_order_and_keeps_one_state_each() -> None:
    params = random_tree(0)
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(0.01)),
        optim.scale_by_learning_rate(0.1),
    )
    state = optimizer.init(params)
    paths = [path for path, _ in tree.flatten_with_path(state)]
    nested, _ = optimizer.update(random_tree(1), state, params, SPECS)
    flat = optim.adamw(0.1, clip_grad=1.0)
    assert_same(nested, flat.update(random_tree(1), flat.init(params), params, SPECS)[0])
    assert len(paths) == len(set(paths)) == 2 * 4 + 2
    assert optim.chain().update(params, optim.chain().init(params), params) == (params, ())


ALL: tuple[Callable[[], optim.Optimizer], ...] = (
    lambda: optim.adamw(optim.cosine_schedule(**RAMP), weight_decay=0.1, clip_grad=0.5),
    lambda: optim.adamw(0.1),
    lambda: optim.sgd(optim.linear_schedule(**RAMP), momentum=0.9, nesterov=True, weight_decay=0.1, clip_grad=0.5),
    lambda: optim.sgd(0.1),
    lambda: optim.trace(0.9),
)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_holds_tensors_whose_shapes_and_dtypes_never_change(
    make: Callable[[], optim.Optimizer], dtype: torch.dtype
) -> None:
    optimizer, params = make(), random_tree(0, dtype)
    state = optimizer.init(params)
    _, later = optimizer.update(random_tree(1, dtype), state, params, SPECS)
    for (path, a), (later_path, b) in zip(tree.flatten_with_path(state), tree.flatten_with_path(later), strict=True):
        assert isinstance(a, Tensor), path
        assert (path, a.shape, a.dtype) == (later_path, b.shape, b.dtype)


@pytest.mark.parametrize("make", ALL)
def test_inputs_are_never_mutated(make: Callable[[], optim.Optimizer]) -> None:
    optimizer, params, grads = make(), random_tree(0), random_tree(1)
    state = optimizer.update(grads, optimizer.init(params), params, SPECS)[1]
    before = tree.map(torch.clone, (params, grads, state))
    updates, _ = optimizer.update(grads, state, params, SPECS)
    optim.apply_updates(params, updates)
    optimizer.report(state)
    assert_same((params, grads, state), before)


def test_report_gives_the_rate_the_next_update_uses() -> None:
    schedule = optim.linear_schedule(max_lr=1.0, decay_steps=4)
    optimizer, params = optim.sgd(schedule, clip_grad=1e9), {"w": torch.zeros(1)}
    state = optimizer.init(params)
    for expected in (1.0, 0.75, 0.5, 0.25, 0.0, 0.0):
        report = optimizer.report(state)
        assert {name: value.item() for name, value in report.items()} == {"learning_rate": expected}
        updates, state = optimizer.update({"w": torch.ones(1)}, state, params)
        assert updates["w"].item() == -expected
    assert optim.scale_by_adam().report(optim.scale_by_adam().init(params)) == {}
    assert optim.scale_by_learning_rate(0.5).report(optim.scale_by_learning_rate(0.5).init(params)) == {
        "learning_rate": torch.tensor(0.5)
    }


@pytest.mark.parametrize("make", ALL)
def test_one_graph_serves_every_step(make: Callable[[], optim.Optimizer]) -> None:
    optimizer = make()

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params, SPECS)
        return optim.apply_updates(params, updates), state

    params = random_tree(0)
    eager = traced = (params, optimizer.init(params))
    graph = make_fx(step)(*traced, random_tree(1))
    # Past the warm-up and the end of the schedule: every branch of it must be in the one graph.
    for seed in range(END + 3):
        eager, traced = step(*eager, random_tree(seed)), graph(*traced, random_tree(seed))
        assert_same(traced, eager)


def test_compiled_step_does_not_recompile() -> None:
    optimizer, params = optim.adamw(optim.cosine_schedule(**RAMP), clip_grad=0.5), random_tree(0, torch.float32)
    compiled = torch.compile(lambda g, s, p: optimizer.update(g, s, p, SPECS), fullgraph=True, backend="inductor")
    state = compiled_state = optimizer.init(params)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(4):
            grads = random_tree(seed, torch.float32)
            updates, state = optimizer.update(grads, state, params, SPECS)
            compiled_updates, compiled_state = compiled(grads, compiled_state, params)
            assert_same(compiled_updates, updates, rtol=1e-5, atol=1e-8)
    assert int(compiled_state[1].step) == 4


def test_state_starts_on_the_parameters_device() -> None:
    params = tree.map(lambda p: p.to("meta"), random_tree(0))
    assert {leaf.device.type for leaf in tree.leaves(optim.adamw(0.1).init(params))} == {"meta"}


# --- refusals ---


def wsd(**changes: Any) -> optim.Schedule:
    return optim.wsd_schedule(**({**RAMP, "wsd_decay_steps": ANNEAL} | changes))


REFUSALS: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: optim.global_norm({}), "tree with 0 leaves"),
    (lambda: optim.clip_by_global_norm(0.0), "max_norm is 0.0"),
    (lambda: optim.adamw(0.1, clip_grad=-1.0), "max_norm is -1.0"),
    (lambda: optim.sgd(0.1, clip_grad=math.inf), "max_norm is inf"),
    (lambda: optim.clip_by_global_norm(1.0, eps=-1.0), "eps is -1.0"),
    (lambda: optim.adamw(0.1, b1=1.0), "b1 is 1.0"),
    (lambda: optim.adamw(0.1, b2=-0.1), "b2 is -0.1"),
    (lambda: optim.adamw(0.1, eps=math.nan), "eps is nan"),
    (lambda: optim.adamw(0.1, weight_decay=-0.1), "weight_decay is -0.1"),
    (lambda: optim.adamw(-0.1), "learning rate is -0.1"),
    (lambda: optim.constant_schedule(math.inf), "learning rate is inf"),
    (lambda: optim.sgd(0.1, momentum=1.0), "momentum is 1.0"),
    (lambda: optim.sgd(0.1, nesterov=True), "momentum is 0.0, but must be above 0 with nesterov"),
    (lambda: wsd(max_lr=-1.0), "max_lr is -1.0"),
    (lambda: wsd(min_lr=-1.0), "min_lr is -1.0"),
    (lambda: wsd(init_lr=math.nan), "init_lr is nan"),
    (lambda: wsd(min_lr=1.0), "min_lr is 1.0, but must be at most max_lr, 0.003"),
    (lambda: wsd(init_lr=1.0), "init_lr is 1.0, but must be at most max_lr, 0.003"),
    (lambda: wsd(warmup_steps=-1), "warmup_steps is -1"),
    (lambda: wsd(warmup_steps=END), "decay_steps is 23, but must be above warmup_steps, 23"),
    (lambda: wsd(wsd_decay_steps=0), "wsd_decay_steps is 0"),
    (lambda: wsd(wsd_decay_steps=19), "wsd_decay_steps is 19, but must be at least 1 and at most .*, 18"),
    (lambda: wsd(style="cubic"), "style is 'cubic', but must be one of linear, cosine, exponential, minus_sqrt"),
    (lambda: optim.linear_schedule(**(RAMP | {"decay_steps": 5})), "decay_steps is 5"),
    (lambda: optim.cosine_schedule(**(RAMP | {"decay_steps": 5})), "decay_steps is 5"),
    (lambda: optim.inverse_square_root_schedule(**(RAMP | {"decay_steps": 5})), "decay_steps is 5"),
)


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals_fit_on_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_chain_refuses_two_reports_of_one_name() -> None:
    twice = optim.chain(optim.scale_by_learning_rate(0.1), optim.scale_by_learning_rate(0.1))
    with pytest.raises(ValueError, match="learning_rate"):
        twice.report(twice.init({"w": torch.ones(1)}))


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(optim)
    assert results.attempted > 20
    assert results.failed == 0

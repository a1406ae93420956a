"""The generator: known answers, JAX's streams, slices, statistics, tracing and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fmeg.random as fr

SHAPES = [(), (7,), (2, 3, 4), (0, 3), (1003,)]
KEY = fr.key(0)
SEEDS = [0, 1, 42, 2**31 - 1]
HUGE = (2**20, 2**20)
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
PINNED = {
    "bits": [2098992034, 2919706841, 2646866425, 2409546199],
    "split": [[1832780943, 270669613], [64467757, 2916123636]],
    "fold_in": [2681879649, 3130414070],
    "uniform": [0.48870956897735596, 0.6797971725463867, 0.6162714958190918],
    "uniform64": [0.4267275666499091, 0.015010069515314584],
    "normal": [-0.02830461598932743, 0.46713176369667053, 0.2957029342651367],
}


def hash_block(key: Tensor, counter: Tensor) -> Tensor:
    k, c = key.to(torch.int32), counter.to(torch.int32)
    return torch.stack(fr._threefry(k[0], k[1], c[0], c[1])).to(torch.int64) & 0xFFFFFFFF


@pytest.fixture
def jax() -> Iterator[object]:
    module = pytest.importorskip("jax")
    before = module.config.jax_threefry_partitionable
    module.config.update("jax_threefry_partitionable", True)
    yield module
    module.config.update("jax_threefry_partitionable", before)


# Known answers


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_random123_known_answers(counter: tuple, key: tuple, answer: tuple) -> None:
    assert tuple(hash_block(torch.tensor(key), torch.tensor(counter)).tolist()) == answer


def test_stream_is_pinned() -> None:
    key = fr.key(42)
    assert key.tolist() == [0, 42]
    assert fr.bits(key, (4,)).tolist() == PINNED["bits"]
    assert fr.split(key).tolist() == PINNED["split"]
    assert fr.fold_in(key, "layers.0.mlp.weight").tolist() == PINNED["fold_in"]
    assert fr.uniform(key, (3,)).tolist() == PINNED["uniform"]
    assert fr.uniform(key, (2,), dtype=torch.float64).tolist() == PINNED["uniform64"]
    assert fr.normal(key, (3,)).tolist() == pytest.approx(PINNED["normal"], rel=1e-6)


# JAX


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_jax(jax: object, seed: int) -> None:
    theirs, ours = jax.random.PRNGKey(seed), fr.key(seed)
    assert np.array_equal(np.asarray(theirs), ours.numpy())
    assert np.array_equal(np.asarray(jax.random.split(theirs, 5)), fr.split(ours, 5).numpy())
    for data in (0, 7, 2**31, 2**32 - 1):
        assert np.array_equal(np.asarray(jax.random.fold_in(theirs, data)), fr.fold_in(ours, data).numpy())
    for shape in SHAPES:
        assert np.array_equal(np.asarray(jax.random.bits(theirs, shape)).astype(np.int64), fr.bits(ours, shape).numpy())
        for low, high in ((0.0, 1.0), (-1.0, 1.0), (2.0, 2.5)):
            expected = np.asarray(jax.random.uniform(theirs, shape, minval=low, maxval=high))
            assert np.array_equal(expected, fr.uniform(ours, shape, low=low, high=high).numpy())
        for p in (0.0, 0.1, 0.5, 1.0):
            expected = np.asarray(jax.random.bernoulli(theirs, p, shape))
            assert np.array_equal(expected, fr.bernoulli(ours, p, shape).numpy())
        # Absolute, in the bulk and the tails alike: XLA's float32 erfinv is off by up to 1.5e-5 near +-1.
        np.testing.assert_allclose(fr.normal(ours, shape), np.asarray(jax.random.normal(theirs, shape)), atol=3e-5)
        expected = np.asarray(jax.random.truncated_normal(theirs, -1.0, 2.0, shape))
        np.testing.assert_allclose(fr.truncated_normal(ours, -1.0, 2.0, shape), expected, atol=3e-6)


def test_equals_jax_in_float64(jax: object) -> None:
    with jax.enable_x64(True):
        theirs, ours = jax.random.PRNGKey(2**40 + 5), fr.key(2**40 + 5)
        assert np.array_equal(np.asarray(theirs), ours.numpy())
        draw = np.asarray(jax.random.uniform(theirs, (17, 3), dtype="float64"))
        assert np.array_equal(draw, fr.uniform(ours, (17, 3), dtype=torch.float64).numpy())
        draw = np.asarray(jax.random.normal(theirs, (999,), dtype="float64"))
        np.testing.assert_allclose(fr.normal(ours, (999,), dtype=torch.float64), draw, rtol=1e-12)


# Slices


@st.composite
def slices(draw: Callable) -> tuple:
    """A shape, an index of the generator, and the same index for a tensor's dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    index: list = []
    positions = []
    for size in shape:
        start = draw(st.integers(0, size))
        stop, step = draw(st.integers(start, size)), draw(st.integers(1, 3))
        kind = draw(st.sampled_from(["whole", "slice", "tensor", "picks"]))
        if kind == "whole":
            index.append(None)
            positions.append(torch.arange(size))
        elif kind == "slice":
            index.append(slice(start, stop, step))
            positions.append(torch.arange(start, stop, step))
        elif kind == "tensor":
            index.append(torch.tensor(start) + torch.arange(stop - start, dtype=torch.int32))
            positions.append(torch.arange(start, stop))
        else:
            picks = draw(st.lists(st.integers(0, size - 1), max_size=4)) if size else []
            index.append(torch.tensor(picks, dtype=torch.int64))
            positions.append(index[-1])
    return shape, index, positions


@settings(max_examples=60, deadline=None, derandomize=True)
@given(slices(), st.integers(0, 2**64 - 1))
def test_a_slice_is_the_slice_of_the_whole(case: tuple, seed: int) -> None:
    shape, index, positions = case
    key = fr.key(seed)
    samplers = [
        fr.bits,
        lambda k, s, index=None: fr.uniform(k, s, low=-3.0, high=0.1, index=index),
        lambda k, s, index=None: fr.uniform(k, s, dtype=torch.float64, index=index),
        lambda k, s, index=None: fr.normal(k, s, dtype=torch.bfloat16, index=index),
        lambda k, s, index=None: fr.normal(k, s, index=index),
        lambda k, s, index=None: fr.truncated_normal(k, -1.0, 1.0, s, index=index),
        lambda k, s, index=None: fr.bernoulli(k, 0.4, s, index=index),
    ]
    for sampler in samplers:
        whole = sampler(key, shape)
        for d, p in enumerate(positions):
            whole = whole.index_select(d, p)
        part = sampler(key, shape, index=index)
        assert part.shape == whole.shape and torch.equal(part, whole)


def test_huge_shapes_count_in_64_bits() -> None:
    key = fr.key(9)
    for row, column in ((0, 5), (4095, 2**20 - 1), (4096, 0), (2**20 - 1, 2**20 - 1)):
        flat = row * HUGE[1] + column
        expected = hash_block(key, torch.tensor([flat >> 32, flat & 0xFFFFFFFF]))
        for index in ((slice(row, row + 1), slice(column, column + 1)), (torch.tensor([row]), torch.tensor([column]))):
            assert fr.bits(key, HUGE, index=index).item() == (expected[0] ^ expected[1]).item()
    # The 32-bit and the 64-bit counter arithmetic agree where both apply.
    assert torch.equal(fr.bits(key, (2**40,), index=(slice(0, 50),)), fr.bits(key, (50,)))
    edge = 2**31 - 3
    assert torch.equal(
        fr.bits(key, (2**31,), index=(slice(edge, edge + 3),)),
        fr.bits(key, (2**31 + 1,), index=(slice(edge, edge + 3),)),
    )


def test_a_traced_offset_draws_the_slice() -> None:
    def draw(key: Tensor, start: Tensor) -> Tensor:
        return fr.normal(key, (64, 6), index=(start + torch.arange(8), None))

    traced = make_fx(draw)(fr.key(3), torch.tensor(0))
    targets = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert not [t for t in targets if "rand" in t or "philox" in t or "bernoulli" in t or "_local_scalar" in t]
    whole = fr.normal(fr.key(5), (64, 6))
    for start in (0, 24, 56):
        assert torch.equal(traced(fr.key(5), torch.tensor(start)), whole[start : start + 8])
    assert torch.equal(torch.func.vmap(draw, (None, 0))(fr.key(5), torch.tensor([0, 8])).flatten(0, 1), whole[:16])


# Statistics. The draws are fixed, so the bounds cannot flake; 4.5 sigma leaves room for some 100 statistics at once.

SIGMAS = 4.5


def chi_square_z(words: Tensor, bins: int = 256) -> float:
    counts = torch.bincount(words.flatten() * bins >> 32, minlength=bins).double()
    expected = words.numel() / bins
    return (((counts - expected) ** 2 / expected).sum().item() - (bins - 1)) / math.sqrt(2 * (bins - 1))


def correlation_z(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten().double(), b.flatten().double()
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item() * math.sqrt(a.numel())


def word_faults(words: Tensor) -> list[str]:
    """What is wrong with words [keys, elements] that should be independent and uniform on 32 bits."""
    z = {"chi square": chi_square_z(words), "low bits": chi_square_z((words << 16) & 0xFFFFFFFF)}
    z["neighbours"] = correlation_z(words[:, 1:], words[:, :-1])
    z["keys"] = correlation_z(words[1:], words[:-1])
    for bit in range(32):
        z[f"bit {bit}"] = ((words >> bit & 1).double().mean().item() - 0.5) * 2 * math.sqrt(words.numel())
    flips = words[:, 1:] ^ words[:, :-1]
    for bit in range(32):
        z[f"flips of bit {bit}"] = ((flips >> bit & 1).double().mean().item() - 0.5) * 2 * math.sqrt(flips.numel())
    return [f"{name}: {value:.1f}" for name, value in z.items() if not abs(value) < SIGMAS]


def draw_words(keys: Tensor, n: int = 512) -> Tensor:
    return torch.func.vmap(lambda k: fr.bits(k, (n,)))(keys)


def test_words_are_uniform_and_independent() -> None:
    root = fr.key(0)
    seeds = torch.stack([fr.key(s) for s in range(128)])
    folded = torch.func.vmap(fr.fold_in, (None, 0))(root, torch.arange(128) + 1000)
    for keys in (seeds, fr.split(root, 128), folded):
        assert not word_faults(draw_words(keys))
    assert not word_faults(folded.T.contiguous())
    assert abs(correlation_z(draw_words(fr.split(fr.key(1), 64)), draw_words(fr.split(fr.key(2), 64)))) < SIGMAS


def test_the_statistics_notice_missing_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = torch.stack([fr.key(s) for s in range(128)])
    monkeypatch.setattr(fr, "_ROTATIONS", ((13,), (17,)))
    assert word_faults(draw_words(seeds))
    monkeypatch.setattr(fr, "_ROTATIONS", ((13, 15), (17, 29)))
    assert fr.bits(fr.key(0), (1,)).item() != 0x6B200159 ^ 0x99BA4EFE


def test_moments_of_normals() -> None:
    keys = fr.split(fr.key(4), 64)
    for dtype in (torch.float32, torch.float64):
        x = torch.func.vmap(lambda k, dtype=dtype: fr.normal(k, (4096,), dtype=dtype))(keys).double()
        root = math.sqrt(x.numel())
        # Standard errors of the first four moments of a standard normal are 1, sqrt 2, sqrt 15 and sqrt 96 over root n.
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs((x**power).mean().item() - moment) * root / math.sqrt(variance) < SIGMAS
        means = x.mean(dim=1) * 64
        assert abs(means.var().item() - 1) / math.sqrt(2 / 63) < SIGMAS
        cdf = (1 + torch.erf(x.flatten().sort().values / math.sqrt(2))) / 2
        distance = (cdf - (torch.arange(x.numel()) + 0.5) / x.numel()).abs().max().item()
        assert distance * root < 1.95  # Kolmogorov-Smirnov at about 1 in 1000


def test_uniform_fills_its_half_open_range() -> None:
    key = fr.key(6)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for low, high in ((0.0, 1.0), (-1.0, 1.0), (1000.0, 1001.0), (-2.0, 0.0), (-0.3, 0.7)):
            if dtype is torch.bfloat16 and low == 1000.0:
                continue
            x = fr.uniform(key, (100_000,), low=low, high=high, dtype=dtype)
            rounded = torch.tensor([low, high], dtype=torch.float64).to(dtype)
            assert x.dtype is dtype and bool(((x >= rounded[0]) & (x < rounded[1])).all())
            if low != 1000.0:
                assert x.double().mean().item() == pytest.approx((low + high) / 2, abs=0.01)


def test_truncated_normal_stays_strictly_inside() -> None:
    key = fr.key(8)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for lower, upper in ((-2.0, 2.0), (0.0, 0.5), (-math.inf, -1.0), (-math.inf, math.inf), (1.5, 20.0)):
            x = fr.truncated_normal(key, lower, upper, (20_000,), dtype=dtype).double()
            assert bool(((x > lower) & (x < upper) & x.isfinite()).all())
            pdf = [math.exp(-min(b * b, 1e4) / 2) / math.sqrt(2 * math.pi) for b in (lower, upper)]
            mass = (math.erf(upper / math.sqrt(2)) - math.erf(lower / math.sqrt(2))) / 2
            assert x.mean().item() == pytest.approx((pdf[0] - pdf[1]) / mass, abs=0.04)


def test_bernoulli_rates() -> None:
    key, n = fr.key(10), 100_000
    for p in (0.001, 0.1, 0.5, 0.9):
        hits = fr.bernoulli(key, p, (n,)).double().sum().item()
        assert abs(hits - n * p) / math.sqrt(n * p * (1 - p)) < SIGMAS
        assert torch.equal(fr.bernoulli(key, torch.tensor(p), (n,)), fr.bernoulli(key, p, (n,)))
    assert not fr.bernoulli(key, 0, (n,)).any() and fr.bernoulli(key, 1, (n,)).all()


# Transformations


def test_vmap_over_keys_is_a_loop() -> None:
    keys = fr.split(fr.key(11), 3)
    for sampler in (
        lambda k: fr.bits(k, (2, 5)),
        lambda k: fr.normal(k, (2, 5)),
        lambda k: fr.fold_in(k, "w"),
        lambda k: fr.split(k, 3),
        lambda k: fr.bits(k, HUGE, index=(slice(5000, 5002), slice(0, 3))),
    ):
        expected = torch.stack([sampler(k) for k in keys])
        assert torch.equal(torch.func.vmap(sampler)(keys), expected)
        assert torch.equal(torch.func.vmap(sampler, in_dims=1)(keys.T), expected)


def test_compiled_equals_eager() -> None:
    def draw(key: Tensor, x: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        # An odd length leaves a scalar tail after the vectors, and the start crosses a carry into the high word.
        x = x * fr.bernoulli(key, 0.9, x.shape) / 0.9
        index = (slice(4095, 4097), start + torch.arange(37))
        return x, fr.bits(key, HUGE, index=index)

    key, x, start = fr.key(0x13198A2E83707344), torch.arange(1003.0), torch.tensor(2**20 - 37)
    for got, expected in zip(torch.compile(draw, fullgraph=True)(key, x, start), draw(key, x, start), strict=True):
        assert torch.equal(got, expected)


def test_a_name_folds_in_under_compile() -> None:
    folded = torch.compile(lambda k: fr.fold_in(k, "layers.0.weight"), backend="eager", fullgraph=True)(KEY)
    assert torch.equal(folded, fr.fold_in(KEY, "layers.0.weight"))
    assert not torch.equal(folded, fr.fold_in(KEY, "layers.1.weight"))


def test_compiled_known_answers() -> None:
    counters, keys, answers = (torch.tensor(column) for column in zip(*KNOWN, strict=True))
    compiled = torch.compile(torch.func.vmap(hash_block), fullgraph=True)
    assert torch.equal(compiled(keys, counters), answers)


# Refusals


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: fr.key(1.5), TypeError, "seed is 1.5"),
        (lambda: fr.key(True), TypeError, "seed is True"),
        (lambda: fr.key(-1), ValueError, "seed is -1"),
        (lambda: fr.key(2**64), ValueError, "seed is 18446744073709551616"),
        (lambda: fr.fold_in(KEY, 1.5), TypeError, "data is 1.5"),
        (lambda: fr.fold_in(KEY, -1), ValueError, "data is -1"),
        (lambda: fr.fold_in(KEY, 2**32), ValueError, "data is 4294967296"),
        (lambda: fr.fold_in(KEY, torch.tensor([1])), ValueError, r"data has shape \[1\]"),
        (lambda: fr.fold_in(KEY, torch.tensor(1.0)), ValueError, "float32"),
        (lambda: fr.split(KEY, 0), ValueError, "num is 0"),
        (lambda: fr.split(KEY, 2.0), TypeError, "num is 2.0"),
        (lambda: fr.bits([0, 1], (2,)), TypeError, r"key is \[0, 1\]"),
        (lambda: fr.bits(KEY.int(), (2,)), ValueError, "int32"),
        (lambda: fr.bits(fr.split(KEY), (2,)), ValueError, r"shape \[2, 2\]"),
        (lambda: fr.bits(KEY, 3), TypeError, "shape is 3"),
        (lambda: fr.bits(KEY, (2, 1.0)), TypeError, "shape is"),
        (lambda: fr.bits(KEY, (2, -1)), ValueError, r"shape is \(2, -1\)"),
        (lambda: fr.bits(KEY, (2**32, 2**31)), ValueError, "below 2"),
        (lambda: fr.bits(KEY, (4, 4), index=(None,)), ValueError, "one entry per dimension"),
        (lambda: fr.bits(KEY, (4,), index=(slice(0, 5),)), ValueError, "stop <= 4"),
        (lambda: fr.bits(KEY, (4,), index=(slice(-1, None),)), ValueError, "slice"),
        (lambda: fr.bits(KEY, (4,), index=(slice(3, 2),)), ValueError, "slice"),
        (lambda: fr.bits(KEY, (4,), index=(slice(0, 4, -1),)), ValueError, "step >= 1"),
        (lambda: fr.bits(KEY, (4,), index=(slice(torch.tensor(0), 2),)), ValueError, "int bounds"),
        (lambda: fr.bits(KEY, (4,), index=(2,)), TypeError, "index entry is 2"),
        (lambda: fr.bits(KEY, (4,), index=(torch.tensor(2),)), ValueError, "1-D"),
        (lambda: fr.bits(KEY, (4,), index=(torch.tensor([True]),)), ValueError, "bool"),
        (lambda: fr.uniform(KEY, (2,), dtype=torch.int32), ValueError, "torch.int32"),
        (lambda: fr.uniform(KEY, (2,), low=1.0, high=1.0), ValueError, "low is 1.0"),
        (lambda: fr.uniform(KEY, (2,), high=math.inf), ValueError, "high is inf"),
        (lambda: fr.uniform(KEY, (2,), high=math.nan), ValueError, "high is nan"),
        (lambda: fr.uniform(KEY, (2,), low=1.0, high=1.001, dtype=torch.bfloat16), ValueError, "rounded"),
        (lambda: fr.uniform(KEY, (2,), high=torch.tensor(2.0)), TypeError, "float"),
        (lambda: fr.normal(KEY, (2,), dtype=torch.complex64), ValueError, "complex64"),
        (lambda: fr.truncated_normal(KEY, 1.0, 1.0, (2,)), ValueError, "bounds 1.0 and 1.0"),
        (lambda: fr.truncated_normal(KEY, 8.0, 9.0, (2,)), ValueError, "no mass"),
        (lambda: fr.truncated_normal(KEY, math.nan, 1.0, (2,)), ValueError, "nan"),
        (lambda: fr.truncated_normal(KEY, "a", 1.0, (2,)), TypeError, "'a'"),
        (lambda: fr.truncated_normal(KEY, 0.0, 1.0, (2,), dtype=torch.int8), ValueError, "int8"),
        (lambda: fr.bernoulli(KEY, 1.5, (2,)), ValueError, "p is 1.5"),
        (lambda: fr.bernoulli(KEY, math.nan, (2,)), ValueError, "p is nan"),
        (lambda: fr.bernoulli(KEY, "half", (2,)), TypeError, "'half'"),
        (lambda: fr.bernoulli(KEY, torch.tensor(1), (2,)), ValueError, "int64"),
    ],
)
def test_refusals(call: Callable, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value) and "allowed" in str(caught.value)

"""Explicit-key, counter-based random numbers: Threefry-2x32 with one counter per global element.

A draw is a pure function of (key, global shape, element index), so a rank draws its slice of a global array alone and
gets the very bits of the whole. Streams equal ``jax.random`` with ``jax_threefry_partitionable=True``.
Use each key once: ``split``, ``fold_in`` and the samplers all hash the same counters, so fold or split before drawing.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry-2x32, 20 rounds).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from fmeg.fusion import materialize

Index = Sequence[slice | Tensor | None]

_MASK32 = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def key(seed: int) -> Tensor:
    """Make a key from a seed: an int64 tensor [2] holding (seed >> 32, seed & 0xffffffff).

    Raises TypeError when seed is no int, ValueError when it is outside [0, 2**64).

    >>> import fmeg.random as fr
    >>> fr.key(2**32 + 7).tolist()
    [1, 7]
    """
    if not _is_int(seed):
        raise TypeError(f"key: seed is {seed!r}; an int is allowed; pass int(seed)")
    if not 0 <= seed < 2**64:
        raise ValueError(f"key: seed is {seed}; 0 <= seed < 2**64 is allowed; reduce it modulo 2**64")
    return torch.tensor([seed >> 32, seed & _MASK32], dtype=torch.int64)


def fold_in(key: Tensor, data: int | str | Tensor) -> Tensor:
    """Derive a key [2] from a key [2] and 32 bits of data; equals ``jax.random.fold_in``.

    data is an int in [0, 2**32), a 0-d integer tensor (a rank or step; its low 32 bits count) or a str, such as a
    parameter's path, for which the crc32 of its UTF-8 bytes is folded in. Raises TypeError or ValueError otherwise.

    >>> import fmeg.random as fr
    >>> torch.equal(fr.fold_in(fr.key(0), torch.tensor(3)), fr.fold_in(fr.key(0), 3))
    True
    """
    k0, k1 = _key_words(key)
    if isinstance(data, str):
        data = _crc32(data)
    if isinstance(data, Tensor):
        if data.ndim != 0 or data.dtype not in (torch.int32, torch.int64):
            what = f"shape {list(data.shape)} and dtype {data.dtype}"
            raise ValueError(f"fold_in: data has {what}; a 0-d int32 or int64 tensor is allowed; index it or use vmap")
    elif not _is_int(data):
        raise TypeError(f"fold_in: data is {data!r}; an int, a str or a 0-d integer tensor is allowed; convert it")
    elif not 0 <= data < 2**32:
        raise ValueError(f"fold_in: data is {data}; 0 <= data < 2**32 is allowed; fold high and low words in turn")
    else:
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    return _unsigned(torch.stack(_threefry(k0, k1, 0, data.to(torch.int32))))


def split(key: Tensor, num: int = 2) -> Tensor:
    """Derive num independent keys [num, 2] from one key [2]; equals ``jax.random.split``. Row i is fold_in of i.

    Raises TypeError or ValueError when num is no int in [1, 2**31].

    >>> import fmeg.random as fr
    >>> dropout_key, init_key = fr.split(fr.key(0))
    """
    if not _is_int(num):
        raise TypeError(f"split: num is {num!r}; an int is allowed; pass int(num)")
    if not 1 <= num <= 2**31:
        raise ValueError(f"split: num is {num}; 1 <= num <= 2**31 is allowed; split the new keys again for more")
    return _unsigned(torch.stack(_words(key, (num,), None), dim=-1))


def bits(key: Tensor, shape: Sequence[int], *, index: Index | None = None) -> Tensor:
    """Draw 32 random bits per element as int64 values in [0, 2**32); equals ``jax.random.bits``.

    shape is that of the global array, fewer than 2**63 elements. index selects a slice of it, drawn alone: one entry
    per dimension, each None (all of it), a slice with static bounds 0 <= start <= stop <= size and a positive step,
    or a 1-D integer tensor of global positions, whose values may be traced and are therefore not checked.
    Raises TypeError or ValueError for a bad key, shape or index. Source: JAX's partitionable counter layout.

    >>> import fmeg.random as fr
    >>> part = fr.bits(fr.key(0), (4, 6), index=(slice(1, 3), torch.tensor(2) + torch.arange(3)))
    >>> torch.equal(part, fr.bits(fr.key(0), (4, 6))[1:3, 2:5])
    True
    """
    x0, x1 = _words(key, shape, index)
    return _unsigned(x0 ^ x1)


def uniform(
    key: Tensor,
    shape: Sequence[int],
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
    index: Index | None = None,
) -> Tensor:
    """Draw uniforms in [low, high) on the key's device; shape and index as in ``bits``.

    Equals ``jax.random.uniform`` bit for bit in float32 and float64, except that high itself is never returned (its
    predecessor is) and that a compiler may round u * (high - low) + low once, as XLA does on CPUs. float16 and
    bfloat16 draw in float32, round to nearest, and are kept below high alike. low and high are rounded to dtype first.
    Raises TypeError for bounds that are no floats, ValueError unless both are finite and low < high.

    >>> import fmeg.random as fr
    >>> fr.uniform(fr.key(0), (2,), low=-1.0).tolist()
    [0.895334005355835, 0.9571597576141357]
    """
    draw = _draw_dtype("uniform", dtype)
    _check_floats("uniform", low, high)
    limit = torch.finfo(dtype).max
    if not -limit <= low < high <= limit or not _nearest(low, dtype) < _nearest(high, dtype):
        what = f"low is {low} and high is {high}"
        raise ValueError(f"uniform: {what}; finite low < high is allowed, also rounded to {dtype}; widen the range")
    low, high = _nearest(low, dtype), _nearest(high, dtype)
    u = _unit(key, shape, index, draw)
    if (low, high) != (0.0, 1.0):
        u = u * _nearest(high - low, draw) + low
    elif draw is dtype:
        return u
    return u.to(dtype).clamp(low, _below(high, dtype))


def normal(key: Tensor, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, index: Index | None = None) -> Tensor:
    """Draw standard normals as sqrt(2) * erfinv(uniform in (-1, 1)), JAX's method; shape and index as in ``bits``.

    Equals ``jax.random.normal``, and compiled code equals eager, up to the last bits of their different erfinv; float16
    and bfloat16 draw in float32 and round.

    >>> import fmeg.random as fr
    >>> fr.normal(fr.key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    draw = _draw_dtype("normal", dtype)
    # erfinv(-1) is -inf, so the closed end of the interval starts one value later.
    u = uniform(key, shape, low=-_below(1.0, draw), dtype=draw, index=index)
    return (math.sqrt(2.0) * torch.erfinv(u)).to(dtype)


def truncated_normal(
    key: Tensor,
    lower: float,
    upper: float,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    index: Index | None = None,
) -> Tensor:
    """Draw standard normals conditioned on lower < x < upper, strictly, by the inverse CDF; JAX's method.

    shape and index as in ``bits``; lower and upper are floats, infinite ones allowed. Raises TypeError for others,
    ValueError unless lower < upper, a dtype value lies between, and erf in the drawing dtype tells their mass from 0.

    >>> import fmeg.random as fr
    >>> bool((fr.truncated_normal(fr.key(0), -2.0, 2.0, (100,)).abs() < 2).all())
    True
    """
    draw = _draw_dtype("truncated_normal", dtype)
    _check_floats("truncated_normal", lower, upper)
    if not lower < upper:
        raise ValueError(f"truncated_normal: bounds {lower} and {upper}; lower < upper is allowed; swap or widen them")
    # Clipping erf at -edge keeps erfinv finite where a far lower bound would round to -1.
    edge, lo, hi = _below(1.0, draw), max(lower, -64.0), min(upper, 64.0)
    a, b = (_nearest(max(math.erf(x / math.sqrt(2.0)), -edge), draw) for x in (lo, hi))
    first, last = -_below(-lo, dtype), _below(hi, dtype)
    if not (a < b and first <= last):
        what = f"bounds {lower} and {upper} hold no {dtype} value or no mass in {draw}"
        raise ValueError(f"truncated_normal: {what}; bounds with both are allowed; widen them or use float64")
    u = uniform(key, shape, low=a, high=b, dtype=draw, index=index)
    return (math.sqrt(2.0) * torch.erfinv(u)).to(dtype).clamp(first, last)


def bernoulli(key: Tensor, p: float | Tensor, shape: Sequence[int], *, index: Index | None = None) -> Tensor:
    """Draw bools that are True with probability p, as uniform < p; equals ``jax.random.bernoulli``.

    p is a float in [0, 1], rounded to float32, or a float tensor that broadcasts to the selected shape (float64 ones
    draw in float64); a tensor's values are not checked. shape and index as in ``bits``. Raises TypeError or ValueError.

    >>> import fmeg.random as fr
    >>> fr.bernoulli(fr.key(0), 0.9, (4,)).tolist()
    [False, False, True, True]
    """
    if isinstance(p, Tensor):
        return _unit(key, shape, index, _draw_dtype("bernoulli", p.dtype)) < p
    _check_floats("bernoulli", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: p is {p}; 0 <= p <= 1 is allowed; pass a probability")
    return _unit(key, shape, index, torch.float32) < _nearest(p, torch.float32)


def _threefry(k0: Tensor, k1: Tensor, x0: Tensor | int, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32, 20 rounds, on int32 words that stand for uint32."""
    # int32 rather than masked int64: half the traffic, so 1.7 times as fast compiled on a CPU and 3.5 times eager.
    # Sums wrap by design. Vector code wraps; where a compiler takes signed overflow as undefined and widens a sum, the
    # result still holds, since only a sum's low 32 bits are ever observed. Tests check compiled known answers.
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    y0, y1 = k0 + x0, k1 + x1
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            # Stored after each round: inlined, every use would repeat it, 3**n times over n rounds. Still one kernel.
            y0 = materialize(y0 + y1)
            y1 = materialize(((y1 << r) | ((y1 >> (32 - r)) & ((1 << r) - 1))) ^ y0)
        y0, y1 = y0 + schedule[(i + 1) % 3], y1 + (schedule[(i + 2) % 3] + (i + 1))
    return y0, y1


def _words(key: Tensor, shape: Sequence[int], index: Index | None) -> tuple[Tensor, Tensor]:
    """Hash the row-major global index of every selected element into two int32 words."""
    k0, k1 = _key_words(key)
    if not isinstance(shape, Sequence) or not all(_is_int(n) for n in shape):
        raise TypeError(f"shape is {shape!r}; a sequence of ints is allowed; pass a tuple such as (4, 8)")
    numel = math.prod(shape)
    if any(n < 0 for n in shape) or numel >= 2**63:
        raise ValueError(f"shape is {tuple(shape)}; sizes >= 0 with a product below 2**63 are allowed; fix the sizes")
    dtype = torch.int32 if numel <= 2**31 else torch.int64
    if index is None:
        flat = torch.arange(numel, dtype=dtype, device=key.device).reshape(tuple(shape))
    else:
        if not isinstance(index, Sequence) or len(index) != len(shape):
            raise ValueError(f"index is {index!r}; one entry per dimension of {tuple(shape)} is allowed; add None")
        flat = torch.zeros((), dtype=dtype, device=key.device)
        for d, (size, entry) in enumerate(zip(shape, index, strict=True)):
            column = _positions(size, entry, dtype, key.device) * math.prod(shape[d + 1 :])
            flat = flat + column.reshape(-1, *[1] * (len(shape) - d - 1))
    # Up to 2**31 elements the counter's high word is 0, and its low word needs no 64-bit arithmetic.
    return _threefry(k0, k1, 0 if dtype is torch.int32 else (flat >> 32).to(torch.int32), flat.to(torch.int32))


def _positions(size: int, entry: slice | Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(entry, Tensor):
        if entry.ndim != 1 or entry.dtype not in (torch.int32, torch.int64):
            what = f"shape {list(entry.shape)} and dtype {entry.dtype}"
            raise ValueError(f"index tensor has {what}; a 1-D int32 or int64 one is allowed; use start + arange(n)")
        return entry.to(dtype)
    if entry is not None and not isinstance(entry, slice):
        raise TypeError(f"index entry is {entry!r}; None, a slice or a 1-D tensor is allowed; use slice(i, i + 1)")
    given = (None, None, None) if entry is None else (entry.start, entry.stop, entry.step)
    start, stop, step = (b if a is None else a for a, b in zip(given, (0, size, 1), strict=True))
    if not all(_is_int(n) for n in (start, stop, step)) or not 0 <= start <= stop <= size or step < 1:
        allowed = f"int bounds 0 <= start <= stop <= {size} and step >= 1"
        raise ValueError(f"index entry is {entry!r}; {allowed} are allowed; use a tensor for other positions")
    return torch.arange(start, stop, step, dtype=dtype, device=device)


def _unit(key: Tensor, shape: Sequence[int], index: Index | None, dtype: torch.dtype) -> Tensor:
    """Uniforms in [0, 1) with as many random bits as the mantissa stores."""
    x0, x1 = _words(key, shape, index)
    if dtype is torch.float64:
        return ((_unsigned(x0) << 20) | (_unsigned(x1) >> 12)).to(dtype) * 2.0**-52
    return (((x0 ^ x1) >> 9) & 0x7FFFFF).to(dtype) * 2.0**-23


def _key_words(key: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(key, Tensor) or key.shape != (2,) or key.dtype is not torch.int64:
        what = f"of shape {list(key.shape)} and {key.dtype}" if isinstance(key, Tensor) else repr(key)
        raise (ValueError if isinstance(key, Tensor) else TypeError)(
            f"key is {what}; an int64 tensor of shape [2] is allowed; make it with key(seed), vmap over many"
        )
    k0, k1 = key.to(torch.int32).unbind()
    return k0, k1


def _unsigned(words: Tensor) -> Tensor:
    return words.to(torch.int64) & _MASK32


@torch.compiler.assume_constant_result
def _crc32(text: str) -> int:
    return zlib.crc32(text.encode())


def _is_int(n: object) -> TypeGuard[int]:
    return isinstance(n, int | torch.SymInt) and not isinstance(n, bool)


def _check_floats(name: str, *values: float) -> None:
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise TypeError(f"{name}: a bound or probability of {values!r} is no float; floats are allowed; pass float(x)")


def _draw_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name}: dtype is {dtype}; float16, bfloat16, float32 or float64 is allowed; choose one")
    return torch.float64 if dtype is torch.float64 else torch.float32


# These two work on Python floats: bounds stay constants under tracing, where a tensor's value could not be read.
def _nearest(x: float, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    ulp = max(math.ldexp(info.eps, math.frexp(x)[1] - 1), info.tiny * info.eps)
    return round(x / ulp) * ulp


def _below(x: float, dtype: torch.dtype) -> float:
    """The largest dtype value below x (below 0: the largest normal one)."""
    info, near = torch.finfo(dtype), _nearest(x, dtype)
    if near < x or x == 0.0:
        return near or -info.tiny
    mantissa, exponent = math.frexp(near)
    return near - max(math.ldexp(info.eps, exponent - (2 if mantissa == 0.5 else 1)), info.tiny * info.eps)

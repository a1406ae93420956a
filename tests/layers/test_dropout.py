"""Dropout by key: rate, scale, and masks that belong to a row's place in the global batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmeg import random
from fmeg.layers import dropout as layer
from fmeg.layers.dropout import DropoutKey
from fmeg.sharding.spec import P

KEY = random.key(5)


def dropout(x: Tensor, rate: float, key: DropoutKey | None) -> Tensor:
    """On a single device, where a layout names dimensions and changes nothing."""
    return layer.dropout(x, rate, key, P("batch", *[None] * (x.ndim - 1)), None)


def rows(*values: int) -> DropoutKey:
    return DropoutKey(KEY, torch.tensor(values))


def drawn(*shape: int) -> Tensor:
    """Without a zero, so that what was dropped can be told."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate_and_the_rest_is_scaled(rate: float) -> None:
    """The bound is five standard errors of the share."""
    x = drawn(4, 10_000)
    y = dropout(x, rate, rows(0, 1, 2, 3))
    share = (y == 0).float().mean().item()
    assert abs(share - rate) < 5 * (rate * (1 - rate) / x.numel()) ** 0.5
    torch.testing.assert_close(y[y != 0], (x / (1 - rate))[y != 0])


def test_without_a_key_or_a_rate_nothing_happens() -> None:
    x = drawn(2, 3)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, rows(0, 1)) is x


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.sampled_from([(), (7,), (3, 5), (2, 3, 4)]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_row_draws_what_it_draws_in_the_whole_batch(places: list[int], shape: tuple[int, ...]) -> None:
    """Any subset, order or repetition of the 100 rows, under the mask of each."""
    x = drawn(100, *shape)
    whole = dropout(x, 0.5, rows(*range(100)))
    assert torch.equal(dropout(x[places], 0.5, rows(*places)), whole[places])


@pytest.mark.parametrize("row", [1, 2**24, 2**32, 2**40])
def test_no_row_of_a_large_batch_repeats_another(row: int) -> None:
    """Also where the index of the row's elements in the whole batch does not fit into 32 bits."""
    first, other = (dropout(torch.ones(2, 256), 0.5, rows(0, row)) == 0).unbind()
    assert abs((first == other).float().mean().item() - 0.5) < 0.16
    assert torch.equal(dropout(torch.ones(1, 256), 0.5, rows(row))[0] == 0, other)


def test_places_of_a_model_drop_independently() -> None:
    """The masks of two places agree at half of their elements; the i-th place does not depend on how many there are."""
    x = torch.ones(4, 2500)
    masks = [dropout(x, 0.5, key) == 0 for key in rows(0, 1, 2, 3).split(4)]
    for i in range(4):
        for j in range(i):
            agree = (masks[i] == masks[j]).float().mean().item()
            assert abs(agree - 0.5) < 0.025, (i, j)
    longer = [dropout(x, 0.5, key) == 0 for key in rows(0, 1, 2, 3).split(9)]
    assert all(torch.equal(a, b) for a, b in zip(masks, longer, strict=False))


def test_the_mean_over_keys_is_the_input() -> None:
    """Within five standard errors: the variance of one draw of 1 is rate / (1 - rate)."""
    n, rate, x = 2000, 0.3, drawn(2, 8)
    places = torch.arange(2)
    ys = torch.func.vmap(lambda key: dropout(x, rate, DropoutKey(key, places)))(random.split(KEY, n))
    assert ((ys.mean(0) - x).abs() < 5 * x * (rate / (1 - rate) / n) ** 0.5).all()


def test_the_gradient_is_the_mask() -> None:
    x, key = drawn(3, 50), rows(4, 9, 2)
    y, pullback = torch.func.vjp(lambda x: dropout(x, 0.25, key), x)
    want = torch.where(y == 0, 0.0, 1 / 0.75)
    torch.testing.assert_close(pullback(torch.ones_like(y))[0], want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_mask_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    x, key = drawn(2, 300), rows(0, 1)
    y = dropout(x.to(dtype), 0.5, key)
    assert y.dtype == dtype
    assert torch.equal(y == 0, dropout(x, 0.5, key) == 0)


def test_what_is_dropped_does_not_spread_a_non_finite_number() -> None:
    x = torch.full((1, 100), torch.inf)
    y = dropout(x, 0.5, rows(0))
    assert set(y.flatten().tolist()) == {0.0, torch.inf}

"""Norms against torch's own, in fp64; statistics in fp32 for bf16 inputs; derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import RELATIVE, assert_trees_close, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmeg.layers.norm import norm, norm_specs
from fmeg.params import init_from_specs

KINDS = ["LayerNorm", "RMSNorm"]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(kind: str, size: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    params = {"scale": drawn(size, seed=1, dtype=dtype)}
    return params | {"bias": drawn(size, seed=2, dtype=dtype)} if kind == "LayerNorm" else params


def reference(params: dict[str, Tensor], x: Tensor, kind: str, eps: float) -> Tensor:
    if kind == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], params["scale"], params["bias"], eps)
    return F.rms_norm(x, x.shape[-1:], params["scale"], eps)


@given(
    kind=st.sampled_from(KINDS),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    shift=st.sampled_from([0.0, 3.0]),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_equals_torch(kind: str, shape: list[int], eps: float, shift: float) -> None:
    cfg = small_config(normalization=kind, layernorm_epsilon=eps)
    params, x = weights(kind, shape[-1]), drawn(*shape) + shift
    assert_trees_close(norm(params, x, cfg), reference(params, x, kind, eps), rtol=RELATIVE[torch.float64])


@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_centred_scale_is_stored_as_its_distance_from_one(kind: str) -> None:
    cfg, params, x = small_config(normalization=kind), weights(kind, 16), drawn(3, 16)
    centred = norm(params | {"scale": params["scale"] - 1}, x, cfg.replace(layernorm_zero_centered_gamma=True))
    assert_trees_close(centred, norm(params, x, cfg), rtol=RELATIVE[torch.float64])


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_are_the_plain_norm(kind: str, zero_centred: bool) -> None:
    cfg = small_config(normalization=kind, layernorm_zero_centered_gamma=zero_centred)
    params = init_from_specs(norm_specs(cfg, 32), seed=0, dtype=torch.float64)
    assert ("bias" in params) is (kind == "LayerNorm")
    y = norm(params, drawn(5, 32) * 7 + (2 if kind == "LayerNorm" else 0), cfg)
    want = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(y.square().mean(-1), want, rtol=1e-5, atol=0)
    if kind == "LayerNorm":
        torch.testing.assert_close(y.mean(-1), torch.zeros_like(want), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_bf16_inputs_are_in_fp32(kind: str) -> None:
    """The result is the fp64 one of the same bf16 numbers, rounded once: an error of half a unit in the last place."""
    cfg = small_config(normalization=kind)
    params, x = weights(kind, 512, torch.float32), (drawn(8, 512) * 3 + 20).bfloat16()
    y = norm(params, x, cfg)
    assert y.dtype == torch.bfloat16
    want = reference({name: p.double() for name, p in params.items()}, x.double(), kind, cfg.layernorm_epsilon)
    ulp = torch.finfo(torch.bfloat16).eps
    assert ((y.double() - want).abs() <= ulp / 2 * 1.01 * want.abs() + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_has_the_dtype_of_the_input(kind: str, dtype: torch.dtype) -> None:
    """Also next to fp32 weights, as in a bf16 model."""
    params = weights(kind, 8, torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm(params, drawn(2, 8, dtype=dtype), small_config(normalization=kind)).dtype == dtype


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_equal_finite_differences(kind: str, zero_centred: bool) -> None:
    cfg = small_config(normalization=kind, layernorm_zero_centered_gamma=zero_centred)
    params = weights(kind, 6)
    leaves = [drawn(2, 6, seed=3), *params.values()]

    def fn(x: Tensor, *values: Tensor) -> Tensor:
        return norm(dict(zip(params, values, strict=True)), x, cfg)

    inputs = tuple(leaf.requires_grad_() for leaf in leaves)
    assert torch.autograd.gradcheck(fn, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fn, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_equal_numbers_stays_finite(kind: str) -> None:
    """Variance 0 (LayerNorm) or zeros (RMSNorm): epsilon alone is left under the root."""
    cfg, params = small_config(normalization=kind), weights(kind, 8, torch.float32)
    x = torch.full((2, 8), 3.0 if kind == "LayerNorm" else 0.0)
    y, pullback = torch.func.vjp(lambda x: norm(params, x, cfg), x)
    torch.testing.assert_close(y, params.get("bias", torch.zeros(8)).expand(2, 8), rtol=0, atol=1e-6)
    assert pullback(torch.ones_like(y))[0].isfinite().all()

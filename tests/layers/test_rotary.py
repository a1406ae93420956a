"""Rotary positions: known frequencies, transformers' frequencies, and what a rotation may and may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RELATIVE, assert_trees_close, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmeg
from fmeg import Llama3RopeScaling, YarnRopeScaling
from fmeg.layers.rotary import Rotary, apply_rotary, inverse_frequencies, rotary_table


def heads(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def table(cfg: fmeg.TransformerConfig, positions: Tensor) -> Rotary:
    rotary = rotary_table(cfg, positions)
    assert rotary is not None
    return rotary


@pytest.mark.parametrize(
    ("factor", "ratios"),
    [(32.0, [1.651329, 3.292262, 9.666729, 32.0]), (8.0, [1.553415, 2.694530, 5.257327, 8.0])],
)
def test_llama3_ratios(factor: float, ratios: list[float]) -> None:
    """Unscaled over scaled at index 15, 16, 17 and 31, for head dimension 64 and base 5e5."""
    cfg = small_config(kv_channels=64, rotary_base=5e5)
    scaled = cfg.replace(
        rope_scaling=Llama3RopeScaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        )
    )
    ratio = inverse_frequencies(cfg) / inverse_frequencies(scaled)
    assert ratio[[15, 16, 17, 31]].tolist() == pytest.approx(ratios, abs=2e-6)
    assert ratio[:15].tolist() == pytest.approx([1.0] * 15, abs=1e-6)


def hugging_face(kind: str, cfg: fmeg.TransformerConfig, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Longer than the original length by the factor, so that transformers has nothing to warn about.
    longest = int(parameters["factor"] * parameters["original_max_position_embeddings"])
    config = LlamaConfig(
        hidden_size=cfg.head_dim * 4,
        num_attention_heads=4,
        head_dim=cfg.head_dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, "rope_theta": cfg.rotary_base, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "fields",
    [
        {"factor": 8.0, "original_max_position_embeddings": 8192},
        {"factor": 32.0, "original_max_position_embeddings": 8192, "high_freq_factor": 8.0},
        {"factor": 4.0, "original_max_position_embeddings": 256, "low_freq_factor": 2.0},
        {"factor": 1.0, "original_max_position_embeddings": 64},
    ],
)
def test_llama3_is_transformers(fields: dict[str, Any], head_dim: int, base: float) -> None:
    scaling = Llama3RopeScaling(**fields)
    cfg = small_config(kv_channels=head_dim, rotary_base=base, rope_scaling=scaling)
    full = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor} | fields
    want, attention_factor = hugging_face("llama3", cfg, full)
    torch.testing.assert_close(inverse_frequencies(cfg), want, rtol=2e-6, atol=0)
    assert attention_factor == 1.0
    cos, _ = table(cfg, torch.arange(1))
    assert (cos == 1).all()


# Base 10 is short enough for the ramp to end beyond the last dimension.
@pytest.mark.parametrize("base", [10.0, 1e4, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "fields",
    [
        {"factor": 40.0, "original_max_position_embeddings": 4096},
        {"factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16.0, "beta_slow": 2.0},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"factor": 16.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
        {"factor": 1.0, "original_max_position_embeddings": 4096},
        {"factor": 4.0, "original_max_position_embeddings": 6},  # shorter than every wavelength: a ramp of no width
    ],
)
def test_yarn_is_transformers(fields: dict[str, Any], head_dim: int, base: float) -> None:
    """Frequencies, and the factor that cosine and sine are multiplied by."""
    cfg = small_config(kv_channels=head_dim, rotary_base=base, rope_scaling=YarnRopeScaling(**fields))
    want, attention_factor = hugging_face("yarn", cfg, fields)
    torch.testing.assert_close(inverse_frequencies(cfg), want, rtol=2e-6, atol=0)
    cos, sin = table(cfg, torch.arange(5))
    assert cos[0].tolist() == pytest.approx([attention_factor] * (head_dim // 2), rel=1e-6)
    torch.testing.assert_close((cos.square() + sin.square()).sqrt(), torch.full_like(cos, attention_factor), rtol=1e-6, atol=0)


def test_without_rope_there_is_no_table() -> None:
    assert rotary_table(small_config(position_embedding_type="none"), torch.arange(4)) is None


ROTARIES = st.fixed_dictionaries(
    {
        "kv_channels": st.sampled_from([4, 8, 12]),
        "rotary_percent": st.sampled_from([0.5, 1.0]),
        "rotary_interleaved": st.booleans(),
        "rotary_base": st.sampled_from([10.0, 1e4]),
    }
).map(lambda changes: small_config(**changes))


@given(ROTARIES, st.integers(0, 500))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_rotation_keeps_lengths_and_leaves_position_zero_and_the_tail(cfg: fmeg.TransformerConfig, start: int) -> None:
    x = heads(2, 5, 3, cfg.head_dim)
    y = apply_rotary(x, table(cfg, torch.arange(start, start + 5)), cfg)
    R = cfg.rotary_dim
    # The table is fp32: its cosines and sines have a length of 1 to that precision.
    assert_trees_close(y.norm(dim=-1), x.norm(dim=-1), rtol=RELATIVE[torch.float32])
    assert torch.equal(y[..., R:], x[..., R:])
    assert not torch.allclose(y[:, 1, :, :R], x[:, 1, :, :R])
    assert torch.equal(apply_rotary(x, table(cfg, torch.zeros(5, dtype=torch.int64)), cfg), x)


@given(ROTARIES, st.integers(0, 40))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_scores_depend_on_the_distance_only(cfg: fmeg.TransformerConfig, shift: int) -> None:
    q, k = heads(1, 6, 1, cfg.head_dim), heads(1, 6, 1, cfg.head_dim, seed=1)
    q, k = q[:, :1].expand_as(q), k[:, :1].expand_as(k)  # one query and one key, at every position

    def scores(start: int) -> Tensor:
        rotary = table(cfg, torch.arange(start, start + 6))
        return torch.einsum("btnh,bsnh->ts", apply_rotary(q, rotary, cfg), apply_rotary(k, rotary, cfg))

    here = scores(0)
    for distance in range(-5, 6):
        diagonal = here.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    torch.testing.assert_close(scores(shift), here, rtol=0, atol=1e-4)
    assert (here[0, 1:] - here[0, 0]).abs().max() > 1e-3


@given(ROTARIES)
@settings(deadline=None, derandomize=True, max_examples=20)
def test_interleaved_is_a_permutation_of_the_halves(cfg: fmeg.TransformerConfig) -> None:
    """Pair i is (2i, 2i + 1) instead of (i, i + R): the same rotation after reordering."""
    x, R = heads(1, 4, 2, cfg.head_dim), cfg.rotary_dim // 2
    order = torch.stack((torch.arange(R), torch.arange(R) + R), -1).flatten()
    order = torch.cat((order, torch.arange(2 * R, cfg.head_dim)))
    rotary = table(cfg, torch.arange(4))
    halves = apply_rotary(x, rotary, cfg.replace(rotary_interleaved=False))
    neighbours = apply_rotary(x[..., order], rotary, cfg.replace(rotary_interleaved=True))
    assert torch.equal(neighbours, halves[..., order])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_turns_by_position_times_frequency(interleaved: bool) -> None:
    """As a complex number: x -> x exp(i t f)."""
    cfg = small_config(kv_channels=8, rotary_interleaved=interleaved)
    x, positions = heads(1, 7, 1, 8), torch.arange(7)
    y = apply_rotary(x, table(cfg, positions), cfg)
    pairs = [(z.unflatten(-1, (4, 2)) if interleaved else z.unflatten(-1, (2, 4)).mT).contiguous() for z in (x, y)]
    before, after = (torch.view_as_complex(z) for z in pairs)
    frequencies = 1e4 ** (-2 * torch.arange(4, dtype=torch.float64) / 8)
    angles = positions.double()[:, None] * frequencies
    want = before * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(after, want, rtol=0, atol=2e-6)


def test_a_bf16_model_has_fp32_angles_far_beyond_what_bf16_can_count() -> None:
    """Neighbours above 256 are told apart, and the rotated bf16 numbers are the exact ones, rounded once."""
    cfg = small_config(bf16=True, kv_channels=16)
    positions = torch.arange(1000, 1008)
    rotary = table(cfg, positions)
    assert rotary.cos_TR.dtype == rotary.sin_TR.dtype == torch.float32
    frequencies = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = positions.double()[:, None] * frequencies
    torch.testing.assert_close(rotary.cos_TR.double(), angles.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(rotary.sin_TR.double(), angles.sin(), rtol=0, atol=1e-4)
    assert (rotary.cos_TR.diff(dim=0)[:, 0] != 0).all()
    x = heads(1, 8, 2, 16, dtype=torch.bfloat16)
    y = apply_rotary(x, rotary, cfg)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, apply_rotary(x.double(), rotary, cfg).bfloat16())


def test_frequencies_of_partial_rotation_are_those_of_the_rotated_part() -> None:
    cfg = small_config(kv_channels=16, rotary_percent=0.5)
    want = [1e4 ** (-2 * i / 8) for i in range(4)]
    assert inverse_frequencies(cfg).tolist() == pytest.approx(want)


def test_derivatives_equal_finite_differences() -> None:
    cfg = small_config(kv_channels=8, rotary_percent=0.5, rotary_interleaved=True)
    rotary, x = table(cfg, torch.arange(3)), heads(1, 3, 2, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, rotary, cfg), (x,), check_forward_ad=True)

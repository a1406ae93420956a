"""Parameters: initial values, padding, weight-decay flags, counts, the check against the config, and the cast."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_trees_equal, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

import fmeg
from fmeg import tree
from fmeg.params import ONES, ZEROS, cast_to_compute, check_params, init_from_specs, normal
from fmeg.sharding.spec import P

OPTIONS: dict[str, Any] = {
    "normalization": st.sampled_from(["LayerNorm", "RMSNorm"]),
    "layernorm_zero_centered_gamma": st.booleans(),
    "gated_linear_unit": st.booleans(),
    "add_bias_linear": st.booleans(),
    "add_qkv_bias": st.booleans(),
    "qk_layernorm": st.booleans(),
    "position_embedding_type": st.sampled_from(["rope", "learned_absolute", "none"]),
    "share_embeddings_and_output_weights": st.booleans(),
    "num_query_groups": st.sampled_from([1, 2, 4]),
    "kv_channels": st.sampled_from([None, 12]),
    "vocab_size": st.integers(90, 140),
    "make_vocab_size_divisible_by": st.sampled_from([1, 64, 128]),
    "window_size": st.sampled_from([None, (4, 0)]),
}
CONFIGS = st.fixed_dictionaries(OPTIONS).map(lambda changes: small_config(num_layers=3, **changes))


def flat(params: Any) -> dict[str, Any]:
    return dict(tree.flatten_with_path(params))


def test_initial_values_have_the_stated_mean_and_deviation() -> None:
    """0.02, output projections 0.02 / sqrt(2 L); the bounds are six standard errors of each statistic."""
    cfg = small_config(num_layers=8, hidden_size=64, add_bias_linear=True, normalization="LayerNorm", vocab_size=500)
    for path, leaf in flat(fmeg.init_params(cfg)).items():
        if path.endswith("bias"):
            assert not leaf.any(), path
        elif path.endswith("scale"):
            assert (leaf == 1).all(), path
        else:
            leaf = leaf[:500] if path in ("embedding/tokens", "output/weight") else leaf
            want = 0.02 / (math.sqrt(2 * 8) if path.endswith(("attention/output/weight", "mlp/down/weight")) else 1)
            n = leaf.numel()
            assert leaf.mean().abs() < 6 * want / math.sqrt(n), path
            assert abs(leaf.std().item() / want - 1) < 6 / math.sqrt(2 * n), path


def test_the_standard_deviations_are_those_of_the_config() -> None:
    cfg = small_config(init_method_std=0.5, embedding_init_method_std=0.1, position_embedding_type="learned_absolute")
    want = {"embedding/tokens": 0.1, "embedding/positions": 0.1, "output/weight": 0.5}
    want |= {"layers/dense/mlp/up/weight": 0.5, "layers/dense/mlp/down/weight": 0.5 / math.sqrt(2 * cfg.num_layers)}
    specs = flat(fmeg.gpt_specs(cfg))
    assert {path: specs[path].init.std for path in want} == pytest.approx(want)


def test_a_zero_centred_scale_starts_at_zero() -> None:
    params = flat(fmeg.init_params(small_config(layernorm_zero_centered_gamma=True, qk_layernorm=True)))
    scales = [path for path in params if path.endswith("scale")]
    assert len(scales) == 5
    assert not any(params[path].any() for path in scales)


def test_seed_and_config_decide_every_bit() -> None:
    cfg = small_config()
    a, b = flat(fmeg.init_params(cfg, seed=3)), flat(fmeg.init_params(cfg, seed=4))
    assert_trees_equal(flat(fmeg.init_params(cfg, seed=3)), a)
    for path in a:
        assert torch.equal(a[path], b[path]) == path.endswith("scale"), path


def test_no_two_leaves_and_no_two_layers_start_alike() -> None:
    cfg = small_config(num_query_groups=4)
    drawn = [leaf.flatten()[:64] for path, leaf in flat(fmeg.init_params(cfg)).items() if not path.endswith("scale")]
    drawn += [leaf[1].flatten()[:64] for leaf in tree.leaves(fmeg.init_params(cfg)["layers"]["dense"]["mlp"])]
    assert len({tuple((x / x.abs().max()).tolist()) for x in drawn}) == len(drawn)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_only_casts(dtype: torch.dtype) -> None:
    cfg = small_config()
    want = tree.map(lambda p: p.to(dtype), fmeg.init_params(cfg))
    assert_trees_equal(fmeg.init_params(cfg.replace(params_dtype=dtype)), want)


def test_bf16_compute_keeps_fp32_parameters() -> None:
    cfg = small_config()
    assert_trees_equal(fmeg.init_params(cfg.replace(bf16=True)), fmeg.init_params(cfg))


@given(CONFIGS, CONFIGS)
@settings(deadline=None, derandomize=True, max_examples=30)
def test_another_option_does_not_change_other_leaves(a: fmeg.TransformerConfig, b: fmeg.TransformerConfig) -> None:
    """A leaf's values depend on its path and its logical shape, not on its neighbours or its padding."""
    specs_a, specs_b = flat(fmeg.gpt_specs(a)), flat(fmeg.gpt_specs(b))
    have, want = flat(fmeg.init_params(a)), flat(fmeg.init_params(b))
    for path in have.keys() & want.keys():
        if specs_a[path].shape == specs_b[path].shape and specs_a[path].init == specs_b[path].init:
            logical = tuple(slice(n) for n in specs_a[path].shape)
            assert torch.equal(have[path][logical], want[path][logical]), path


@given(CONFIGS)
@settings(deadline=None, derandomize=True, max_examples=30)
def test_padding_is_zero_and_matrices_decay_and_norms_stay_in_full_precision(cfg: fmeg.TransformerConfig) -> None:
    params = flat(fmeg.init_params(cfg))
    for path, spec in flat(fmeg.gpt_specs(cfg)).items():
        assert params[path].shape == spec.stored
        vocabulary = path in ("embedding/tokens", "output/weight")
        assert spec.stored == ((cfg.padded_vocab_size, cfg.hidden_size) if vocabulary else spec.shape)
        if vocabulary:
            assert not params[path][cfg.vocab_size :].any()
            assert params[path][: cfg.vocab_size].any(-1).all()
        assert spec.decay is not path.endswith(("bias", "scale")), path
        assert spec.full_precision is ("norm" in path), path


@given(CONFIGS)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_the_count_is_the_closed_form(cfg: fmeg.TransformerConfig) -> None:
    L, D, N, K = cfg.num_layers, cfg.hidden_size, cfg.num_attention_heads, cfg.query_groups
    H, F, V = cfg.head_dim, cfg.ffn_size, cfg.vocab_size
    per_norm = 2 if cfg.normalization == "LayerNorm" else 1
    ups = 2 if cfg.gated_linear_unit else 1
    layer = D * N * H + 2 * D * K * H + N * H * D + (ups + 1) * D * F + 2 * per_norm * D
    layer += 2 * per_norm * H if cfg.qk_layernorm else 0
    layer += (N + 2 * K) * H if cfg.add_bias_linear or cfg.add_qkv_bias else 0
    layer += D + ups * F + D if cfg.add_bias_linear else 0
    outside = V * D + per_norm * D
    outside += 0 if cfg.share_embeddings_and_output_weights else V * D
    outside += cfg.max_position_embeddings * D if cfg.position_embedding_type == "learned_absolute" else 0
    assert fmeg.count_params(fmeg.gpt_specs(cfg)) == L * layer + outside


def test_the_default_count_of_gpt2() -> None:
    """124,439,808 parameters, as its authors' files hold."""
    cfg = fmeg.TransformerConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        vocab_size=50257,
        max_position_embeddings=1024,
        share_embeddings_and_output_weights=True,
    )
    assert fmeg.count_params(fmeg.gpt_specs(cfg)) == 124_439_808


def test_a_spec_needs_one_axis_per_dimension() -> None:
    with pytest.raises(ValueError, match=r"ParamSpec of shape \(2, 3\) needs 2 axes, got P\('embed'\)"):
        fmeg.ParamSpec((2, 3), P("embed"), ZEROS)


def test_the_stacking_axis_does_not_make_a_vector_decay() -> None:
    assert fmeg.ParamSpec((3,), P("embed"), ONES).stacked(4).decay is False
    assert fmeg.ParamSpec((4, 3), P("layers", "embed"), ONES).decay is False
    assert fmeg.ParamSpec((2, 3), P("embed", "mlp"), ONES).stacked(4).decay is True
    assert fmeg.ParamSpec((3,), P("embed"), ONES, decay=True).stacked(4).decay is True


def test_a_padded_parameter_cannot_be_stacked() -> None:
    with pytest.raises(ValueError, match="a padded parameter cannot be stacked"):
        fmeg.ParamSpec((5, 3), P("vocab", "embed"), ZEROS, storage_shape=(8, 3)).stacked(2)


def test_padding_does_not_change_what_is_drawn() -> None:
    plain = {"w": fmeg.ParamSpec((5, 3), P("vocab", "embed"), normal(1.0))}
    padded = {"w": fmeg.ParamSpec((5, 3), P("vocab", "embed"), normal(1.0), storage_shape=(8, 3))}
    a, b = (init_from_specs(specs, seed=1, dtype=torch.float32)["w"] for specs in (plain, padded))
    assert torch.equal(b, torch.cat((a, torch.zeros(3, 3))))


def test_wrong_parameters_are_refused_by_name() -> None:
    cfg = small_config()
    specs, params = fmeg.gpt_specs(cfg), fmeg.init_params(cfg)
    check_params(params, specs)
    missing = {k: v for k, v in params.items() if k != "final_norm"} | {"extra": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"^parameters do not match the config: missing final_norm/scale, unexpected extra$"):
        check_params(missing, specs)
    with pytest.raises(ValueError, match=r"missing embedding/tokens, final_norm/scale, layers/\S+, layers/\S+ and 8 more, un"):
        check_params({}, specs)
    wrong = params | {"final_norm": {"scale": torch.ones(31)}}
    with pytest.raises(
        ValueError, match=r"^parameters do not match the config: shape of final_norm/scale \(31,\) instead of \(32,\)$"
    ):
        check_params(wrong, specs)


def test_the_cast_leaves_norms_and_what_has_the_dtype_already() -> None:
    cfg = small_config(qk_layernorm=True)
    params, specs = fmeg.init_params(cfg), fmeg.gpt_specs(cfg)
    for before, after in zip(tree.leaves(params), tree.leaves(cast_to_compute(params, specs, cfg)), strict=True):
        assert after is before
    for path, leaf in flat(cast_to_compute(params, specs, cfg.replace(bf16=True))).items():
        assert leaf.dtype == (torch.float32 if path.endswith("scale") else torch.bfloat16), path

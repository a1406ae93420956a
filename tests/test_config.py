"""Configs: what is refused and with which words, what is derived, and the way through plain values."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from helpers import small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from fmeg import (
    Llama3RopeScaling,
    ModelParallelConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
    YarnRopeScaling,
)
from fmeg.config import config_from_dict, config_to_dict

BASE: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
SIZES = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "loss_chunk_tokens",
]
ROPE = {"position_embedding_type": "rope"}

# Every check with its whole message: the values, what is allowed, and what to do.
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"{name} is 0: must be a positive integer") for name in SIZES),
    ({"num_layers": 2.0}, "num_layers is 2.0: must be a positive integer"),
    ({"vocab_size": True}, "vocab_size is True: must be a positive integer"),
    ({"num_query_groups": -1}, "num_query_groups is -1: must be a positive integer"),
    ({"normalization": "layernorm"}, "normalization is 'layernorm': must be 'LayerNorm' or 'RMSNorm'"),
    ({"activation": "relu"}, "activation is 'relu': must be 'gelu', 'gelu_tanh', 'silu' or 'squared_relu'"),
    ({"attention_backend": "flash"}, "attention_backend is 'flash': must be 'auto', 'fused' or 'unfused'"),
    (
        {"recompute_granularity": "all"},
        "recompute_granularity is 'all': must be 'full', 'selective' or None",
    ),
    (
        {"recompute_granularity": "full", "recompute_num_layers": 1},
        "recompute_granularity 'full' needs recompute_method: recompute_method='uniform', recompute_num_layers=1 "
        "recomputes all",
    ),
    (
        {"recompute_granularity": "selective", "recompute_num_layers": 1},
        "recompute_num_layers is 1 but recompute_granularity is 'selective': use recompute_granularity='full', "
        "or leave recompute_num_layers out",
    ),
    (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        "recompute_num_layers is 3, of 2 layers: use at most 2",
    ),
    (
        {"recompute_modules": ("mlp",)},
        "recompute_modules is ('mlp',) but recompute_granularity is None: make that 'selective'",
    ),
    (
        {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
        "recompute_modules is ('moe',): must be one or more of core_attn, layernorm, mlp",
    ),
    (
        {"position_embedding_type": "alibi"},
        "position_embedding_type is 'alibi': must be 'learned_absolute', 'rope' or 'none'",
    ),
    (
        {"num_attention_heads": 6},
        "hidden_size 64 is not divisible by num_attention_heads 6: use 1, 2, 4, 8, 16, 32 or 64 heads, or set kv_channels",
    ),
    (
        {"num_attention_heads": 6, "kv_channels": 8, "num_query_groups": 4},
        "num_attention_heads 6 is not divisible by num_query_groups 4: use num_query_groups 1, 2, 3 or 6",
    ),
    *(
        (
            {"window_size": window},
            f"window_size is {window}: must be (left, 0) with left >= 0, since attention is causal, or None",
        )
        for window in [(4, 1), (-1, 0), (4,), (4, -1), (4.5, 0), [4, 0], 4]
    ),
    (
        {"window_attn_skip_freq": 2},
        "window_attn_skip_freq is 2 but window_size is None: set window_size=(left, 0) too",
    ),
    *(
        (
            {"window_size": (4, 0), "window_attn_skip_freq": skip},
            f"window_attn_skip_freq {skip} must hold one 0 or 1 for each of the 2 layers",
        )
        for skip in [(1,), (1, 0, 1), (1, 2)]
    ),
    *(
        ({"window_size": (4, 0), "window_attn_skip_freq": skip}, f"window_attn_skip_freq is {skip}: must be a positive integer")
        for skip in [0, True, 2.0, [1, 0]]
    ),
    (
        {"rope_scaling": Llama3RopeScaling()},
        "rope_scaling is set but position_embedding_type is 'learned_absolute': "
        "use position_embedding_type='rope' or rope_scaling=None",
    ),
    ({"rotary_base": 0.0} | ROPE, "rotary_base is 0.0: must be above 1"),
    ({"rotary_percent": 0.0} | ROPE, "rotary_percent is 0.0: must be in (0, 1]"),
    ({"rotary_percent": 1.5} | ROPE, "rotary_percent is 1.5: must be in (0, 1]"),
    (
        {"rotary_percent": 0.3, "kv_channels": 10} | ROPE,
        "rotary_percent 0.3 of head dimension 10 rotates 3 dimensions: "
        "the number must be even and above 0; change rotary_percent or kv_channels",
    ),
    (
        {"rotary_percent": 0.1, "kv_channels": 4} | ROPE,
        "rotary_percent 0.1 of head dimension 4 rotates 0 dimensions: "
        "the number must be even and above 0; change rotary_percent or kv_channels",
    ),
    *(
        ({name: rate}, f"{name} is {rate}: must be in [0, 1)")
        for name in ("hidden_dropout", "attention_dropout", "label_smoothing")
        for rate in (-0.1, 1.0, float("nan"))
    ),
    *(({name: -1.0}, f"{name} is -1.0: must be at least 0") for name in ("init_method_std", "z_loss_coeff")),
    ({"layernorm_epsilon": 0.0}, "layernorm_epsilon is 0.0: must be above 0"),
    *(({name: 0.0}, f"{name} is 0.0: must be above 0, or None") for name in ("softmax_scale", "embedding_init_method_std")),
    (
        {"params_dtype": torch.float16},
        "params_dtype is torch.float16: must be torch.float32, torch.float64 or torch.bfloat16",
    ),
    (
        {"bf16": True, "params_dtype": torch.bfloat16},
        "bf16=True keeps fp32 parameters, but params_dtype is torch.bfloat16: leave it torch.float32",
    ),
    (
        {"attention_backend": "fused", "attention_dropout": 0.1},
        "attention_backend 'fused' has no keyed dropout, but attention_dropout is 0.1: "
        "use attention_dropout=0, or attention_backend 'auto' or 'unfused'",
    ),
]
OPTIMIZER_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "lion"}, "optimizer is 'lion': must be 'adam' or 'sgd'"),
    (
        {"lr_decay_style": "exp"},
        "lr_decay_style is 'exp': must be 'constant', 'linear', 'cosine', 'WSD' or 'inverse-square-root'",
    ),
    (
        {"lr_wsd_decay_style": "exp"},
        "lr_wsd_decay_style is 'exp': must be 'exponential', 'linear', 'cosine' or 'minus_sqrt'",
    ),
    *(
        ({name: -1}, f"{name} is -1: must be at least 0")
        for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad", "lr_warmup_iters", "lr_warmup_init")
    ),
    *(
        ({name: value}, f"{name} is {value}: must be in [0, 1)")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum")
        for value in (1.0, -0.5)
    ),
    ({"min_lr": 0.2, "lr": 0.1}, "min_lr is 0.2: must be at most lr 0.1"),
    (
        {"lr_decay_style": "WSD"},
        "lr_decay_style WSD needs lr_wsd_decay_iters, the length of the final decay; it is None",
    ),
]
TRAIN_REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: 0}, f"{name} is 0: must be a positive integer")
        for name in ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "log_interval", "eval_iters")
    ),
    *(({name: -1}, f"{name} is -1: must be at least 0") for name in ("eval_interval", "save_interval", "seed")),
    (
        {"global_batch_size": 6, "micro_batch_size": 4},
        "global_batch_size 6 is not divisible by micro_batch_size 4: use micro_batch_size 1, 2, 3 or 6",
    ),
]
SCALING_REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (Llama3RopeScaling, {"factor": 0.5}, "rope_scaling.factor is 0.5: must be at least 1"),
    *(
        (
            Llama3RopeScaling,
            {"low_freq_factor": low},
            f"rope_scaling.low_freq_factor is {low}: must be above 0 and below high_freq_factor 4.0",
        )
        for low in (0.0, 4.0, 5.0)
    ),
    (YarnRopeScaling, {"factor": 0.99}, "rope_scaling.factor is 0.99: must be at least 1"),
    *(
        (
            YarnRopeScaling,
            {"beta_fast": 1.0, "beta_slow": slow},
            f"rope_scaling.beta_fast is 1.0: must be above beta_slow {slow}, which is above 0",
        )
        for slow in (1.0, 2.0, 0.0)
    ),
    *(
        (
            cls,
            {"original_max_position_embeddings": 0},
            "rope_scaling.original_max_position_embeddings is 0: must be a positive integer",
        )
        for cls in (Llama3RopeScaling, YarnRopeScaling)
    ),
]
ALL_REFUSED = (
    [(TransformerConfig, BASE | change, message) for change, message in REFUSED]
    + [(OptimizerConfig, change, message) for change, message in OPTIMIZER_REFUSED]
    + [(TrainConfig, change, message) for change, message in TRAIN_REFUSED]
    + SCALING_REFUSED
)


def describe(value: Any) -> str | None:
    return "-".join(f"{k}={v}" for k, v in value.items() if BASE.get(k) != v)[:70] if isinstance(value, dict) else None


@pytest.mark.parametrize(("cls", "fields", "message"), ALL_REFUSED, ids=describe)
def test_a_wrong_value_is_refused_in_one_line_with_the_values_and_the_remedy(
    cls: type, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cls(**fields)


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=describe)
def test_replace_checks_again(change: dict[str, Any], message: str) -> None:
    good = TransformerConfig(**BASE)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        good.replace(**change)


@pytest.mark.parametrize(
    ("cls", "name", "suggestion"),
    [
        (TransformerConfig, "num_layer", "num_layers"),
        (TransformerConfig, "ffn_hidden_dim", "ffn_hidden_size"),
        (OptimizerConfig, "learning_rate_decay_style", "lr_decay_style"),
        (TrainConfig, "seq_len", "seq_length"),
    ],
)
def test_replace_suggests_the_field_that_was_meant(cls: type, name: str, suggestion: str) -> None:
    cfg = cls(**BASE) if cls is TransformerConfig else cls()
    with pytest.raises(TypeError, match=rf"^{cls.__name__} has no field '{name}'; did you mean .*\b{suggestion}\b.*\?$"):
        cfg.replace(**{name: 3})


def test_replace_lists_the_fields_where_nothing_is_close() -> None:
    with pytest.raises(TypeError, match=r"^TrainConfig has no field 'zzz'; did you mean eval_interval, .*, train_iters\?$"):
        TrainConfig().replace(zzz=1)


def test_an_unknown_or_missing_field_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_layer'"):
        TransformerConfig(**BASE, num_layer=3)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'vocab_size'"):
        TransformerConfig(**{k: v for k, v in BASE.items() if k != "vocab_size"})
    with pytest.raises(TypeError, match="positional"):
        TransformerConfig(2, 64, 4, 96)


@pytest.mark.parametrize(
    "cfg", [TransformerConfig(**BASE), OptimizerConfig(), TrainConfig(), Llama3RopeScaling(), YarnRopeScaling()]
)
def test_configs_are_frozen_and_hash_by_value(cfg: Any) -> None:
    name = dataclasses.fields(cfg)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cfg, name, 1)
    again = dataclasses.replace(cfg)
    assert again is not cfg and again == cfg and hash(again) == hash(cfg)


def test_derived_values_follow_replace() -> None:
    cfg = TransformerConfig(**BASE, position_embedding_type="rope", rotary_percent=0.5)
    assert (cfg.query_groups, cfg.head_dim, cfg.ffn_size, cfg.rotary_dim, cfg.padded_vocab_size) == (4, 16, 256, 8, 128)
    wide = cfg.replace(hidden_size=128, num_attention_heads=8, vocab_size=129)
    assert (wide.query_groups, wide.head_dim, wide.ffn_size, wide.rotary_dim, wide.padded_vocab_size) == (8, 16, 512, 8, 256)
    given = cfg.replace(num_query_groups=2, kv_channels=24, ffn_hidden_size=100, make_vocab_size_divisible_by=1)
    assert (given.query_groups, given.head_dim, given.ffn_size, given.rotary_dim, given.padded_vocab_size) == (
        2,
        24,
        100,
        12,
        96,
    )
    assert cfg.compute_dtype == torch.float32
    assert cfg.replace(bf16=True).compute_dtype == torch.bfloat16
    assert cfg.replace(params_dtype=torch.float64).compute_dtype == torch.float64
    assert TrainConfig(global_batch_size=24, micro_batch_size=8).num_microbatches() == 3


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_query_groups_that_divide_six_heads_are_taken(heads: int) -> None:
    assert TransformerConfig(**BASE | {"hidden_size": 48, "num_attention_heads": 6}, num_query_groups=heads).head_dim == 8


@pytest.mark.parametrize("heads", [4, 5])
def test_query_groups_that_do_not_divide_six_heads_are_refused_with_those_that_do(heads: int) -> None:
    with pytest.raises(ValueError, match=rf"num_query_groups {heads}: use num_query_groups 1, 2, 3 or 6$"):
        TransformerConfig(**BASE | {"hidden_size": 48, "num_attention_heads": 6}, num_query_groups=heads)


def test_window_patterns_name_the_layers_that_use_the_window() -> None:
    cfg = small_config(num_layers=5, window_size=(4, 0))
    assert [cfg.layer_window(i) for i in range(5)] == [(4, 0)] * 5
    assert [cfg.replace(window_attn_skip_freq=2).layer_window(i) is not None for i in range(5)] == [1, 0, 1, 0, 1]
    assert [cfg.replace(window_attn_skip_freq=1).layer_window(i) for i in range(5)] == [None] * 5
    mixed = cfg.replace(window_attn_skip_freq=(0, 1, 1, 0, 1))
    assert [mixed.layer_window(i) is not None for i in range(5)] == [0, 1, 1, 0, 1]


rates = st.floats(0, 0.875)
positive = st.floats(1e-6, 1e6)
SCALINGS = st.one_of(
    st.none(),
    st.builds(Llama3RopeScaling, factor=st.floats(1, 64), original_max_position_embeddings=st.integers(1, 10**6)),
    st.builds(
        YarnRopeScaling,
        factor=st.floats(1, 64),
        mscale=st.floats(0, 2),
        attention_factor=st.none() | positive,
        truncate=st.booleans(),
    ),
)


@st.composite
def transformer_configs(draw: st.DrawFn) -> TransformerConfig:
    """Valid configs over every field."""
    groups, per_group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    heads, layers = groups * per_group, draw(st.integers(1, 4))
    explicit = draw(st.booleans())
    position = draw(st.sampled_from(["learned_absolute", "rope", "none"]))
    window = draw(st.none() | st.tuples(st.integers(0, 8), st.just(0)))
    skips = st.none() | st.integers(1, 4) | st.tuples(*[st.integers(0, 1)] * layers)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    attention_dropout = draw(st.just(0.0) | rates)
    return TransformerConfig(
        params_dtype=dtype,
        bf16=dtype == torch.float32 and draw(st.booleans()),
        num_layers=layers,
        hidden_size=draw(st.integers(1, 64)) if explicit else heads * head_dim,
        kv_channels=head_dim if explicit else None,
        num_attention_heads=heads,
        num_query_groups=groups if per_group > 1 else draw(st.sampled_from([None, groups])),
        ffn_hidden_size=draw(st.none() | st.integers(1, 99)),
        vocab_size=draw(st.integers(1, 1000)),
        max_position_embeddings=draw(st.integers(1, 10**6)),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        layernorm_epsilon=draw(positive),
        layernorm_zero_centered_gamma=draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu", "gelu_tanh", "silu", "squared_relu"])),
        gated_linear_unit=draw(st.booleans()),
        add_bias_linear=draw(st.booleans()),
        add_qkv_bias=draw(st.booleans()),
        softmax_scale=draw(st.none() | positive),
        qk_layernorm=draw(st.booleans()),
        window_size=window,
        window_attn_skip_freq=None if window is None else draw(skips),
        attention_backend=draw(st.sampled_from(["auto", "unfused"] if attention_dropout else ["auto", "fused", "unfused"])),
        position_embedding_type=position,
        rotary_base=draw(positive) + 1,
        rotary_interleaved=draw(st.booleans()),
        rope_scaling=draw(SCALINGS) if position == "rope" else None,
        share_embeddings_and_output_weights=draw(st.booleans()),
        make_vocab_size_divisible_by=draw(st.integers(1, 256)),
        hidden_dropout=draw(rates),
        attention_dropout=attention_dropout,
        label_smoothing=draw(rates),
        z_loss_coeff=draw(rates),
        init_method_std=draw(rates),
        embedding_init_method_std=draw(st.none() | positive),
    )


@given(transformer_configs())
@settings(deadline=None, derandomize=True)
def test_a_config_comes_back_from_json(cfg: TransformerConfig) -> None:
    again = config_from_dict(TransformerConfig, json.loads(json.dumps(config_to_dict(cfg))))
    assert again == cfg and hash(again) == hash(cfg)


@pytest.mark.parametrize("cfg", [OptimizerConfig(lr_decay_style="WSD", lr_wsd_decay_iters=3), TrainConfig(seed=7)])
def test_other_configs_come_back_from_json(cfg: Any) -> None:
    assert config_from_dict(type(cfg), json.loads(json.dumps(config_to_dict(cfg)))) == cfg


def test_values_from_a_file_are_checked() -> None:
    values = config_to_dict(TransformerConfig(**BASE))
    with pytest.raises(ValueError, match="num_layers is 0: must be a positive integer"):
        config_from_dict(TransformerConfig, values | {"num_layers": 0})
    with pytest.raises(TypeError, match="num_layer"):
        config_from_dict(TransformerConfig, values | {"num_layer": 0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TransformerConfig(**BASE | {"hidden_dropout": "0.1"}),
            "hidden_dropout is '0.1', a str: must be",
        ),
        (lambda: TransformerConfig(**BASE | ROPE | {"rope_scaling": {"factor": 2}}), "rope_scaling is {'factor': 2}, a dict"),
        (lambda: TransformerConfig(**BASE | {"bf16": 1}), "bf16 is 1, a int: must be of type bool"),
        (lambda: TrainConfig(seed=1.5), "seed is 1.5, a float: must be of type int"),  # type: ignore[arg-type]
        (lambda: OptimizerConfig(lr_warmup_iters=2.5), "lr_warmup_iters is 2.5"),  # type: ignore[arg-type]
        (lambda: OptimizerConfig(lr_decay_iters=-3), "lr_decay_iters is -3: must be a positive integer"),
        (lambda: OptimizerConfig(lr=float("inf")), "lr is inf: must be finite"),
        (lambda: OptimizerConfig(lr=0.1, lr_warmup_init=0.2), "lr_warmup_init is 0.2: must be at most lr 0.1"),
        (lambda: YarnRopeScaling(attention_factor=-1.0), "attention_factor is -1.0: must be above 0, or None"),
        (lambda: YarnRopeScaling(mscale_all_dim=-1.0), "mscale_all_dim is -1.0: must be at least 0"),
        (lambda: ModelParallelConfig(bf16=True, params_dtype=torch.float64), "bf16=True keeps fp32 parameters"),
    ],
)
def test_other_wrong_values_and_types_are_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()

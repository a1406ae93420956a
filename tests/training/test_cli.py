"""The command line: generated flags, Megatron's spellings, presets, errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fmeg.config import Llama3RopeScaling, OptimizerConfig, TrainConfig, TransformerConfig, YarnRopeScaling
from fmeg.layers.rotary import inverse_frequencies
from fmeg.training.cli import parse_args, parse_rope_scaling
from fmeg.training.presets import gpt2_small, quickstart, tiny


def test_presets_pass_through_unchanged() -> None:
    for make in (quickstart, gpt2_small, tiny):
        assert parse_args(["--config", make.__name__]) == make()
    assert parse_args([]) == quickstart()


def test_llama3_scaling_through_the_command_line() -> None:
    """Head dimension 64, base 5e5, original length 8192: the ratios of unscaled to scaled frequencies."""
    base = ["--hidden-size", "64", "--num-attention-heads", "1", "--num-query-groups", "1", "--rotary-base", "5e5"]
    unscaled = inverse_frequencies(parse_args(base).model)
    rest = "low_freq_factor=1,high_freq_factor=4,original_max_position_embeddings=8192"
    for factor, want in ((32, [1.651329, 3.292262, 9.666729, 32]), (8, [1.553415, 2.694530, 5.257327, 8])):
        for flags in (
            ["--use-rope-scaling", "--rope-scaling-factor", str(factor)],
            [
                "--rope-scaling",
                f"llama3:factor={factor},{rest}",
            ],
        ):
            scaled = inverse_frequencies(parse_args(base + flags).model)
            ratios = (unscaled / scaled)[[15, 16, 17, 31]]
            torch.testing.assert_close(ratios, torch.tensor(want), rtol=2e-6, atol=0)


def test_megatron_spellings() -> None:
    flags = """--config gpt2_small --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --norm-epsilon 1e-6
    --use-rotary-position-embeddings --group-query-attention --num_query_groups 4 --apply-layernorm-1p --bf16
    --micro-batch-size=2 --global-batch-size 8 --train-iters 9 --lr-warmup-iters 3 --clip-grad 0.5 --adam-beta2 0.99"""
    cfg = parse_args(flags.split())
    want = gpt2_small().model.replace(
        gated_linear_unit=True,
        activation="silu",
        add_bias_linear=False,
        share_embeddings_and_output_weights=False,
        layernorm_epsilon=1e-6,
        position_embedding_type="rope",
        num_query_groups=4,
        layernorm_zero_centered_gamma=True,
        bf16=True,
    )
    assert cfg.model == want
    assert (cfg.train.num_microbatches(), cfg.train.train_iters, cfg.optimizer.clip_grad) == (4, 9, 0.5)


def test_other_types() -> None:
    cfg = parse_args(["--window-size", "7", "0", "--window-attn-skip-freq", "2", "--params-dtype", "float64", "--save", "x"])
    assert (cfg.model.window_size, cfg.model.window_attn_skip_freq, cfg.model.params_dtype) == ((7, 0), 2, torch.float64)
    assert str(cfg.save) == "x"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("none", None),
        ("llama3", Llama3RopeScaling()),
        ("yarn:factor=4,truncate=False,attention_factor=1.5", YarnRopeScaling(factor=4, truncate=False, attention_factor=1.5)),
    ],
)
def test_rope_scaling_values(text: str, want: object) -> None:
    assert parse_rope_scaling(text) == want


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "65"], "65 is not divisible by num_attention_heads 8"),
        (["--num-lyers", "3"], "num-layers"),
        (["--activation", "relu"], "squared_relu"),
        (["--rope-scaling", "linear:factor=2"], "llama3 or yarn"),
        (["--rope-scaling", "llama3:fator=2"], "no field 'fator'"),
        (["--params-dtype", "float16"], "bfloat16"),
        (["--config", "large"], "quickstart"),
    ],
)
def test_bad_flags_exit_with_the_reason(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(flags)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for cls in (TransformerConfig, OptimizerConfig, TrainConfig):
        for field in dataclasses.fields(cls):
            assert f"--{field.name.replace('_', '-')}" in text

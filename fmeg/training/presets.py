"""Runs by name, for `--config`: each a function that returns a RunConfig. Flags then change single fields."""

from __future__ import annotations

from collections.abc import Callable

from fmeg.config import OptimizerConfig, TrainConfig, TransformerConfig
from fmeg.training.run import RunConfig


def quickstart() -> RunConfig:
    """A Llama-like GPT of 5 million parameters that learns English from one book, on two CPU cores in minutes."""
    return RunConfig(
        model=TransformerConfig(
            num_layers=6,
            hidden_size=256,
            num_attention_heads=8,
            num_query_groups=4,
            ffn_hidden_size=688,
            vocab_size=4096,
            max_position_embeddings=256,
            normalization="RMSNorm",
            activation="silu",
            gated_linear_unit=True,
            add_bias_linear=False,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        optimizer=OptimizerConfig(lr=2e-3, min_lr=2e-4, weight_decay=0.1, lr_warmup_iters=40),
        train=TrainConfig(
            seq_length=256, micro_batch_size=8, global_batch_size=8, train_iters=180, eval_interval=60, eval_iters=4
        ),
    )


def gpt2_small() -> RunConfig:
    """GPT-2 with 124 million parameters (Radford et al. 2019): learned positions, GELU, LayerNorm, biases, dropout."""
    return RunConfig(
        model=TransformerConfig(
            num_layers=12,
            hidden_size=768,
            num_attention_heads=12,
            vocab_size=50257,
            max_position_embeddings=1024,
            activation="gelu_tanh",
            share_embeddings_and_output_weights=True,
        ),
        optimizer=OptimizerConfig(lr=6e-4, min_lr=6e-5, weight_decay=0.1, lr_warmup_iters=700),
        train=TrainConfig(seq_length=1024, micro_batch_size=4, global_batch_size=32, train_iters=20000, eval_interval=500),
    )


def tiny() -> RunConfig:
    """The quickstart's model cut down until a few updates take a second: for trying out flags."""
    run = quickstart()
    return RunConfig(
        model=run.model.replace(
            num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=160
        ).replace(vocab_size=512, max_position_embeddings=64),
        optimizer=run.optimizer.replace(lr_warmup_iters=2),
        train=run.train.replace(seq_length=64, train_iters=20, eval_interval=10, eval_iters=2, log_interval=5),
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {f.__name__: f for f in (quickstart, gpt2_small, tiny)}

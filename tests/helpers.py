"""Shared by all tests: tolerances, small configs, and a comparison that names the leaf that differs."""

from __future__ import annotations

from typing import Any

import torch

import fmeg
from fmeg import tree

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""How far two computations of the same number may differ, by the dtype of the computation."""


def assert_trees_close(have: Any, want: Any, *, rtol: float) -> None:
    """Every leaf within `rtol` of the largest element of its wanted value."""
    a, b = tree.flatten_with_path(have), tree.flatten_with_path(want)
    assert [path for path, _ in a] == [path for path, _ in b]
    for (path, x), (_, y) in zip(a, b, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype, f"{path}: {x.dtype} {x.shape} and {y.dtype} {y.shape}"
        error = (x.double() - y.double()).abs().max() if x.numel() else torch.tensor(0.0)
        scale = y.double().abs().max().clamp(min=1e-30) if y.numel() else torch.tensor(1.0)
        assert error <= rtol * scale, f"{path}: differs by {error / scale:.1e} of its largest element, allowed {rtol:.0e}"


def assert_trees_equal(have: Any, want: Any) -> None:
    """Every leaf equal bit for bit."""
    assert_trees_close(have, want, rtol=0.0)


def small_config(**changes: Any) -> fmeg.TransformerConfig:
    """A small Llama-like model without dropout."""
    cfg = fmeg.TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        vocab_size=96,
        max_position_embeddings=32,
        normalization="RMSNorm",
        activation="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return cfg.replace(**changes)


def random_batch(cfg: fmeg.TransformerConfig, size: int = 4, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens, labels and an uneven loss mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(cfg.vocab_size, (size, length), generator=generator) for _ in range(2))
    mask = (torch.rand((size, length), generator=generator) < 0.8).float()
    return {"tokens": tokens, "labels": labels, "loss_mask": mask}


def gradient_errors(grads: Any, want: Any, cfg: fmeg.TransformerConfig) -> dict[str, float]:
    """The largest deviation of each leaf, relative to the leaf's largest value."""
    errors = {}
    for (path, g), (other, w) in zip(tree.flatten_with_path(grads), tree.flatten_with_path(want), strict=True):
        assert path == other
        scale = w.abs().max()
        if path.endswith("attention/key/bias") and cfg.position_embedding_type != "rope":
            # The same number added to all of a row's scores changes nothing: this gradient is rounding around zero.
            scale = want["layers"]["dense"]["attention"]["query"]["bias"].abs().max()
        errors[path] = ((g - w).abs().max() / scale).item()
    return errors

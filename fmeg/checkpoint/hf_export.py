"""A TransformerConfig to Hugging Face's config.json."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from fmeg.checkpoint.hf_config import ACTIVATIONS, ARCHITECTURES, Architecture
from fmeg.config import DTYPES, Llama3RopeScaling, TransformerConfig


def choose_architecture(cfg: TransformerConfig) -> Architecture:
    """The first architecture that computes what the config says. ValueError names what stands in the way."""
    obstacles = {arch: _obstacles(cfg, arch) for arch in ARCHITECTURES}
    closest = min(ARCHITECTURES, key=lambda arch: len(obstacles[arch]))
    if not obstacles[closest]:
        return closest
    raise ValueError(
        f"no architecture of {', '.join(a.model_type for a in ARCHITECTURES)} expresses this config; the closest, "
        f"{closest.model_type}, {' and '.join(obstacles[closest])}"
    )


def _obstacles(cfg: TransformerConfig, arch: Architecture) -> list[str]:
    """Why an architecture cannot express a config, as phrases after its name."""
    gpt2, square = arch.model_type == "gpt2", cfg.head_dim * cfg.num_attention_heads == cfg.hidden_size
    windows = [cfg.layer_window(i) is not None for i in range(cfg.num_layers)]
    scales = (None, cfg.head_dim**-0.5, 1.0) if gpt2 else (None, cfg.head_dim**-0.5)
    needs: list[tuple[str, Any, Iterable[Any]]] = [
        ("layernorm_zero_centered_gamma", cfg.layernorm_zero_centered_gamma, [False]),
        ("softmax_scale", cfg.softmax_scale, scales),
        ("normalization", cfg.normalization, ["LayerNorm" if gpt2 else "RMSNorm"]),
        ("gated_linear_unit", cfg.gated_linear_unit, [not gpt2]),
        ("position_embedding_type", cfg.position_embedding_type, ["learned_absolute" if gpt2 else "rope"]),
        ("qk_layernorm", cfg.qk_layernorm, [arch.model_type == "qwen3"]),
    ]
    if gpt2:
        needs.append(("num_query_groups", cfg.query_groups, [cfg.num_attention_heads]))
        needs.append(("kv_channels", cfg.head_dim, [cfg.head_dim] if square else ["hidden_size / num_attention_heads"]))
    else:
        needs.append(("rotary_percent", cfg.rotary_percent, [1.0]))
        needs.append(("rotary_interleaved", cfg.rotary_interleaved, [False]))
    if arch.model_type != "llama":
        needs.append(("add_bias_linear", cfg.add_bias_linear, [gpt2]))
    if not cfg.add_bias_linear:
        needs.append(("add_qkv_bias", cfg.add_qkv_bias, [arch.model_type == "qwen2"]))
    if arch.model_type == "llama":
        heads = cfg.num_attention_heads
        needs.append(("hidden_size % num_attention_heads", cfg.hidden_size % heads, [0]))  # transformers insists
    if arch.window is None and any(windows):
        needs.append(("window_size", cfg.window_size, [None]))
    if arch.model_type == "mistral" and len(set(windows)) > 1:
        needs.append(("window_attn_skip_freq", cfg.window_attn_skip_freq, [None]))
    return [
        f"needs {name} {' or '.join(map(str, allowed))}, which is {value}"
        for name, value, allowed in needs
        if value not in allowed
    ]


def config_to_hf(cfg: TransformerConfig, arch: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as transformers 5 spells it."""
    out = {
        "architectures": [arch.name],
        "model_type": arch.model_type,
        "dtype": next(name for name, value in DTYPES.items() if value == dtype),
        "vocab_size": cfg.vocab_size,
        "tie_word_embeddings": cfg.share_embeddings_and_output_weights,
        "initializer_range": cfg.init_method_std,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    activation = next(theirs for theirs, ours in ACTIVATIONS if ours == cfg.activation)
    if arch.model_type == "gpt2":
        return out | {
            "n_layer": cfg.num_layers,
            "n_embd": cfg.hidden_size,
            "n_head": cfg.num_attention_heads,
            "n_inner": cfg.ffn_size,
            "n_positions": cfg.max_position_embeddings,
            "layer_norm_epsilon": cfg.layernorm_epsilon,
            "activation_function": activation,
            "scale_attn_weights": cfg.softmax_scale is None or cfg.softmax_scale == cfg.head_dim**-0.5,
            "resid_pdrop": cfg.hidden_dropout,
            "embd_pdrop": cfg.hidden_dropout,
            "attn_pdrop": cfg.attention_dropout,
        }
    return out | {
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.query_groups,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "rms_norm_eps": cfg.layernorm_epsilon,
        "hidden_act": activation,
        "attention_dropout": cfg.attention_dropout,
        "rope_parameters": _write_rope(cfg),
        **_write_biases(cfg, arch),
        **_write_window(cfg, arch),
    }


def _write_biases(cfg: TransformerConfig, arch: Architecture) -> dict[str, Any]:
    if arch.model_type == "llama":
        return {"attention_bias": cfg.add_bias_linear, "mlp_bias": cfg.add_bias_linear}
    return {"attention_bias": False} if arch.model_type == "qwen3" else {}


def _write_rope(cfg: TransformerConfig) -> dict[str, Any]:
    s = cfg.rope_scaling
    out: dict[str, Any] = {"rope_theta": cfg.rotary_base}
    if s is None:
        return out | {"rope_type": "default"}
    out |= {"factor": s.factor, "original_max_position_embeddings": s.original_max_position_embeddings}
    if isinstance(s, Llama3RopeScaling):
        out |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
        return out | {"rope_type": "llama3"}
    out |= {"rope_type": "yarn", "beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
    if s.attention_factor is not None:
        return out | {"attention_factor": float(s.attention_factor)}
    if s.mscale and s.mscale_all_dim:
        return out | {"mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim}
    # Without both, transformers takes mscale 1; another one is written as the factor that it makes.
    factor = 0.1 * s.mscale * math.log(s.factor) + 1.0
    return out if s.mscale == 1.0 else out | {"attention_factor": factor}


def _write_window(cfg: TransformerConfig, arch: Architecture) -> dict[str, Any]:
    windows = [cfg.layer_window(i) for i in range(cfg.num_layers)]
    size = next((window[0] + 1 for window in windows if window is not None), None)
    if arch.model_type == "llama":
        return {}
    if arch.model_type == "mistral":
        return {"sliding_window": size}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": size, "use_sliding_window": size is not None, "layer_types": kinds}

"""Hugging Face's config.json to a TransformerConfig, for the architectures that fmeg can express."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fmeg.config import Llama3RopeScaling, RopeScaling, TransformerConfig, YarnRopeScaling


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers, and what it assumes where a config.json is silent."""

    model_type: str
    name: str
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None


ARCHITECTURES = (
    Architecture("gpt2", "GPT2LMHeadModel"),
    Architecture("llama", "LlamaForCausalLM"),
    Architecture("qwen2", "Qwen2ForCausalLM", kv_heads=32, window=4096),
    Architecture("qwen3", "Qwen3ForCausalLM", kv_heads=32, head_dim=128, window=4096),
    Architecture("mistral", "MistralForCausalLM", kv_heads=8, window=4096),
)
"""In the order in which export tries them."""

ACTIVATIONS = (
    ("gelu", "gelu"),
    ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("silu", "silu"),
    ("swish", "silu"),
    ("relu2", "squared_relu"),
)
"""Hugging Face's names and ours; the first for each of ours is the one written."""


class Options:
    """A config.json whose values are checked as they are read; `where` names the file in errors."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def get(self, name: str, default: Any = None) -> Any:
        """The value, null as None; `default` only where the name is absent."""
        return self.raw.get(name, default)

    def refuse(self, name: str, allowed: str) -> ValueError:
        """The error for a value that fmeg cannot follow."""
        return ValueError(f"{self.where}: {name} is {self.raw.get(name)!r}: fmeg supports {allowed}")

    def require(self, name: str, value: Any, default: Any = None) -> None:
        """Refuse an option that has another value, absent meaning `default`."""
        if self.get(name, default) != value:
            raise self.refuse(name, f"only {value!r}")

    def count(self, name: str) -> int:
        """A positive integer that must be there."""
        return self._count(name, self.get(name))

    def optional_count(self, name: str, default: int | None = None) -> int | None:
        """A positive integer or null; absent means `default`."""
        value = self.get(name, default)
        return None if value is None else self._count(name, value)

    def number(self, name: str, default: float) -> float:
        """A number; absent or null means `default`."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}: must be a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; absent means `default`."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}: must be true or false")
        return value

    def _count(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: {name} is {value!r}: must be a positive integer")
        return value


def find_architecture(raw: dict[str, Any], where: str) -> Architecture:
    """The architecture that a config.json names, by model_type or else by its first architecture."""
    named = raw.get("architectures") or []
    for arch in ARCHITECTURES:
        bases = (arch.name, arch.name.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model"))
        if raw.get("model_type", arch.model_type if named else None) == arch.model_type and (
            not named or any(name in bases for name in named)
        ):
            return arch
    raise ValueError(
        f"{where}: model_type {raw.get('model_type')!r} with architectures {named} is not supported: fmeg reads "
        f"{', '.join(f'{a.model_type} ({a.name})' for a in ARCHITECTURES)}"
    )


def config_from_hf(raw: dict[str, Any], dtype: torch.dtype, where: str) -> TransformerConfig:
    """The TransformerConfig of a config.json, for parameters in `dtype`."""
    arch, options = find_architecture(raw, where), Options(raw, where)
    options.require("quantization_config", None)
    options.require("is_encoder_decoder", False, False)
    options.require("add_cross_attention", False, False)
    fields = _gpt2_fields(options) if arch.model_type == "gpt2" else _rope_fields(options, arch)
    try:
        return TransformerConfig(
            params_dtype=dtype,
            vocab_size=options.count("vocab_size"),
            share_embeddings_and_output_weights=options.flag("tie_word_embeddings", arch.model_type == "gpt2"),
            init_method_std=options.number("initializer_range", 0.02),
            **fields,
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from None


def _gpt2_fields(o: Options) -> dict[str, Any]:
    o.require("scale_attn_by_inverse_layer_idx", False, False)
    residual, embedding = o.number("resid_pdrop", 0.1), o.number("embd_pdrop", 0.1)
    if residual != embedding:
        raise ValueError(
            f"{o.where}: resid_pdrop {residual} and embd_pdrop {embedding} differ: fmeg has one hidden_dropout "
            "for both; make them equal in config.json (they matter in training only)"
        )
    return {
        "num_layers": o.count("n_layer"),
        "hidden_size": o.count("n_embd"),
        "num_attention_heads": o.count("n_head"),
        "ffn_hidden_size": o.optional_count("n_inner") or 4 * o.count("n_embd"),
        "max_position_embeddings": o.count("n_positions"),
        "layernorm_epsilon": o.number("layer_norm_epsilon", 1e-5),
        "activation": _activation(o, "activation_function", "gelu_new"),
        "softmax_scale": None if o.flag("scale_attn_weights", True) else 1.0,
        "hidden_dropout": residual,
        "attention_dropout": o.number("attn_pdrop", 0.1),
    }


def _rope_fields(o: Options, arch: Architecture) -> dict[str, Any]:
    heads, hidden, layers = o.count("num_attention_heads"), o.count("hidden_size"), o.count("num_hidden_layers")
    head_dim = o.optional_count("head_dim", arch.head_dim)
    max_positions = o.count("max_position_embeddings")
    base, scaling = _read_rope(o, max_positions)
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": o.optional_count("num_key_value_heads", arch.kv_heads) or heads,
        "kv_channels": None if head_dim is not None and head_dim * heads == hidden else head_dim,
        "ffn_hidden_size": o.count("intermediate_size"),
        "max_position_embeddings": max_positions,
        "normalization": "RMSNorm",
        "layernorm_epsilon": o.number("rms_norm_eps", 1e-6),
        "activation": _activation(o, "hidden_act", "silu"),
        "gated_linear_unit": True,
        "add_bias_linear": _read_biases(o, arch),
        "add_qkv_bias": arch.model_type == "qwen2",
        "qk_layernorm": arch.model_type == "qwen3",
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rope_scaling": scaling,
        "hidden_dropout": 0.0,
        "attention_dropout": o.number("attention_dropout", 0.0),
        **_read_window(o, arch, layers),
    }


def _activation(o: Options, name: str, default: str) -> str:
    value = o.get(name, default)
    for theirs, ours in ACTIVATIONS:
        if value == theirs:
            return ours
    raise o.refuse(name, ", ".join(theirs for theirs, _ in ACTIVATIONS))


def _read_biases(o: Options, arch: Architecture) -> bool:
    """add_bias_linear: Llama's attention and MLP biases, which fmeg has together or not at all."""
    if arch.model_type == "qwen3":
        o.require("attention_bias", False, False)
    if arch.model_type != "llama":
        return False
    attention = o.flag("attention_bias", False)
    if o.flag("mlp_bias", False) != attention:
        raise o.refuse("mlp_bias", f"only the value of attention_bias, here {attention}")
    return attention


def _read_rope(o: Options, max_positions: int) -> tuple[float, RopeScaling | None]:
    """rotary_base and rope_scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    name = "rope_scaling" if o.get("rope_scaling") else "rope_parameters"
    rope = o.get(name) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise o.refuse(name, "one set of rope parameters for all layers")
    r = Options(rope, f"{o.where}: {name}")
    for options in (o, r):
        options.require("partial_rotary_factor", 1.0, 1.0)
    base = r.number("rope_theta", o.number("rope_theta", 10000.0))
    original = o.optional_count("original_max_position_embeddings")
    length = original or r.optional_count("original_max_position_embeddings") or max_positions
    kind = r.get("rope_type", r.get("type", "default"))
    if kind == "default":
        return base, None
    if kind == "llama3":
        numbers = {key: r.number(key, math.nan) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        missing = [key for key, value in numbers.items() if math.isnan(value)]
        if missing:
            raise ValueError(f"{r.where} has no {', '.join(missing)}: rope_type 'llama3' needs them")
        return base, Llama3RopeScaling(original_max_position_embeddings=length, **numbers)
    if kind == "yarn":
        return base, _read_yarn(r, length, max_positions)
    raise ValueError(f"{r.where}: rope_type is {kind!r}: fmeg supports default, llama3 and yarn")


def _read_yarn(r: Options, length: int, max_positions: int) -> YarnRopeScaling:
    # transformers reads 0 and null as "not given" in all of these, and the mscales only together.
    mscale, mscale_all_dim = r.number("mscale", 0.0), r.number("mscale_all_dim", 0.0)
    both = bool(mscale and mscale_all_dim)
    return YarnRopeScaling(
        factor=r.number("factor", max_positions / length),
        original_max_position_embeddings=length,
        beta_fast=r.number("beta_fast", 0.0) or 32.0,
        beta_slow=r.number("beta_slow", 0.0) or 1.0,
        mscale=mscale if both else 1.0,
        mscale_all_dim=mscale_all_dim if both else 0.0,
        attention_factor=None if r.get("attention_factor") is None else r.number("attention_factor", 1.0),
        truncate=r.flag("truncate", True),
    )


def _read_window(o: Options, arch: Architecture, layers: int) -> dict[str, Any]:
    """window_size and window_attn_skip_freq. A sliding window of w tokens counts the token itself."""
    if arch.window is None:  # Llama's attention ignores the option
        return {}
    window = o.optional_count("sliding_window", arch.window)
    used: tuple[int, ...] = (1,) * layers
    if arch.model_type != "mistral":
        if not o.flag("use_sliding_window", False):
            window = None
        kinds = o.get("layer_types")
        if kinds is None:
            first = o.number("max_window_layers", 28)
            kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise o.refuse("layer_types", f"full_attention and sliding_attention, one for each of {layers} layers")
        used = tuple(int(kind == "sliding_attention") for kind in kinds)
        if window is None and any(used):
            raise o.refuse("sliding_window", "a number of tokens where layer_types has sliding_attention")
    if window is None or not any(used):
        return {}
    return {"window_size": (window - 1, 0)} | ({} if all(used) else {"window_attn_skip_freq": used})

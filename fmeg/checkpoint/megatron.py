"""megatron-core's state dicts, unsharded, to parameters and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fmeg import tree
from fmeg.checkpoint.mapping import Family, Rule, entries, read, write
from fmeg.config import TransformerConfig
from fmeg.models.gpt import gpt_specs
from fmeg.params import Params, check_params
from fmeg.sharding.mesh import Mesh, check_mesh


def from_megatron(state_dict: Mapping[str, Any], cfg: TransformerConfig, *, mesh: Mesh | None = None) -> Params:
    """Parameters from a state dict with megatron-core's names, of a GPT without tensor or pipeline parallelism.

    Takes the names of local layers and of Transformer Engine's (`linear_qkv.layer_norm_weight`), skips `_extra_state`,
    and cuts a padded vocabulary. On a mesh, its ranks' parts, each tensor cut before the next one is asked for. Gradients
    convert alike. Tensors are copied, and widened to cfg.params_dtype.

    Errors: ValueError for missing or unexpected names, other shapes, or dtypes that cfg.params_dtype cannot hold.

    >>> from fmeg import TransformerConfig, init_params
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> params = from_megatron(to_megatron(init_params(cfg), cfg), cfg)
    >>> params["layers"]["dense"]["attention"]["query"]["weight"].shape
    torch.Size([1, 8, 2, 4])
    """
    check_mesh(cfg, mesh)
    names: dict[str, str] = {}
    for actual in state_dict:
        if actual.endswith(("_extra_state", "rotary_pos_emb.inv_freq")):
            continue
        name = _local_name(actual)
        if name in names:
            raise ValueError(f"the state dict holds {name} twice, as {names[name]} and {actual}: remove one of them")
        names[name] = actual
    return read(cfg, megatron_family(cfg), names, state_dict.__getitem__, "the state dict", mesh)


def to_megatron(params: Params, cfg: TransformerConfig) -> dict[str, Tensor]:
    """A state dict with megatron-core's names for local layers, in the parameters' dtype, the vocabulary not padded.

    `params` is a whole tree: `unshard_params` makes one of a mesh's parts.

    Errors: ValueError when the parameters do not match the config.

    >>> from fmeg import TransformerConfig, init_params
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=48, num_attention_heads=4, num_query_groups=2, kv_channels=16,
    ...     vocab_size=96)
    >>> state_dict = to_megatron(init_params(cfg), cfg)
    >>> state_dict["decoder.layers.0.self_attention.linear_qkv.weight"].shape  # rows q0 q1 k0 v0 q2 q3 k1 v1
    torch.Size([128, 48])
    >>> state_dict["embedding.word_embeddings.weight"].shape
    torch.Size([96, 48])
    """
    cfg = cfg.on_one_device()
    check_params(params, gpt_specs(cfg))
    leaves = dict(tree.flatten_with_path(params))
    return {entry.name: write(cfg, leaves, entry) for entry in entries(cfg, megatron_family(cfg))}


def megatron_family(cfg: TransformerConfig) -> Family:
    """Weights are [out, in]. The fused projection holds, per query group, its queries, its key and its value."""
    qkv, counts = ("query", "key", "value"), (cfg.num_attention_heads // cfg.query_groups, 1, 1)
    return Family(
        prefix="decoder.layers.{}.",
        layer=(
            *_norm("input_layernorm", "attention_norm"),
            Rule(
                "self_attention.linear_qkv.weight",
                tuple(f"attention/{name}/weight" for name in qkv),
                "(k c h) d -> d (k c) h",
                counts,
            ),
            Rule(
                "self_attention.linear_qkv.bias",
                tuple(f"attention/{name}/bias" for name in qkv),
                "(k c h) -> (k c) h",
                counts,
            ),
            *_norm("self_attention.q_layernorm", "attention/query_norm"),
            *_norm("self_attention.k_layernorm", "attention/key_norm"),
            Rule("self_attention.linear_proj.weight", ("attention/output/weight",), "d (n h) -> n h d"),
            Rule("self_attention.linear_proj.bias", ("attention/output/bias",), "d -> d"),
            *_norm("pre_mlp_layernorm", "mlp_norm"),
            Rule("mlp.linear_fc1.weight", ("mlp/gate/weight", "mlp/up/weight"), "(c f) d -> d (c f)"),
            Rule("mlp.linear_fc1.bias", ("mlp/gate/bias", "mlp/up/bias"), "(c f) -> (c f)"),
            Rule("mlp.linear_fc2.weight", ("mlp/down/weight",), "d f -> f d"),
            Rule("mlp.linear_fc2.bias", ("mlp/down/bias",), "d -> d"),
        ),
        others=(
            Rule("embedding.word_embeddings.weight", ("embedding/tokens",), "v d -> v d"),
            Rule("embedding.position_embeddings.weight", ("embedding/positions",), "t d -> t d"),
            *_norm("decoder.final_layernorm", "final_norm"),
            Rule("output_layer.weight", ("output/weight",), "v d -> v d"),
        ),
        embedding="embedding.word_embeddings.weight",
        head="output_layer.weight",
        padded_vocab=True,
    )


def _norm(name: str, leaf: str) -> tuple[Rule, Rule]:
    return Rule(f"{name}.weight", (f"{leaf}/scale",), "x -> x"), Rule(f"{name}.bias", (f"{leaf}/bias",), "x -> x")


def _local_name(name: str) -> str:
    """The local layers' name for a norm that Transformer Engine fuses into the linear layer after it."""
    for fused, own in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm")):
        name = name.replace(f"{fused}.layer_norm_", f"{own}.")
    return name

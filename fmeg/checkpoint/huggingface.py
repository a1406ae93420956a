"""Hugging Face checkpoints, a directory of config.json and safetensors files, without transformers."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fmeg import tree
from fmeg.checkpoint.hf_config import Architecture, config_from_hf, find_architecture
from fmeg.checkpoint.hf_export import choose_architecture, config_to_hf
from fmeg.checkpoint.mapping import Entry, Family, Rule, entries, listed, read, write
from fmeg.config import DTYPES, TransformerConfig
from fmeg.models.gpt import gpt_specs, unshard_params
from fmeg.params import Params, check_params
from fmeg.sharding.mesh import Mesh, check_is_mesh, check_mesh

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Constants that older versions of transformers wrote beside the weights."""


def from_hf(path: str | PathLike[str], *, mesh: Mesh | None = None) -> tuple[TransformerConfig, Params]:
    """The config and parameters of a checkpoint directory: Llama, Qwen2, Qwen3, Mistral or GPT-2.

    `path` holds config.json, in the spelling of transformers 5 or before, and model.safetensors, or its shards and
    their index. Parameters keep the files' dtype, the widest where they have several. Nothing is downloaded. On a mesh, the
    config has its layout, and the parameters are its ranks' parts; each rank reads every tensor, one at a time, and keeps its
    part.

    Errors: ValueError in one line for files that are missing or damaged, architectures and options that fmeg does not
    have, and missing, unexpected or misshapen tensors.

    >>> import tempfile
    >>> from fmeg import TransformerConfig, init_params
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     to_hf(f"{directory}/model", cfg, init_params(cfg))
    ...     read_cfg, params = from_hf(f"{directory}/model")
    >>> read_cfg.hidden_size, params["embedding"]["tokens"].shape  # stored padded to a multiple of 128 rows
    (8, torch.Size([128, 8]))
    """
    check_is_mesh(mesh)
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: fmeg downloads nothing; give one with config.json")
    raw, where = _read_json(directory / "config.json"), str(directory / "config.json")
    arch = find_architecture(raw, where)
    family = hf_family(arch)
    with _open_tensors(directory) as files:
        names = _full_names(files, family)
        cfg = config_from_hf(raw, _widest_dtype(names, files, directory), where)
        if mesh is not None:
            cfg = mesh.layout_of(cfg)
            check_mesh(cfg, mesh)

        def fetch(name: str) -> torch.Tensor:
            with _one_line_errors(directory):
                return files[name].get_tensor(name)

        return cfg, read(cfg, family, names, fetch, str(directory), mesh)


def to_hf(
    path: str | PathLike[str],
    cfg: TransformerConfig,
    params: Params,
    *,
    mesh: Mesh | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint directory that transformers loads: config.json and model.safetensors, or shards and an index.

    The architecture is the first of GPT-2, Llama, Qwen2, Qwen3 and Mistral that computes what the config says. Files
    are in the parameters' dtype, the vocabulary is not padded. What only training reads and the architecture has no
    option for (hidden_dropout, label_smoothing, z_loss_coeff) is left out. The directory appears when it is complete. On a mesh
    all ranks must call this, and the first one writes.

    Errors: ValueError when `path` is taken, when no architecture expresses the config, or for parameters of other
    names, shapes or dtypes.

    >>> import tempfile
    >>> from fmeg import TransformerConfig, init_params
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     to_hf(f"{directory}/model", cfg, init_params(cfg))
    ...     sorted(p.name for p in Path(directory, "model").iterdir())
    ['config.json', 'model.safetensors']
    """
    target = Path(path)
    if (target.exists() and not target.is_dir()) or (target.is_dir() and any(target.iterdir())):
        raise ValueError(f"{target} exists already: give a path that does not exist, or an empty directory")
    params, cfg = unshard_params(params, cfg, mesh), cfg.on_one_device()
    check_params(params, gpt_specs(cfg))
    if mesh is not None and not mesh.lead:
        return
    arch, dtype = choose_architecture(cfg), _one_dtype(params)
    leaves = dict(tree.flatten_with_path(params))
    shards = _shards(entries(cfg, hf_family(arch)), dtype.itemsize, max_shard_bytes)
    with _appearing(target) as directory:
        _write_json(directory / "config.json", config_to_hf(cfg, arch, dtype))
        for file, shard in shards.items():
            tensors = {entry.name: write(cfg, leaves, entry).cpu() for entry in shard}
            save_file(tensors, directory / file, metadata={"format": "pt"})
            # safetensors makes files that only their owner reads; the umask should decide, as it did for config.json.
            (directory / file).chmod((directory / "config.json").stat().st_mode)
        if len(shards) > 1:
            weight_map = {entry.name: file for file, shard in shards.items() for entry in shard}
            size = sum(_bytes(entry, dtype.itemsize) for shard in shards.values() for entry in shard)
            _write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def hf_family(arch: Architecture) -> Family:
    """The tensor names of an architecture."""
    return _gpt2_family() if arch.model_type == "gpt2" else _llama_family()


def _llama_family() -> Family:
    """Llama, and Qwen and Mistral after it. Weights are [out, in]."""
    return Family(
        prefix="model.layers.{}.",
        layer=(
            Rule("input_layernorm.weight", ("attention_norm/scale",), "d -> d"),
            Rule("self_attn.q_proj.weight", ("attention/query/weight",), "(n h) d -> d n h"),
            Rule("self_attn.q_proj.bias", ("attention/query/bias",), "(n h) -> n h"),
            Rule("self_attn.k_proj.weight", ("attention/key/weight",), "(k h) d -> d k h"),
            Rule("self_attn.k_proj.bias", ("attention/key/bias",), "(k h) -> k h"),
            Rule("self_attn.v_proj.weight", ("attention/value/weight",), "(k h) d -> d k h"),
            Rule("self_attn.v_proj.bias", ("attention/value/bias",), "(k h) -> k h"),
            Rule("self_attn.o_proj.weight", ("attention/output/weight",), "d (n h) -> n h d"),
            Rule("self_attn.o_proj.bias", ("attention/output/bias",), "d -> d"),
            Rule("self_attn.q_norm.weight", ("attention/query_norm/scale",), "h -> h"),
            Rule("self_attn.k_norm.weight", ("attention/key_norm/scale",), "h -> h"),
            Rule("post_attention_layernorm.weight", ("mlp_norm/scale",), "d -> d"),
            Rule("mlp.gate_proj.weight", ("mlp/gate/weight",), "f d -> d f"),
            Rule("mlp.gate_proj.bias", ("mlp/gate/bias",), "f -> f"),
            Rule("mlp.up_proj.weight", ("mlp/up/weight",), "f d -> d f"),
            Rule("mlp.up_proj.bias", ("mlp/up/bias",), "f -> f"),
            Rule("mlp.down_proj.weight", ("mlp/down/weight",), "d f -> f d"),
            Rule("mlp.down_proj.bias", ("mlp/down/bias",), "d -> d"),
        ),
        others=(
            Rule("model.embed_tokens.weight", ("embedding/tokens",), "v d -> v d"),
            Rule("model.norm.weight", ("final_norm/scale",), "d -> d"),
            Rule("lm_head.weight", ("output/weight",), "v d -> v d"),
        ),
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
    )


def _gpt2_family() -> Family:
    """GPT-2. Weights are [in, out], but for the head; query, key and value lie side by side."""
    qkv = ("query", "key", "value")
    return Family(
        prefix="transformer.h.{}.",
        layer=(
            Rule("ln_1.weight", ("attention_norm/scale",), "d -> d"),
            Rule("ln_1.bias", ("attention_norm/bias",), "d -> d"),
            Rule("attn.c_attn.weight", tuple(f"attention/{x}/weight" for x in qkv), "d (c n h) -> d (c n) h"),
            Rule("attn.c_attn.bias", tuple(f"attention/{x}/bias" for x in qkv), "(c n h) -> (c n) h"),
            Rule("attn.c_proj.weight", ("attention/output/weight",), "(n h) d -> n h d"),
            Rule("attn.c_proj.bias", ("attention/output/bias",), "d -> d"),
            Rule("ln_2.weight", ("mlp_norm/scale",), "d -> d"),
            Rule("ln_2.bias", ("mlp_norm/bias",), "d -> d"),
            Rule("mlp.c_fc.weight", ("mlp/up/weight",), "d f -> d f"),
            Rule("mlp.c_fc.bias", ("mlp/up/bias",), "f -> f"),
            Rule("mlp.c_proj.weight", ("mlp/down/weight",), "f d -> f d"),
            Rule("mlp.c_proj.bias", ("mlp/down/bias",), "d -> d"),
        ),
        others=(
            Rule("transformer.wte.weight", ("embedding/tokens",), "v d -> v d"),
            Rule("transformer.wpe.weight", ("embedding/positions",), "t d -> t d"),
            Rule("transformer.ln_f.weight", ("final_norm/scale",), "d -> d"),
            Rule("transformer.ln_f.bias", ("final_norm/bias",), "d -> d"),
            Rule("lm_head.weight", ("output/weight",), "v d -> v d"),
        ),
        embedding="transformer.wte.weight",
        head="lm_head.weight",
    )


def _full_names(actual: Iterable[str], family: Family) -> dict[str, str]:
    """Full names to those in the files, which lack "transformer." or "model." where the bare model was saved."""
    actual = [name for name in actual if not BUFFERS.search(name)]
    base = family.prefix.split(".")[0] + "."
    bare = not any(name.startswith(base) for name in actual)
    return {base + name if bare and name != family.head else name: name for name in actual}


@contextmanager
def _open_tensors(directory: Path) -> Iterator[dict[str, Any]]:
    """Each tensor's name, with the open file that holds it."""
    with ExitStack() as stack:
        owners: dict[str, Any] = {}
        for file in _weight_files(directory):
            with _one_line_errors(file):
                handle = stack.enter_context(safe_open(file, framework="pt"))
            again = owners.keys() & set(handle.keys())
            if again:
                raise ValueError(f"{file} holds tensors that another file holds too: {listed(again)}")
            owners |= dict.fromkeys(handle.keys(), handle)
        yield owners


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if not (directory / INDEX).exists():
        raise ValueError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}: fmeg reads safetensors only; save the model with "
            "transformers' save_pretrained"
        )
    weight_map = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{directory / INDEX} has no weight_map from tensor names to file names: copy the file again")
    return [directory / name for name in sorted(set(weight_map.values()))]


def _widest_dtype(names: dict[str, str], files: dict[str, Any], directory: Path) -> torch.dtype:
    """The dtype that holds all tensors exactly."""
    known = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    found = {name: files[name].get_slice(name).get_dtype() for name in names.values()}
    other = sorted(name for name, dtype in found.items() if dtype not in known)
    if other:
        raise ValueError(
            f"{directory}: {other[0]} is {found[other[0]]}: fmeg supports {', '.join(known)}; convert the checkpoint, "
            "for example with transformers' from_pretrained(path, dtype=torch.float32).save_pretrained(new_path)"
        )
    widest = torch.bfloat16
    for dtype in set(found.values()):
        widest = torch.promote_types(widest, known[dtype])
    return widest


def _one_dtype(params: Params) -> torch.dtype:
    found = {leaf.dtype for leaf in tree.leaves(params)}
    if len(found) > 1 or not found <= set(DTYPES.values()):
        raise ValueError(f"parameters have dtype {listed(map(str, found))}: cast all of them to one of {', '.join(DTYPES)}")
    return found.pop()


def _shards(plan: list[Entry], itemsize: int, most: int) -> dict[str, list[Entry]]:
    """Files and what they hold, none above `most` bytes unless a single tensor is."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in plan:
        if shards[-1] and size + _bytes(entry, itemsize) > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += _bytes(entry, itemsize)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _bytes(entry: Entry, itemsize: int) -> int:
    return itemsize * torch.Size(entry.shape).numel()


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its name when the block ends, and is removed when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _one_line_errors(file: Path) -> Iterator[None]:
    """What a damaged or missing file raises, as a ValueError that names it."""
    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} cannot be read ({reason}): copy or download it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    with _one_line_errors(file):
        value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds {type(value).__name__}: must be a JSON object")
    return value


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

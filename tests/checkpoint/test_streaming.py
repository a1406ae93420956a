"""Checkpoints read on a mesh: every rank ends with its part of the whole, and never holds more than a tensor besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_equal, small_config
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fmeg
from fmeg import from_hf, from_megatron, to_hf, to_megatron, tree

MESHES = [(1, 2, False), (2, 1, True), (4, 2, True), (8, 1, False)]
"""tp, dp, sequence parallelism. With two key/value heads, tp 4 and 8 repeat each of them."""

all_meshes = pytest.mark.parametrize(("tp", "dp", "sp"), MESHES)

GPT2: dict[str, Any] = {
    "num_query_groups": None,
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
    "untie": False,
}


def config(**changes: Any) -> fmeg.TransformerConfig:
    """A vocabulary of 90, which is padded: to 96 rows on one device, to 128 on most meshes."""
    changes = {"num_attention_heads": 8, "vocab_size": 90, "make_vocab_size_divisible_by": 8} | changes
    changes.pop("untie", None)
    return small_config(**changes)


def rank_of(mesh: fmeg.Mesh, rank: int) -> fmeg.Mesh:
    """The mesh of one real rank. Cutting arrays sends nothing, so that there need be no process groups."""
    return dataclasses.replace(mesh, groups=(), rank=torch.tensor(rank))


def check_parts(read: Any, whole: Any, cfg: fmeg.TransformerConfig, mesh: fmeg.Mesh) -> None:
    """The parts of simulated ranks and of every real one are those of the whole tree, each with memory of its own."""
    want = fmeg.shard_params(whole, cfg, mesh)
    parts = read(mesh)
    assert_trees_equal(parts, want)
    for rank in range(mesh.world_size):
        mine = tree.map(lambda leaf: leaf[rank], want)  # noqa: B023
        for have in (read(rank_of(mesh, rank)), fmeg.shard_params(whole, cfg, rank_of(mesh, rank))):
            assert_trees_equal(have, mine)
            assert_own_memory(have, whole)
    assert_own_memory(want, whole)
    assert_own_memory(parts, whole)


def assert_own_memory(parts: Any, whole: Any) -> None:
    wholes = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(whole)}
    for path, leaf in tree.flatten_with_path(parts):
        storage = leaf.untyped_storage()
        assert storage.data_ptr() not in wholes, f"{path} keeps the whole leaf"
        assert storage.nbytes() == leaf.nbytes, f"{path} of {leaf.nbytes} bytes keeps {storage.nbytes()}"


@all_meshes
@pytest.mark.parametrize("changes", [{"add_qkv_bias": True, "qk_layernorm": True}, GPT2], ids=["llama", "gpt2"])
def test_a_state_dict_of_megatron_is_read_in_parts(changes: dict[str, Any], tp: int, dp: int, sp: bool) -> None:
    alone = config(**changes)
    cfg = alone.replace(tensor_model_parallel_size=tp, sequence_parallel=sp)
    whole = fmeg.init_params(alone)
    source = to_megatron(whole, alone)
    name = "embedding.word_embeddings.weight"
    source[name] = torch.cat((source[name], torch.ones(38, 32)))
    check_parts(lambda mesh: from_megatron(source, cfg, mesh=mesh), whole, cfg, fmeg.simulated_mesh(cfg, data_parallel_size=dp))


@all_meshes
@pytest.mark.parametrize("changes", [{}, GPT2], ids=["llama", "gpt2"])
def test_files_of_hugging_face_are_read_in_parts(tmp_path: Path, changes: dict[str, Any], tp: int, dp: int, sp: bool) -> None:
    to_hf(tmp_path / "model", config(**changes), fmeg.init_params(config(**changes)), max_shard_bytes=20_000)
    alone, whole = from_hf(tmp_path / "model")
    cfg = alone.replace(tensor_model_parallel_size=tp, sequence_parallel=sp)

    def read(mesh: fmeg.Mesh) -> Any:
        have, params = from_hf(tmp_path / "model", mesh=mesh)
        assert have == cfg
        return params

    check_parts(read, whole, cfg, fmeg.simulated_mesh(cfg, data_parallel_size=dp))


class Peak(TorchDispatchMode):
    """The most bytes that tensors made in this mode took at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves([out]):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.live.values()))
        return out


class OneAtATime(Mapping[str, Tensor]):
    """A state dict whose tensors are made when they are asked for."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        return torch.full(self.shapes[name], 0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def num_bytes(params: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(params))


@pytest.mark.parametrize(("tp", "simulated"), [(1, False), (4, False), (8, False), (4, True)])
def test_no_more_than_a_few_tensors_are_whole_at_a_time(tp: int, simulated: bool) -> None:
    """One that is read and its parts, padded: twice the largest, in a model of 30 times its size."""
    alone = config(num_layers=16, hidden_size=64, ffn_hidden_size=128)
    cfg = alone.replace(tensor_model_parallel_size=tp)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2 if tp == 1 else 1)
    mesh = mesh if simulated else rank_of(mesh, mesh.world_size - 1)
    whole = fmeg.init_params(alone)
    source = OneAtATime({name: x.shape for name, x in to_megatron(whole, alone).items()})
    largest = 4 * max(shape.numel() for shape in source.shapes.values())
    assert num_bytes(whole) > 30 * largest
    with Peak() as peak:
        held = num_bytes(from_megatron(source, cfg, mesh=mesh))
    assert held < peak.bytes < held + 2 * largest
    with Peak() as peak:
        held = num_bytes(fmeg.shard_params(whole, cfg, mesh))
    assert num_bytes(whole) + held <= peak.bytes < num_bytes(whole) + held + largest


def test_a_donated_state_does_not_write_to_the_tree_it_was_cut_from() -> None:
    """Norms are replicated: a rank's part of them must not be the whole tree's memory."""
    alone = small_config(num_layers=1)
    cfg = alone.replace(tensor_model_parallel_size=2)
    whole = fmeg.init_params(alone)
    parts = fmeg.shard_params(whole, cfg, fmeg.simulated_mesh(cfg))
    parts["final_norm"]["scale"].fill_(7.0)
    parts["final_norm"]["scale"][1] += 1.0
    assert parts["final_norm"]["scale"][:, 0].tolist() == [7.0, 8.0]
    assert_trees_equal(whole, fmeg.init_params(alone))

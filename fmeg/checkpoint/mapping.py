"""The engine of checkpoint conversion: rules say which leaves a foreign tensor holds, and one reader and writer obey.

A rule is a pattern of axis letters, foreign layout on the left, fmeg's on the right, so that import, export, expected
shapes and the conversion of gradients all come from the same line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fmeg import tree
from fmeg.config import TransformerConfig
from fmeg.layers.transformer import get_gpt_decoder_block_spec, group_layers
from fmeg.models.gpt import gpt_specs
from fmeg.params import Params, ParamSpec, shard_leaf
from fmeg.sharding.mesh import Ctx, Mesh
from fmeg.sharding.reshard import on_mesh

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Rule:
    """One foreign tensor and the leaves that it holds.

    `pattern`: for example "(n h) d -> d n h", with h the head dimension. Leaves are concatenated along axis c, each
    taking its share of `counts` (1 each by default): "(c f) d -> d (c f)" holds gate and up, one below the other.
    Leaves that a config does not have take no part.

    >>> rule = Rule("fc1.weight", ("gate", "up"), "(c f) d -> d (c f)")
    >>> gate, up = rule.split(torch.arange(4.0).view(4, 1), {"h": 1})
    >>> gate, rule.join([gate, up], {"h": 1}).shape
    (tensor([[0., 1.]]), torch.Size([4, 1]))
    """

    name: str
    leaves: tuple[str, ...]
    pattern: str
    counts: tuple[int, ...] = ()

    def split(self, x: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        """The leaves of a foreign tensor."""
        foreign, flat, ours = self._patterns()
        counts = self._counts()
        x = _rearrange(x, foreign, flat, sizes | {"c": sum(counts)})
        pieces = x.split(counts, flat.split().index("c")) if "c" in flat else (x,)
        return [_rearrange(piece, flat, ours, {}) for piece in pieces]

    def join(self, leaves: Iterable[Tensor], sizes: dict[str, int]) -> Tensor:
        """The foreign tensor of some leaves: the inverse of `split`."""
        foreign, flat, ours = self._patterns()
        counts = self._counts()
        pieces = [_rearrange(leaf, ours, flat, sizes | {"c": n}) for leaf, n in zip(leaves, counts, strict=True)]
        x = torch.cat(pieces, flat.split().index("c")) if "c" in flat else pieces[0]
        return _rearrange(x, flat, foreign, {})

    def _counts(self) -> tuple[int, ...]:
        return self.counts or (1,) * len(self.leaves)

    def _patterns(self) -> tuple[str, str, str]:
        """Foreign, foreign with every axis apart, ours."""
        foreign, ours = self.pattern.split(" -> ")
        return foreign, foreign.replace("(", "").replace(")", ""), ours


def _rearrange(x: Tensor, source: str, target: str, sizes: dict[str, int]) -> Tensor:
    return rearrange(x, f"{source} -> {target}", **{axis: n for axis, n in sizes.items() if axis in source})


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint: rules for the tensors of a layer, whose names start with `prefix`, and for the others."""

    prefix: str
    layer: tuple[Rule, ...]
    others: tuple[Rule, ...]
    embedding: str
    head: str
    padded_vocab: bool = False
    """Whether tensors may hold more rows than the vocabulary; the rest is cut off."""


class Slot(NamedTuple):
    """A place in the parameter tree: a leaf, or one layer of a stacked leaf."""

    path: str
    layer: int | None
    spec: ParamSpec

    @property
    def part(self) -> ParamSpec:
        """The spec of what is there."""
        return self.spec if self.layer is None else self.spec.unstacked()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.part.shape


class Entry(NamedTuple):
    """A foreign tensor of a model: its full name, its shape, and how and where its leaves are kept."""

    name: str
    rule: Rule
    slots: tuple[Slot, ...]
    shape: tuple[int, ...]


def entries(cfg: TransformerConfig, family: Family) -> list[Entry]:
    """Every tensor of the model that `cfg` describes, layer by layer."""
    specs = dict(tree.flatten_with_path(gpt_specs(cfg)))
    places: list[tuple[str, int]] = []
    for group in group_layers(get_gpt_decoder_block_spec(cfg)):
        places += [(name, i) for i in range(group.repeats) for name in group.names]
    out = [_entry(rule, "", "", None, specs, cfg) for rule in family.others]
    for layer, (stack, index) in enumerate(places):
        prefix = family.prefix.format(layer)
        out += [_entry(rule, prefix, f"layers/{stack}/", index, specs, cfg) for rule in family.layer]
    found = [entry for entry in out if entry is not None]
    left = specs.keys() - {slot.path for entry in found for slot in entry.slots}
    if left:
        raise ValueError(f"no tensor holds the parameters {listed(left)}: the format cannot express this config")
    return found


def _entry(
    rule: Rule, prefix: str, base: str, index: int | None, specs: dict[str, ParamSpec], cfg: TransformerConfig
) -> Entry | None:
    """The rule at one place of the model, reduced to the leaves that are there; None without any."""
    slots = tuple(Slot(base + leaf, index, specs[base + leaf]) for leaf in rule.leaves if base + leaf in specs)
    if not slots:
        return None
    if len(slots) < len(rule.leaves):
        rule = Rule(rule.name, tuple(leaf for leaf in rule.leaves if base + leaf in specs), rule.pattern)
    # Joining empty leaves tells the foreign shape, so that no shape is declared twice.
    shape = rule.join([torch.empty(slot.shape, device="meta") for slot in slots], _sizes(cfg)).shape
    return Entry(prefix + rule.name, rule, slots, tuple(shape))


def read(
    cfg: TransformerConfig,
    family: Family,
    names: Mapping[str, str],
    fetch: Callable[[str], Tensor],
    where: str,
    mesh: Mesh | None = None,
) -> Params:
    """Parameters from foreign tensors, one at a time. `names`: the family's names to those that `fetch` knows.

    On a mesh each tensor is cut into its ranks' parts as soon as it is read, so that one is whole at a time.

    Errors: ValueError that starts with `where`, for missing or unexpected names, other shapes, or dtypes that
    cfg.params_dtype cannot hold exactly.
    """
    plan = entries(cfg, family)
    names = _without_tied_head(cfg, family, names, fetch, where)
    _check_names({entry.name for entry in plan}, names, where)
    out: dict[str, Tensor] = {}
    layers_dim = 1 if mesh is not None and mesh.simulated else 0
    for entry in plan:
        x = fetch(names[entry.name])
        if family.padded_vocab and entry.slots[0].spec.axes[0] == "vocab":
            x = x[: entry.shape[0]]
        _check_tensor(entry, x, cfg, where)
        for slot, part in zip(entry.slots, entry.rule.split(x, _sizes(cfg)), strict=True):
            if slot.path not in out:
                out[slot.path] = torch.empty(slot.spec.held_shape(mesh), dtype=cfg.params_dtype, device=x.device)
            held = out[slot.path] if slot.layer is None else out[slot.path].select(layers_dim, slot.layer)
            held.copy_(on_mesh(functools.partial(_shard, slot), mesh, shared=(0,))(part))
        del x, part  # before the next tensor is read
    return tree.from_paths(out)


def _shard(slot: Slot, ctx: Ctx, part: Tensor) -> Tensor:
    return shard_leaf(part, slot.part, ctx)


def write(cfg: TransformerConfig, params: Mapping[str, Tensor], entry: Entry) -> Tensor:
    """A foreign tensor, contiguous and with memory of its own, from the leaves of `params` by path."""
    joined = entry.rule.join([_view(params[slot.path], slot) for slot in entry.slots], _sizes(cfg))
    return joined.detach().clone(memory_format=torch.contiguous_format)


def _view(leaf: Tensor, slot: Slot) -> Tensor:
    """The part of a leaf that a slot names, without its padding."""
    leaf = leaf if slot.layer is None else leaf[slot.layer]
    return leaf[tuple(slice(n) for n in slot.shape)]


def _sizes(cfg: TransformerConfig) -> dict[str, int]:
    return {"h": cfg.head_dim}


def _without_tied_head(
    cfg: TransformerConfig, family: Family, names: Mapping[str, str], fetch: Callable[[str], Tensor], where: str
) -> Mapping[str, str]:
    """A tied model may repeat its embedding as the output layer; anything else there would be lost."""
    if not cfg.share_embeddings_and_output_weights or not {family.head, family.embedding} <= names.keys():
        return names
    if not torch.equal(fetch(names[family.head]), fetch(names[family.embedding])):
        raise ValueError(
            f"{where}: {family.head} differs from {family.embedding} although the config ties them: untie them in the "
            f"config (tie_word_embeddings, share_embeddings_and_output_weights) or remove {family.head}"
        )
    return {name: actual for name, actual in names.items() if name != family.head}


def _check_names(want: set[str], names: Mapping[str, str], where: str) -> None:
    missing, unexpected = want - names.keys(), {names[name] for name in names.keys() - want}
    if missing or unexpected:
        raise ValueError(
            f"{where}: tensors do not match the config: missing {listed(missing)}; unexpected {listed(unexpected)}"
        )


def _check_tensor(entry: Entry, x: Tensor, cfg: TransformerConfig, where: str) -> None:
    if tuple(x.shape) != entry.shape:
        raise ValueError(f"{where}: {entry.name} has shape {tuple(x.shape)}: the config asks for {entry.shape}")
    if x.dtype not in FLOATS or torch.promote_types(x.dtype, cfg.params_dtype) != cfg.params_dtype:
        raise ValueError(
            f"{where}: {entry.name} is {x.dtype}, which params_dtype {cfg.params_dtype} does not hold exactly: "
            "convert the tensor or change params_dtype"
        )


def listed(names: Iterable[str], most: int = 6) -> str:
    """Some names as text, sorted, the first `most` of them.

    >>> listed({"b", "a"}), listed([]), listed("abc", most=1)
    ('a, b', 'none', 'a and 2 more')
    """
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more

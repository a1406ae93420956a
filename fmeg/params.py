"""Parameters are declared once, as a tree of `ParamSpec` beside the function that uses them.

Shapes, layouts, initial values, weight-decay groups and counts are all read from that tree.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fmeg import random, tree
from fmeg.config import TransformerConfig
from fmeg.sharding.collectives import all_reduce
from fmeg.sharding.mesh import Context, Ctx, Mesh
from fmeg.sharding.reshard import own_copy, reshard
from fmeg.sharding.spec import Axes, P

Specs = Any
Params = Any


@dataclass(frozen=True)
class Init:
    """How a parameter starts: normal(0, std), or a constant."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


ZEROS, ONES = Init("zeros"), Init("ones")


def normal(std: float) -> Init:
    """Normal with mean 0 and standard deviation `std`."""
    return Init("normal", std)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical axis of each dimension, and its initial values.

    `decay`: whether weight decay applies. None: it does where the parameter has more than one dimension besides "layers".
    `full_precision`: not cast to the compute dtype (norm weights).
    `storage_shape`: the shape in memory where it is padded; the padding starts at zero and never takes part.

    >>> ParamSpec((64, 256), P("embed", "mlp"), normal(0.02)).stacked(4)
    ParamSpec(shape=(4, 64, 256), axes=P('layers', 'embed', 'mlp'), init=Init(kind='normal', std=0.02), decay=True, ...)
    """

    shape: tuple[int, ...]
    axes: P
    init: Init
    decay: bool | None = None
    full_precision: bool = False
    storage_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"ParamSpec of shape {self.shape} needs {len(self.shape)} axes, got {self.axes}")
        if self.storage_shape is not None and self.storage_shape[1:] != self.shape[1:]:
            raise ValueError(f"ParamSpec {self.shape} may be padded in its first dimension only, not to {self.storage_shape}")
        if self.decay is None:
            object.__setattr__(self, "decay", sum(axis != "layers" for axis in self.axes) > 1)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in memory."""
        return self.storage_shape or self.shape

    def on_one_device(self, cfg: TransformerConfig) -> ParamSpec:
        """This parameter as a single device holds it: padded to the unit of the vocabulary, not to a multiple for all ranks."""
        if self.storage_shape is None:
            return self
        return dataclasses.replace(self, storage_shape=(cfg.on_one_device().padded_vocab_size, *self.shape[1:]))

    def stacked(self, n: int) -> ParamSpec:
        """`n` of these on a leading "layers" axis."""
        if self.storage_shape is not None:
            raise ValueError(f"a padded parameter cannot be stacked: {self}")
        return dataclasses.replace(self, shape=(n, *self.shape), axes=P("layers", *self.axes))

    def unstacked(self) -> ParamSpec:
        """One of the layers of a stack: the inverse of `stacked`."""
        return dataclasses.replace(self, shape=self.shape[1:], axes=P(*self.axes[1:]))

    def held_shape(self, mesh: Mesh | None) -> tuple[int, ...]:
        """The shape in memory of one rank's part, with all ranks in front where they are simulated."""
        if mesh is None:
            return self.stored
        local = mesh.local_shape(self.stored, self.axes)
        return (mesh.world_size, *local) if mesh.simulated else local


def stack(specs: Specs, n: int) -> Specs:
    """Every spec of a tree stacked `n` times."""
    return tree.map(lambda spec: spec.stacked(n), specs)


def init_from_specs(
    specs: Specs, *, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu", ctx: Ctx = None
) -> Params:
    """Initial values for a tree of specs: on a mesh, this rank's parts, drawn without the rest.

    A parameter's values are a function of the seed, its path and the index of each element. They are drawn in fp32 and
    cast, so that every dtype starts from the same numbers.

    >>> specs = {"up": ParamSpec((2, 3), P("embed", "mlp"), normal(0.02))}
    >>> init_from_specs(specs, seed=0, dtype=torch.float32)["up"].shape
    torch.Size([2, 3])
    """
    root = random.key(seed)

    def init(path: str, spec: ParamSpec) -> Tensor:
        local = spec.stored if ctx is None else ctx.mesh.local_shape(spec.stored, spec.axes)
        if spec.init.kind != "normal":
            return torch.full(local, 1.0 if spec.init.kind == "ones" else 0.0, dtype=dtype, device=device)
        index = [None if ctx is None else ctx.positions(axis, n) for axis, n in zip(spec.axes, local, strict=True)]
        # Padding adds rows at the end of the first dimension only, which leaves the others' indices as they are.
        value = random.normal(random.fold_in(root, path).to(device), spec.stored, index=index) * spec.init.std
        if spec.storage_shape is not None:
            rows = torch.arange(local[0], device=device) if index[0] is None else index[0]
            value = torch.where(rows.reshape(-1, *[1] * (len(local) - 1)) < spec.shape[0], value, 0.0)
        return value.to(dtype)

    return tree.map_with_path(init, specs)


def reduce_grads(grads: Params, specs: Specs, ctx: Ctx, *, bucket_size: int) -> Params:
    """The gradient law: each gradient is summed over every mesh axis that its parameter's spec does not use.

    Inside a step whatever is replicated has a pending sum for its cotangent, and a rank's loss is its share of the whole; so
    this one rule covers data parallelism, norms and biases with and without sequence parallelism, and repeated heads.

    Gradients that need the same sum are sent together, in buckets of `bucket_size` elements or a little more, filled from the
    last layer to the first, as the backward makes them: a bucket can leave while earlier layers are still at work.
    """
    if ctx is None:
        return grads
    leaves, treedef = tree.flatten(grads)
    sums = [ctx.mesh.unused_axes(spec.axes) for spec in tree.leaves(specs)]
    rows = [_rows(grad, spec) if axes else [] for grad, spec, axes in zip(leaves, tree.leaves(specs), sums, strict=True)]
    for bucket in _buckets(rows, sums, tree.leaves(specs), bucket_size):
        reduced = _all_reduce_together([rows[i][j] for i, j in bucket], sums[bucket[0][0]], ctx)
        for (i, j), row in zip(bucket, reduced, strict=True):
            rows[i][j] = row
    for i, (spec, axes) in enumerate(zip(tree.leaves(specs), sums, strict=True)):
        if axes:
            leaves[i] = torch.stack(rows[i]) if _is_stacked(spec) else rows[i][0]
    return tree.unflatten(treedef, leaves)


def _is_stacked(spec: ParamSpec) -> bool:
    return len(spec.axes) > 0 and spec.axes[0] == "layers"


def _rows(grad: Tensor, spec: ParamSpec) -> list[Tensor]:
    return list(grad.unbind(0)) if _is_stacked(spec) else [grad]


def _buckets(
    rows: list[list[Tensor]], sums: list[Axes], specs: list[ParamSpec], bucket_size: int
) -> list[list[tuple[int, int]]]:
    """(leaf, layer) of what is sent together. In the order in which a backward makes the gradients: stacked ones a layer at a
    time from the last, the rest after them. What fills a bucket waits for no other.
    """
    order = [(i, j) for i, leaf in enumerate(rows) for j in range(len(leaf))]
    order.sort(key=lambda at: -at[1] if _is_stacked(specs[at[0]]) else 1)
    filling: dict[tuple[Axes, torch.dtype], list[tuple[int, int]]] = {}
    full = []
    for i, j in order:
        if rows[i][j].numel() >= bucket_size:
            full.append([(i, j)])
            continue
        bucket = filling.setdefault((sums[i], rows[i][j].dtype), [])
        bucket.append((i, j))
        if sum(rows[i][j].numel() for i, j in bucket) >= bucket_size:
            full.append(filling.pop((sums[i], rows[i][j].dtype)))
    return full + list(filling.values())


def _all_reduce_together(xs: list[Tensor], axes: Axes, ctx: Context) -> list[Tensor]:
    if len(xs) == 1:
        return [all_reduce(xs[0], axes, ctx)]
    flat = all_reduce(torch.cat([x.reshape(-1) for x in xs]), axes, ctx)
    return [part.reshape(x.shape) for part, x in zip(flat.split([x.numel() for x in xs]), xs, strict=True)]


def shard_tree(params: Params, specs: Specs, ctx: Ctx) -> Params:
    """This rank's parts of a tree that a single device would hold, padded as `specs` say."""
    return tree.map(lambda leaf, spec: shard_leaf(leaf, spec, ctx), params, specs)


def shard_leaf(leaf: Tensor, spec: ParamSpec, ctx: Ctx) -> Tensor:
    """This rank's part of one array, in memory of its own: the whole array is not kept, nor written to by a donation.

    On a single device the part is the whole, and may be the same memory.
    """
    if spec.shape:
        leaf = _repad(leaf, spec.shape[0], spec.stored[0])
    if ctx is None:
        return leaf
    if any(ctx.mesh.axes_of(axis) for axis in spec.axes):
        return reshard(leaf, P(*[None] * leaf.ndim), spec.axes, ctx)
    return own_copy(leaf, ctx)


def unshard_tree(params: Params, specs: Specs, cfg: TransformerConfig, ctx: Ctx) -> Params:
    """The tree that a single device would hold, on every rank."""

    def unshard(leaf: Tensor, spec: ParamSpec) -> Tensor:
        if not spec.shape:
            return leaf
        leaf = reshard(leaf, spec.axes, P(*[None] * leaf.ndim), ctx)
        return _repad(leaf, spec.shape[0], spec.on_one_device(cfg).stored[0])

    return tree.map(unshard, params, specs)


def _repad(leaf: Tensor, rows: int, stored_rows: int) -> Tensor:
    """The first `rows` rows, and zeros up to `stored_rows`."""
    padding = leaf.new_zeros((stored_rows - rows, *leaf.shape[1:]))
    return torch.cat((leaf[:rows], padding)) if stored_rows > rows else leaf[:rows]


def cast_to_compute(params: Params, specs: Specs, cfg: TransformerConfig) -> Params:
    """Parameters in the compute dtype, norm weights as they are. Nothing happens where the dtypes agree already."""
    return tree.map(lambda p, s: p if s.full_precision else p.to(cfg.compute_dtype), params, specs)


def count_params(specs: Specs) -> int:
    """Number of parameters, padding not counted.

    >>> count_params({"up": ParamSpec((2, 3), P("embed", "mlp"), ZEROS), "bias": ParamSpec((3,), P("mlp"), ZEROS)})
    9
    """
    return sum(math.prod(spec.shape) for spec in tree.leaves(specs))


def check_params(params: Params, specs: Specs, mesh: Mesh | None = None) -> None:
    """Refuse a tree whose names or shapes are not those of `specs`: ValueError, naming the first few differences.

    On a simulated mesh every leaf has the ranks as its first dimension.
    """

    want = {path: spec.held_shape(mesh) for path, spec in tree.flatten_with_path(specs)}
    have = {path: tuple(leaf.shape) for path, leaf in tree.flatten_with_path(params)}
    missing, unexpected = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    if missing or unexpected:
        raise ValueError(f"parameters do not match the config: missing {_few(missing)}, unexpected {_few(unexpected)}")
    wrong = [f"{path} {have[path]} instead of {want[path]}" for path in want if have[path] != want[path]]
    if wrong:
        raise ValueError(f"parameters do not match the config: shape of {_few(wrong)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"

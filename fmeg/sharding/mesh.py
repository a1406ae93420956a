"""Meshes: named axes over flat ranks, and the rank that a program runs on, as a tensor."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group as register_process_group

from fmeg.config import TransformerConfig
from fmeg.sharding.spec import TP, TP_SP, Axes, P, Rules


@dataclass(frozen=True)
class Mesh:
    """Named axes over flat ranks, major to minor, and the rules that map logical axes to them.

    Axes of size 1 are left out, so that they cost nothing. Where there are fewer key/value heads than tensor-parallel ranks,
    `tp` is two axes: "tp_kv", over which the heads are sharded, and "tp_rep", over which each of them is repeated.
    """

    axes: tuple[tuple[str, int], ...]
    rules: Rules
    groups: tuple[tuple[Axes, str], ...] | None = None
    """Real ranks: the name of the process group of every choice of axes, the same name on every rank. None: simulated."""
    rank: Tensor | None = field(default=None, compare=False, repr=False)
    """Real ranks: this process's flat rank."""

    @property
    def simulated(self) -> bool:
        """Whether the ranks are a leading dimension of every array, in one process."""
        return self.groups is None

    def group(self, axes: Axes) -> str:
        """The process group over some axes together."""
        assert self.groups is not None  # collectives ask only where ranks are real
        return dict(self.groups)[axes]

    def dims(self, axes: Axes) -> list[int]:
        """Where some axes are among all of them."""
        return [self.names.index(axis) for axis in axes]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size(self.names)

    @property
    def names(self) -> Axes:
        """The axes, major to minor."""
        return tuple(name for name, _ in self.axes)

    def size(self, axes: Axes) -> int:
        """Number of ranks along some axes together."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in axes)

    def stride(self, axis: str) -> int:
        """How far apart in flat ranks two neighbours along an axis are."""
        return self.size(self.names[self.names.index(axis) + 1 :])

    def axes_of(self, logical: str | None) -> Axes:
        """The axes of this mesh over which a logical axis is sharded, major to minor."""
        out: list[str] = []
        for axis in self.rules.axes_of(logical):
            both = {"tp": ("tp", "tp_kv", "tp_rep"), "tp_kv": ("tp", "tp_kv")}.get(axis, (axis,))
            out += [name for name in both if name in self.names]
        return tuple(out)

    @property
    def lead(self) -> bool:
        """Whether this process writes and talks: the first rank, or the only process."""
        return self.rank is None or int(self.rank) == 0

    def layout_of(self, cfg: TransformerConfig) -> TransformerConfig:
        """`cfg` with this mesh's layout."""
        tp = self.world_size // dict(self.axes).get("dp", 1)
        return cfg.replace(tensor_model_parallel_size=tp, sequence_parallel=self.rules == TP_SP)

    def unused_axes(self, spec: P) -> Axes:
        """The axes over which an array of this layout is replicated."""
        used = {axis for logical in spec for axis in self.axes_of(logical)}
        return tuple(axis for axis in self.names if axis not in used)

    def local_shape(self, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
        """The shape of one rank's part. ValueError, naming the axis, where a dimension does not divide."""
        used = [axis for logical in spec for axis in self.axes_of(logical)]
        if len(set(used)) < len(used):
            raise ValueError(f"{spec} uses a mesh axis twice, {sorted(used)}: shard one of its dimensions only")
        out = []
        for size, logical in zip(shape, spec, strict=True):
            ranks = self.size(self.axes_of(logical))
            if size % ranks:
                raise ValueError(f"{logical} of size {size} is not divisible over {ranks} ranks: use a multiple of {ranks}")
            out.append(size // ranks)
        return tuple(out)


class Context(NamedTuple):
    """What a layer runs on: a mesh, and the flat rank as a 0-d integer tensor, never a number in the program.

    Every rank so runs the same graph, and a simulated rank is a mapped tensor.
    """

    mesh: Mesh
    rank: Tensor

    def place(self, axes: Axes) -> Tensor:
        """The rank's place along some axes together, major to minor: a 0-d integer tensor."""
        place = torch.zeros_like(self.rank)
        for axis in axes:
            size = self.mesh.size((axis,))
            place = place * size + self.rank // self.mesh.stride(axis) % size
        return place

    def positions(self, logical: str | None, local_size: int) -> Tensor | None:
        """Which positions of a logical axis this rank's `local_size` ones are: int64 [local_size]. None: all of them."""
        axes = self.mesh.axes_of(logical)
        if not axes:
            return None
        return self.place(axes) * local_size + torch.arange(local_size, device=self.rank.device)


Ctx = Context | None
"""What a layer runs on; None: a single device."""


def simulated_mesh(cfg: TransformerConfig, *, data_parallel_size: int = 1) -> Mesh:
    """Ranks in this process: every array gains a leading dimension, the rank, and collectives are arithmetic over it.

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=4, num_query_groups=2, vocab_size=96,
    ...     tensor_model_parallel_size=4)
    >>> simulated_mesh(cfg, data_parallel_size=2).axes
    (('dp', 2), ('tp_kv', 2), ('tp_rep', 2))
    """
    if data_parallel_size < 1:
        raise ValueError(f"data_parallel_size is {data_parallel_size}: must be a positive integer")
    tp = cfg.tensor_model_parallel_size
    repeats = max(tp // cfg.query_groups, 1)
    tensor = (("tp", tp),) if repeats == 1 else (("tp_kv", tp // repeats), ("tp_rep", repeats))
    axes = (("dp", data_parallel_size), *tensor)
    return Mesh(tuple((name, size) for name, size in axes if size > 1), TP_SP if cfg.sequence_parallel else TP)


def planned_mesh(mesh: Mesh) -> Mesh:
    """The mesh of a process of many that do not run: what is traced on it, without data, is what each of them would do.

    >>> planned_mesh(Mesh((("dp", 512), ("tp", 8)), TP)).group(("dp", "tp"))
    'dp-tp'
    """
    return replace(mesh, groups=tuple((axes, "-".join(axes)) for axes in _choices(mesh.names)), rank=torch.tensor(0))


def _choices(names: Axes) -> list[Axes]:
    """Every choice of some of the axes."""
    return [axes for n in range(1, len(names) + 1) for axes in itertools.combinations(names, n)]


def make_mesh(cfg: TransformerConfig, *, timeout_seconds: float = 600.0) -> Mesh | None:
    """The mesh of the processes that torchrun started, tensor parallelism fastest, the rest data parallelism.

    None in a process of its own. Uses the default process group, and starts it (NCCL where there is a GPU, else gloo) if
    nobody has. `timeout_seconds`: how long a collective waits for the other ranks before it fails.

    Errors: ValueError when the number of processes is not a multiple of tensor_model_parallel_size.

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=4, vocab_size=96)
    >>> print(make_mesh(cfg))
    None
    """
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            check_mesh(cfg, None)
            return None
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    tp, world = cfg.tensor_model_parallel_size, dist.get_world_size()
    if world % tp:
        raise ValueError(f"{world} processes cannot be shared by tensor_model_parallel_size {tp}: start a multiple of {tp}")
    mesh = simulated_mesh(cfg, data_parallel_size=world // tp)
    if not mesh.axes:
        return None
    ranks = torch.arange(world).view([size for _, size in mesh.axes])
    groups = tuple((axes, _join_group(ranks, mesh.dims(axes), axes)) for axes in _choices(mesh.names))
    return replace(mesh, groups=groups, rank=torch.tensor(dist.get_rank()))


def _join_group(ranks: Tensor, dims: list[int], axes: Axes) -> str:
    """Make the groups over some axes, and register this rank's under a name that is the same on every rank.

    Programs name their groups, and every rank so runs the same program. torch numbers groups in the order in which they are
    made, so the number of the first of them tells meshes apart.
    """
    size = math.prod(ranks.shape[d] for d in dims)
    rows = ranks.movedim(dims, list(range(-len(dims), 0))).reshape(-1, size).tolist()
    made = [dist.new_group(row) for row in rows]
    place = next(i for i, row in enumerate(rows) if dist.get_rank() in row)
    name = f"fmeg-{'-'.join(axes)}-{int(made[place].group_name) - place}"
    register_process_group(name, made[place])  # type: ignore[arg-type]  # a NewType of str, not exported
    return name


def check_is_mesh(mesh: object) -> None:
    """Refuse what is neither a mesh nor None."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is {mesh!r}: must be a Mesh, by make_mesh(cfg) or simulated_mesh(cfg), or None")


def check_mesh(cfg: TransformerConfig, mesh: Mesh | None) -> None:
    """Refuse a mesh that is not the config's, or none where the config asks for one."""
    tp = cfg.tensor_model_parallel_size
    if mesh is None:
        if tp > 1:
            raise ValueError(
                f"tensor_model_parallel_size is {tp} but mesh is None: start a multiple of {tp} processes by torchrun and "
                "pass mesh=make_mesh(cfg), or pass mesh=simulated_mesh(cfg)"
            )
        return
    check_is_mesh(mesh)
    wanted = simulated_mesh(cfg, data_parallel_size=dict(mesh.axes).get("dp", 1))
    if (mesh.axes, mesh.rules) != (wanted.axes, wanted.rules):
        raise ValueError(
            f"mesh {mesh.axes} with rules {mesh.rules.name} is not the config's: use make_mesh(cfg) or simulated_mesh(cfg)"
        )

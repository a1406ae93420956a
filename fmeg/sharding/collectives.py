"""The collectives, each a differentiable function whose backward is its dual: <A x, y> = <x, A^T y>.

| forward | backward |
|---|---|
| all_reduce | all_reduce |
| all_gather | reduce_scatter |
| reduce_scatter | all_gather |
| all_to_all(i, j) | all_to_all(j, i) |

Replicated values have unreduced cotangents here (a pending sum over ranks), which is what makes all_reduce its own dual.
Real ranks communicate over process groups (torch's functional collectives, which compile). Simulated ranks are one
`torch.func.vmap`: a collective's vmap rule sees all of them and communicates by arithmetic. The rank is an input of every
collective, and of its backward, so that the rule runs on arrays and cotangents that are the same on every rank too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmeg.autodiff import apply_function
from fmeg.sharding.mesh import Context, Mesh
from fmeg.sharding.spec import Axes


def all_reduce(x: Tensor, axes: Axes, ctx: Context) -> Tensor:
    """The sum over the ranks of some axes, on each of them."""
    return _apply(_AllReduce, x, axes, ctx)


def all_gather(x: Tensor, dim: int, axes: Axes, ctx: Context) -> Tensor:
    """The ranks' arrays one after the other along `dim`, on each of them."""
    return _apply(_AllGather, x, axes, ctx, dim)


def reduce_scatter(x: Tensor, dim: int, axes: Axes, ctx: Context) -> Tensor:
    """Each rank's part along `dim` of the sum over the ranks."""
    return _apply(_ReduceScatter, x, axes, ctx, dim)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, axes: Axes, ctx: Context) -> Tensor:
    """Each rank's part along `split_dim` of all ranks' arrays, one after the other along `concat_dim`."""
    return _apply(_AllToAll, x, axes, ctx, split_dim, concat_dim)


def all_reduce_of_equals(x: Tensor, axes: Axes, ctx: Context) -> Tensor:
    """all_reduce for a sum from which every rank goes on to compute the same share of one number.

    Its cotangents are then equal, and their sum, the dual all_reduce, is a multiplication.
    """
    return _apply(_AllReduceOfEquals, x, axes, ctx)


def all_reduce_max(x: Tensor, axes: Axes, ctx: Context) -> Tensor:
    """The largest value over the ranks of some axes, on each of them. Has no derivative."""
    return _apply(_AllReduceMax, x, axes, ctx)


def _apply(function: type[_Collective], x: Tensor, axes: Axes, ctx: Context, *dims: int) -> Tensor:
    """Over no axes a rank is alone, and nothing happens."""
    return apply_function(function, x, ctx.rank, _Over(ctx.mesh, axes, dims)) if axes else x


@dataclass(frozen=True)
class _Over:
    """What a collective does besides its array, as one thing: functorch walks through all arguments many times a call."""

    mesh: Mesh
    axes: Axes
    dims: tuple[int, ...]


class _Collective(torch.autograd.Function):
    """What the collectives share. Subclasses give `real`, over process groups, and `simulated`, over mesh dimensions."""

    @classmethod
    def real(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        raise TypeError(f"{cls.__name__} defines no collective")

    @classmethod
    def simulated(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        raise TypeError(f"{cls.__name__} defines no collective")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, rank, over = inputs
        ctx.mesh, ctx.axes, ctx.dims = over.mesh, over.axes, over.dims
        ctx.save_for_backward(rank)


def forward_context(ctx: Any) -> Context:
    """What a collective ran on, for its backward; `ctx` is autograd's."""
    (rank,) = ctx.saved_tensors
    return Context(ctx.mesh, rank)


def _define(cls: type[_Collective]) -> type[_Collective]:
    """Add `forward` and `vmap`, which torch wants as static methods of each class."""

    def forward(x: Tensor, rank: Tensor, over: _Over) -> Tensor:
        if over.mesh.simulated:
            raise ValueError("this mesh is simulated: call the program through on_mesh, which maps it over the ranks")
        return cls.real(x, over.mesh, over.axes, *over.dims)

    def vmap(info: Any, in_dims: Any, x: Tensor, rank: Tensor, over: _Over) -> tuple[Tensor, int]:
        x_dim, rank_dim, _ = in_dims
        if rank_dim is None:  # mapped over something else than the ranks
            inner = replace(over, dims=tuple(dim + 1 for dim in over.dims))
            return apply_function(cls, x.movedim(x_dim, 0), rank, inner), 0
        x = _split_ranks(x, x_dim, info.batch_size, over.mesh)
        return _join_ranks(cls.simulated(x, over.mesh, over.axes, *over.dims), over.mesh), 0

    cls.forward, cls.vmap = staticmethod(forward), staticmethod(vmap)  # type: ignore[method-assign]
    return cls


@_define
class _AllReduce(_Collective):
    @classmethod
    def real(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        return _wait(_ops.all_reduce(x.contiguous(), "sum", mesh.group(axes)))

    @classmethod
    def simulated(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        return x.sum(mesh.dims(axes), keepdim=True, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return all_reduce(g, ctx.axes, forward_context(ctx)), None, None


@_define
class _AllReduceOfEquals(_AllReduce):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return g * ctx.mesh.size(ctx.axes), None, None


@_define
class _AllReduceMax(_Collective):
    @classmethod
    def real(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        return _wait(_ops.all_reduce(x.contiguous(), "max", mesh.group(axes)))

    @classmethod
    def simulated(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        return x.amax(mesh.dims(axes), keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise ValueError("all_reduce_max has no derivative: detach its input")


@_define
class _AllGather(_Collective):
    @classmethod
    def real(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        (dim,) = dims
        first = x.movedim(dim, 0).contiguous()
        return _wait(_ops.all_gather_into_tensor(first, mesh.size(axes), mesh.group(axes))).movedim(0, dim)

    @classmethod
    def simulated(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        return _merge_into(x, mesh, axes, *dims)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return reduce_scatter(g, ctx.dims[0], ctx.axes, forward_context(ctx)), None, None


@_define
class _ReduceScatter(_Collective):
    @classmethod
    def real(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        (dim,) = dims
        first = x.movedim(dim, 0).contiguous()
        return _wait(_ops.reduce_scatter_tensor(first, "sum", mesh.size(axes), mesh.group(axes))).movedim(0, dim)

    @classmethod
    def simulated(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        return _split_off(x.sum(mesh.dims(axes), keepdim=True, dtype=x.dtype), mesh, axes, *dims)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return all_gather(g, ctx.dims[0], ctx.axes, forward_context(ctx)), None, None


@_define
class _AllToAll(_Collective):
    @classmethod
    def real(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        (split_dim, concat_dim), ranks = dims, mesh.size(axes)
        first = x.movedim(split_dim, 0).contiguous()
        sizes = [len(first) // ranks] * ranks
        parts = _wait(_ops.all_to_all_single(first, sizes, sizes, mesh.group(axes))).unflatten(0, (ranks, -1))
        return parts.movedim(1, 1 + split_dim).movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)

    @classmethod
    def simulated(cls, x: Tensor, mesh: Mesh, axes: Axes, *dims: int) -> Tensor:
        split_dim, concat_dim = dims
        return _split_off(_merge_into(x, mesh, axes, concat_dim), mesh, axes, split_dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        split_dim, concat_dim = ctx.dims
        return all_to_all(g, concat_dim, split_dim, ctx.axes, forward_context(ctx)), None, None


_ops = torch.ops._c10d_functional


def _wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)


def _split_ranks(x: Tensor, bdim: int | None, ranks: int, mesh: Mesh) -> Tensor:
    """[..., ranks at bdim, ...] to [size of each mesh axis, ...]."""
    if ranks != mesh.world_size:
        raise ValueError(f"a mesh of {mesh.world_size} ranks is mapped over {ranks}: call the program through on_mesh")
    x = x.expand(ranks, *x.shape) if bdim is None else x.movedim(bdim, 0)
    return x.unflatten(0, tuple(size for _, size in mesh.axes))


def _join_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """[size of each mesh axis or 1, ...] to [ranks, ...]."""
    n = len(mesh.axes)
    return x.expand(*(size for _, size in mesh.axes), *x.shape[n:]).flatten(0, n - 1)


def _merge_into(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    """Mesh dimensions moved in front of tensor dimension `dim` and merged with it; 1 is left in their places."""
    at, rest = mesh.dims(axes), len(mesh.axes) - len(axes)
    x = x.movedim(at, [rest + dim + j for j in range(len(at))]).flatten(rest + dim, rest + dim + len(at))
    for place in sorted(at):
        x = x.unsqueeze(place)
    return x


def _split_off(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    """The inverse: tensor dimension `dim` cut into a part for each rank of some mesh axes, whose dimensions are 1 now."""
    n = len(mesh.axes)
    x = x.unflatten(n + dim, (*(mesh.size((axis,)) for axis in axes), -1))
    # Each mesh dimension of size 1 changes places with its parts' dimension, and is dropped there.
    for j, place in enumerate(mesh.dims(axes)):
        x = x.transpose(place, n + dim + j)
    return x.flatten(n + dim, n + dim + len(axes))

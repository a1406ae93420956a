"""The collectives, each a differentiable function whose backward is its dual: <A x, y> = <x, A^T y>.

| forward | backward |
|---|---|
| all_reduce | all_reduce |
| all_gather | reduce_scatter |
| reduce_scatter | all_gather |
| all_to_all(i, j) | all_to_all(j, i) |

Replicated values have unreduced cotangents here (a pending sum over ranks), which is what makes all_reduce its own dual.
Simulated ranks are one `torch.func.vmap`: a collective's vmap rule sees all of them and communicates by arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.autodiff import apply_function
from fmeg.sharding.mesh import Mesh
from fmeg.sharding.spec import Axes


def all_reduce(x: Tensor, axes: Axes, mesh: Mesh) -> Tensor:
    """The sum over the ranks of some axes, on each of them."""
    return apply_function(_AllReduce, x, axes, mesh)


def all_gather(x: Tensor, dim: int, axes: Axes, mesh: Mesh) -> Tensor:
    """The ranks' arrays one after the other along `dim`, on each of them."""
    return apply_function(_AllGather, x, dim, axes, mesh)


def reduce_scatter(x: Tensor, dim: int, axes: Axes, mesh: Mesh) -> Tensor:
    """Each rank's part along `dim` of the sum over the ranks."""
    return apply_function(_ReduceScatter, x, dim, axes, mesh)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, axes: Axes, mesh: Mesh) -> Tensor:
    """Each rank's part along `split_dim` of all ranks' arrays, one after the other along `concat_dim`."""
    return apply_function(_AllToAll, x, split_dim, concat_dim, axes, mesh)


def all_reduce_of_equals(x: Tensor, axes: Axes, mesh: Mesh) -> Tensor:
    """all_reduce for a sum from which every rank goes on to compute the same share of one number.

    Its cotangents are then equal, and their sum, the dual all_reduce, is a multiplication.
    """
    return apply_function(_AllReduceOfEquals, x, axes, mesh)


def all_reduce_max(x: Tensor, axes: Axes, mesh: Mesh) -> Tensor:
    """The largest value over the ranks of some axes, on each of them. Has no derivative."""
    return apply_function(_AllReduceMax, x, axes, mesh)


class _Collective(torch.autograd.Function):
    """What the collectives share: their static arguments are kept for the backward, ranks are mapped over."""

    @staticmethod
    def forward(x: Tensor, *args: Any) -> Tensor:
        raise ValueError("this mesh is simulated: call the program through on_mesh, which maps it over the ranks")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[1:]


class _AllReduce(_Collective):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return all_reduce(g, *ctx.args), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, axes: Axes, mesh: Mesh) -> tuple[Tensor, int]:
        x, at = _split_ranks(x, in_dims[0], info.batch_size, axes, mesh)
        return _join_ranks(x.sum(at, keepdim=True), mesh), 0


class _AllReduceOfEquals(_AllReduce):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        axes, mesh = ctx.args
        return g * mesh.size(axes), None, None


class _AllReduceMax(_Collective):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise ValueError("all_reduce_max has no derivative: detach its input")

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, axes: Axes, mesh: Mesh) -> tuple[Tensor, int]:
        x, at = _split_ranks(x, in_dims[0], info.batch_size, axes, mesh)
        return _join_ranks(x.amax(at, keepdim=True), mesh), 0


class _AllGather(_Collective):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return reduce_scatter(g, *ctx.args), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dim: int, axes: Axes, mesh: Mesh) -> tuple[Tensor, int]:
        x, at = _split_ranks(x, in_dims[0], info.batch_size, axes, mesh)
        return _join_ranks(_merge_into(x, at, dim, mesh), mesh), 0


class _ReduceScatter(_Collective):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return all_gather(g, *ctx.args), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dim: int, axes: Axes, mesh: Mesh) -> tuple[Tensor, int]:
        x, at = _split_ranks(x, in_dims[0], info.batch_size, axes, mesh)
        return _join_ranks(_split_off(x.sum(at, keepdim=True), at, dim, axes, mesh), mesh), 0


class _AllToAll(_Collective):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        split_dim, concat_dim, axes, mesh = ctx.args
        return all_to_all(g, concat_dim, split_dim, axes, mesh), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, split_dim: int, concat_dim: int, axes: Axes, mesh: Mesh) -> tuple[Tensor, int]:
        x, at = _split_ranks(x, in_dims[0], info.batch_size, axes, mesh)
        gathered = _merge_into(x, at, concat_dim, mesh)
        return _join_ranks(_split_off(gathered, at, split_dim, axes, mesh), mesh), 0


def _split_ranks(x: Tensor, bdim: int | None, ranks: int, axes: Axes, mesh: Mesh) -> tuple[Tensor, list[int]]:
    """[..., ranks at bdim, ...] to [size of each mesh axis, ...], and where `axes` are among them."""
    if ranks != mesh.world_size:
        raise ValueError(f"a mesh of {mesh.world_size} ranks is mapped over {ranks}: use on_mesh alone, without a vmap inside")
    x = x.expand(ranks, *x.shape) if bdim is None else x.movedim(bdim, 0)
    return x.unflatten(0, tuple(size for _, size in mesh.axes)), [mesh.names.index(axis) for axis in axes]


def _join_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """[size of each mesh axis or 1, ...] to [ranks, ...]."""
    n = len(mesh.axes)
    return x.expand(*(size for _, size in mesh.axes), *x.shape[n:]).flatten(0, n - 1)


def _merge_into(x: Tensor, at: list[int], dim: int, mesh: Mesh) -> Tensor:
    """The mesh axes at `at` moved in front of tensor dimension `dim` and merged with it; 1 is left in their places."""
    rest = len(mesh.axes) - len(at)
    x = x.movedim(at, [rest + dim + j for j in range(len(at))]).flatten(rest + dim, rest + dim + len(at))
    for place in sorted(at):
        x = x.unsqueeze(place)
    return x


def _split_off(x: Tensor, at: list[int], dim: int, axes: Axes, mesh: Mesh) -> Tensor:
    """The inverse: tensor dimension `dim` cut into parts, one for each rank of the mesh axes at `at`, which are 1 now."""
    n = len(mesh.axes)
    x = x.unflatten(n + dim, (*(mesh.size((axis,)) for axis in axes), -1))
    # Each mesh axis of size 1 changes places with its part's dimension, and is dropped there.
    for j, place in enumerate(at):
        x = x.transpose(place, n + dim + j)
    return x.flatten(n + dim, n + dim + len(at))

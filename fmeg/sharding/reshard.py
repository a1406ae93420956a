"""`reshard(x, src, dst, ctx)`: the only way in which a layer communicates, and whole trees in and out of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmeg import tree
from fmeg.sharding.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from fmeg.sharding.mesh import Context, Ctx, Mesh
from fmeg.sharding.spec import Axes, P


def reshard(x: Tensor, src: P, dst: P, ctx: Ctx) -> Tensor:
    """Move `x` from layout `src` to layout `dst`. On a single device both are the whole array, and nothing happens.

    | src -> dst | forward | backward |
    |---|---|---|
    | sharded -> replicated | all-gather | reduce-scatter |
    | unreduced -> replicated | all-reduce | all-reduce |
    | unreduced -> sharded | reduce-scatter | all-gather |
    | sharded on i -> sharded on j | all-to-all | all-to-all |
    | replicated -> sharded | slice | pad with zeros |

    Errors: ValueError when a layout has another rank than `x`, or when `dst` keeps a sum pending that `src` does not.

    >>> x_BTD = torch.zeros(2, 3, 4)
    >>> reshard(x_BTD, P("batch", "seq", "embed", unreduced="mlp"), P("batch", "residual_seq", "embed"), None) is x_BTD
    True
    """
    for name, spec in (("src", src), ("dst", dst)):
        if len(spec) != x.ndim:
            raise ValueError(f"reshard: {name} {spec} names {len(spec)} dimensions, the array has {x.ndim}: {tuple(x.shape)}")
    extra = set(dst.unreduced) - set(src.unreduced)
    if extra:
        raise ValueError(f"reshard: dst {dst} leaves {sorted(extra)} unreduced, but src {src} has no such pending sum")
    if ctx is None:
        return x
    mesh = ctx.mesh
    before, after = [[mesh.axes_of(axis) for axis in spec] for spec in (src, dst)]
    pending = [axis for logical in src.unreduced if logical not in dst.unreduced for axis in mesh.axes_of(logical)]
    gone = {axes: i for i, axes in enumerate(before) if axes and axes != after[i]}
    come = {axes: i for i, axes in enumerate(after) if axes and axes != before[i]}
    for axes, i in gone.items():
        # An all-to-all exchanges a sharded dimension and a whole one; where both are sharded it would mix up their orders.
        if axes in come and not before[come[axes]] and not after[i]:
            x = all_to_all(x, come.pop(axes), i, axes, ctx)
        else:
            x = all_gather(x, i, axes, ctx)
    for axes, i in come.items():
        if set(axes) <= set(pending):
            x = reduce_scatter(x, i, axes, ctx)
            pending = [axis for axis in pending if axis not in axes]
        else:
            x = take_part(x, i, axes, ctx)
    return all_reduce(x, tuple(pending), ctx)


def take_part(x: Tensor, dim: int, axes: Axes, ctx: Context) -> Tensor:
    """This rank's part of a replicated array along `dim`. Its derivative pads with zeros."""
    ranks = ctx.mesh.size(axes)
    if x.shape[dim] % ranks:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} is not divisible over {ranks} ranks of {axes}")
    local = x.shape[dim] // ranks
    places = ctx.place(axes) * local + torch.arange(local, device=x.device)
    return x.index_select(dim, places)


def own_copy(x: Tensor, ctx: Context) -> Tensor:
    """A rank's own copy of an array that all ranks have alike: its part over no axes, for each of simulated ranks too."""
    return take_part(x.unsqueeze(0), 0, (), ctx).squeeze(0)


def take_batch(batch: Any, ctx: Ctx) -> Any:
    """This rank's sequences of a global batch, a tree of arrays with the batch first."""
    axes = () if ctx is None else ctx.mesh.axes_of("batch")
    return tree.map(lambda leaf: take_part(leaf, 0, axes, ctx), batch) if ctx is not None and axes else batch


def on_mesh(fn: Callable[..., Any], mesh: Mesh | None, *, shared: Sequence[int] = ()) -> Callable[..., Any]:
    """`fn(ctx, *args)`, a program for one rank, as a function of its arguments on a whole mesh.

    Without a mesh `ctx` is None, on real ranks it is this process's. On simulated ranks every array has a leading rank
    dimension, in arguments and results, except in the arguments at `shared`, which all ranks see alike. One `torch.func.vmap`
    runs the ranks, and collectives are arithmetic: deterministic, differentiable, compilable.

    >>> from fmeg.sharding.spec import TP
    >>> mesh = Mesh((("tp", 4),), TP)
    >>> total = on_mesh(lambda ctx, x: reshard(x, P(None, unreduced="mlp"), P(None), ctx), mesh)
    >>> total(torch.arange(4.0)[:, None]).squeeze(1)
    tensor([6., 6., 6., 6.])
    """
    if mesh is None:
        return functools.partial(fn, None)
    if mesh.rank is not None:
        return functools.partial(fn, Context(mesh, mesh.rank))

    def run(*args: Any) -> Any:
        # Flat lists in and out: vmap's own pytrees take a None for a leaf.
        flat, treedef = tree.flatten(args)
        dims = [None if i in shared else 0 for i, arg in enumerate(args) for _ in tree.leaves(arg)]
        out_treedef: Any = None

        def local(rank: Tensor, *leaves: Tensor) -> list[Tensor]:
            nonlocal out_treedef
            out, out_treedef = tree.flatten(fn(Context(mesh, rank), *tree.unflatten(treedef, list(leaves))))
            return out

        outs = torch.func.vmap(local, in_dims=(0, *dims))(torch.arange(mesh.world_size), *flat)
        return tree.unflatten(out_treedef, list(outs))

    return run

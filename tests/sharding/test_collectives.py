"""Collectives are linear maps: their values against a loop over ranks, and their derivatives against <A x, y> = <x, A^T y>.

Numbers are small integers, which every dtype adds up exactly; so every comparison is exact, also in bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fmeg
from fmeg.sharding import collectives
from fmeg.sharding.mesh import Context, Mesh
from fmeg.sharding.reshard import reshard, take_part
from fmeg.sharding.spec import TP, Axes, P

MESH = Mesh((("dp", 2), ("tp_kv", 2), ("tp_rep", 3)), TP)
SIZES = dict(MESH.axes)
CHOICES = [axes for n in (1, 2, 3) for axes in itertools.combinations(MESH.names, n)]
PLACES = list(itertools.product(*(range(size) for _, size in MESH.axes)))
SHAPE = (2, 12, 24)
"""One rank's array: the last two dimensions divide over every choice of axes."""

DTYPES = [torch.float64, torch.float32, torch.bfloat16]

Program = Callable[[Context, Tensor, Axes], Tensor]
PROGRAMS: dict[str, Program] = {
    "all_reduce": lambda ctx, x, axes: collectives.all_reduce(x, axes, ctx),
    "all_gather_0": lambda ctx, x, axes: collectives.all_gather(x, 0, axes, ctx),
    "all_gather_2": lambda ctx, x, axes: collectives.all_gather(x, 2, axes, ctx),
    "reduce_scatter_1": lambda ctx, x, axes: collectives.reduce_scatter(x, 1, axes, ctx),
    "reduce_scatter_2": lambda ctx, x, axes: collectives.reduce_scatter(x, 2, axes, ctx),
    "all_to_all_1_to_0": lambda ctx, x, axes: collectives.all_to_all(x, 1, 0, axes, ctx),
    "all_to_all_1_to_2": lambda ctx, x, axes: collectives.all_to_all(x, 1, 2, axes, ctx),
    "all_to_all_2_to_1": lambda ctx, x, axes: collectives.all_to_all(x, 2, 1, axes, ctx),
    "take_part_1": lambda ctx, x, axes: take_part(x, 1, axes, ctx),
    "take_part_2": lambda ctx, x, axes: take_part(x, 2, axes, ctx),
}

all_programs = pytest.mark.parametrize("name", PROGRAMS)
all_choices = pytest.mark.parametrize("axes", CHOICES, ids="-".join)


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    """In -3 .. 3; `transposed`: the ranks and all dimensions lie in memory in the reverse order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim))) if transposed else x


def neighbours(rank: int, axes: Axes) -> list[int]:
    """The ranks that differ from `rank` along some axes only, in the order of these axes, major to minor."""
    others = [i for i, name in enumerate(MESH.names) if name not in axes]
    return [r for r, place in enumerate(PLACES) if all(place[i] == PLACES[rank][i] for i in others)]


def by_loop(name: str, x: Tensor, axes: Axes) -> Tensor:
    """What each rank ends with, one rank after the other."""
    dims = [int(part) for part in name.split("_") if part.isdigit()]
    outs = []
    for rank in range(MESH.world_size):
        group = neighbours(rank, axes)
        mine, parts = group.index(rank), [x[r] for r in group]
        if name.startswith("all_reduce"):
            out = torch.stack(parts).sum(0)
        elif name.startswith("all_gather"):
            out = torch.cat(parts, dims[0])
        elif name.startswith("reduce_scatter"):
            out = torch.stack(parts).sum(0).chunk(len(group), dims[0])[mine]
        elif name.startswith("all_to_all"):
            out = torch.cat([part.chunk(len(group), dims[0])[mine] for part in parts], dims[1])
        else:
            out = x[rank].chunk(len(group), dims[0])[mine]
        outs.append(out)
    return torch.stack(outs)


@all_choices
@all_programs
def test_values_are_those_of_a_loop_over_ranks(name: str, axes: Axes) -> None:
    for dtype, transposed in itertools.product(DTYPES, (False, True)):
        x = integers((MESH.world_size, *SHAPE), 0, dtype, transposed)
        got = fmeg.on_mesh(lambda ctx, x: PROGRAMS[name](ctx, x, axes), MESH)(x)
        assert got.dtype == dtype
        assert torch.equal(got, by_loop(name, x, axes)), (dtype, transposed)


@all_choices
@all_programs
def test_backward_is_the_adjoint(name: str, axes: Axes) -> None:
    for dtype, transposed in itertools.product(DTYPES, (False, True)):
        x = integers((MESH.world_size, *SHAPE), 0, dtype, transposed)
        y = integers(tuple(by_loop(name, x, axes).shape), 1, dtype, transposed)

        def both(ctx: Context, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out, pullback = torch.func.vjp(lambda x: PROGRAMS[name](ctx, x, axes), x)
            return out, pullback(y)[0]

        out, back = fmeg.on_mesh(both, MESH)(x, y)
        assert back.shape == x.shape and back.dtype == dtype
        left, right = (out.double() * y.double()).sum(), (x.double() * back.double()).sum()
        assert left == right and left != 0, (dtype, transposed)


def test_a_gather_over_several_axes_is_ordered_major_to_minor() -> None:
    ranks = torch.arange(12.0)[:, None]
    got = fmeg.on_mesh(lambda ctx, x: collectives.all_gather(x, 0, ("tp_kv", "tp_rep"), ctx), MESH)(ranks)
    assert got[0].tolist() == got[5].tolist() == [0, 1, 2, 3, 4, 5]
    assert got[6].tolist() == got[11].tolist() == [6, 7, 8, 9, 10, 11]
    got = fmeg.on_mesh(lambda ctx, x: collectives.all_gather(x, 0, ("dp", "tp_rep"), ctx), MESH)(ranks)
    assert got[0].tolist() == [0, 1, 2, 6, 7, 8]
    assert got[11].tolist() == [3, 4, 5, 9, 10, 11]


@all_choices
def test_places_are_counted_in_the_order_of_a_gather(axes: Axes) -> None:
    def places(ctx: Context) -> tuple[Tensor, Tensor]:
        return ctx.place(axes), collectives.all_gather(ctx.place(axes)[None], 0, axes, ctx)

    place, gathered = fmeg.on_mesh(places, MESH)()
    assert place.tolist() == [neighbours(rank, axes).index(rank) for rank in range(12)]
    assert all(row == list(range(len(row))) for row in gathered.tolist())


@all_choices
def test_the_sum_of_equals_is_all_reduce_where_cotangents_are_equal(axes: Axes) -> None:
    def both(collective: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        def run(ctx: Context, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out, pullback = torch.func.vjp(lambda x: collective(x, axes, ctx), x)
            return out, pullback(collectives.all_reduce(y, axes, ctx))[0]

        x, y = (integers((12, *SHAPE), seed, torch.float64) for seed in range(2))
        return fmeg.on_mesh(run, MESH)(x, y)

    for a, b in zip(both(collectives.all_reduce), both(collectives.all_reduce_of_equals), strict=True):
        assert torch.equal(a, b)


@all_choices
def test_the_largest_value_over_ranks_has_no_derivative(axes: Axes) -> None:
    x = integers((12, *SHAPE), 0, torch.float64)
    got = fmeg.on_mesh(lambda ctx, x: collectives.all_reduce_max(x, axes, ctx), MESH)(x)
    assert torch.equal(got, torch.stack([x[neighbours(rank, axes)].amax(0) for rank in range(12)]))
    loss = lambda ctx, x: torch.func.grad(lambda x: collectives.all_reduce_max(x, axes, ctx).sum())(x)  # noqa: E731
    with pytest.raises(ValueError, match="all_reduce_max has no derivative: detach its input"):
        fmeg.on_mesh(loss, MESH)(x)


COLLECTIVES = PROGRAMS | {
    "all_reduce_of_equals": lambda ctx, x, axes: collectives.all_reduce_of_equals(x, axes, ctx),
    "all_reduce_max": lambda ctx, x, axes: collectives.all_reduce_max(x, axes, ctx),
}
every_collective = pytest.mark.parametrize("name", COLLECTIVES)


@all_choices
@every_collective
def test_what_is_the_same_on_every_rank_is_taken_like_a_copy_on_each(name: str, axes: Axes) -> None:
    """Shared arguments and constants of the program, of every kind of dtype."""
    for dtype in (torch.float64, torch.int32, torch.bool):
        x = integers(SHAPE, 0, dtype)
        copies, run = x.expand(MESH.world_size, *SHAPE), lambda ctx, x: COLLECTIVES[name](ctx, x, axes)
        want = fmeg.on_mesh(run, MESH)(copies)
        assert want.dtype == dtype
        assert torch.equal(fmeg.on_mesh(run, MESH, shared=(0,))(x), want)
        assert torch.equal(fmeg.on_mesh(lambda ctx: run(ctx, x.clone()), MESH)(), want)  # noqa: B023


@all_choices
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "all_reduce_max"])
def test_gradients_at_and_of_what_is_the_same_on_every_rank(name: str, axes: Axes) -> None:
    """The array or its cotangent or both are unmapped, and then the gradient's cotangent in a second derivative."""

    def both(ctx: Context, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        _, pullback = torch.func.vjp(lambda x: COLLECTIVES[name](ctx, x, axes), x)
        return pullback(y)[0], torch.func.vjp(lambda y: pullback(y)[0], y)[1](x)[0]

    x = integers(SHAPE, 0, torch.float64)
    y = integers(
        tuple(fmeg.on_mesh(lambda ctx, x: COLLECTIVES[name](ctx, x, axes), MESH, shared=(0,))(x).shape[1:]), 1, x.dtype
    )
    args, copies = (x, y), tuple(z.expand(12, *z.shape) for z in (x, y))
    want = fmeg.on_mesh(both, MESH)(*copies)
    for shared in ((0,), (1,), (0, 1)):
        got = fmeg.on_mesh(both, MESH, shared=shared)(*((args if i in shared else copies)[i] for i in range(2)))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), shared


@every_collective
def test_a_vmap_inside_on_mesh_maps_a_collective_too(name: str) -> None:
    x = integers((12, 3, *SHAPE), 0, torch.float64)
    run = lambda ctx, x: COLLECTIVES[name](ctx, x, ("dp",))  # noqa: E731
    got = fmeg.on_mesh(lambda ctx, x: torch.func.vmap(lambda x: run(ctx, x))(x), MESH)(x)
    assert torch.equal(got, torch.stack([fmeg.on_mesh(run, MESH)(part) for part in x.unbind(1)], 1))


@every_collective
def test_over_no_axes_nothing_happens(name: str) -> None:
    x = integers((12, *SHAPE), 0, torch.float64)
    assert torch.equal(fmeg.on_mesh(lambda ctx, x: COLLECTIVES[name](ctx, x, ()), MESH)(x), x)
    alone = Mesh((), TP)
    assert torch.equal(fmeg.on_mesh(lambda ctx, x: COLLECTIVES[name](ctx, x, ()), alone)(x[:1]), x[:1])


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if not name.startswith("take_part")])
def test_outside_on_mesh_a_collective_refuses(name: str) -> None:
    x, rank = torch.zeros(SHAPE), torch.tensor(0)
    with pytest.raises(ValueError, match="this mesh is simulated: call the program through on_mesh"):
        COLLECTIVES[name](Context(MESH, rank), x, ("dp",))
    with pytest.raises(ValueError, match="this mesh is simulated: call the program through on_mesh"):
        torch.func.vmap(lambda x: COLLECTIVES[name](Context(MESH, rank), x, ("dp",)))(x)
    with pytest.raises(ValueError, match="a mesh of 12 ranks is mapped over 3: call the program through on_mesh"):
        torch.func.vmap(lambda rank: COLLECTIVES[name](Context(MESH, rank), x, ("dp",)))(torch.arange(3))


def test_a_part_of_what_does_not_divide_is_refused_with_the_sizes() -> None:
    with pytest.raises(ValueError, match=r"dimension 0 of \(5,\) is not divisible over 6 ranks of \('dp', 'tp_rep'\)"):
        fmeg.on_mesh(lambda ctx, x: take_part(x, 0, ("dp", "tp_rep"), ctx), MESH)(torch.zeros(12, 5))


LAYOUTS = [P("heads", None), P(None, "heads"), P(None, "mlp"), P("batch", "mlp"), P("mlp", "batch"), P(None, None)]


@pytest.mark.parametrize("dst", LAYOUTS, ids=repr)
@pytest.mark.parametrize("src", LAYOUTS, ids=repr)
def test_reshard_moves_between_any_two_layouts_and_its_backward_moves_back(src: P, dst: P) -> None:
    whole = integers((12, 24), 0, torch.float64)
    cotangent = integers((12, 24), 1, torch.float64)
    replicated = P(None, None)

    def run(ctx: Context, whole: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        x = reshard(whole, replicated, src, ctx)
        out, pullback = torch.func.vjp(lambda x: reshard(x, src, dst, ctx), x)
        # What is replicated has a pending sum for its cotangent: each rank holds a share.
        share = reshard(cotangent, replicated, dst, ctx) / ctx.mesh.size(ctx.mesh.unused_axes(dst))
        back = pullback(share)[0]
        back = collectives.all_reduce(back, ctx.mesh.unused_axes(src), ctx)
        return reshard(out, dst, replicated, ctx), reshard(back, src, replicated, ctx)

    out, back = fmeg.on_mesh(run, MESH, shared=(0, 1))(whole, cotangent)
    assert torch.equal(out, whole.expand(12, 12, 24))
    torch.testing.assert_close(back, cotangent.expand(12, 12, 24), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dst", [P(None, None), P("mlp", None), P(None, "mlp")], ids=repr)
def test_reshard_adds_up_a_pending_sum(dst: P) -> None:
    x = integers((12, 12, 24), 0, torch.float64)

    def run(ctx: Context, x: Tensor) -> Tensor:
        return reshard(reshard(x, P(None, None, unreduced="mlp"), dst, ctx), dst, P(None, None), ctx)

    want = x.unflatten(0, (2, 6)).sum(1, keepdim=True).expand(2, 6, 12, 24).flatten(0, 1)
    assert torch.equal(fmeg.on_mesh(run, MESH)(x), want)

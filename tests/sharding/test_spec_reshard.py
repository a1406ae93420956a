"""Layouts and `reshard` on a single device: what is equal, what is refused, and that nothing is computed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import small_config
from hypothesis import given, settings
from hypothesis import strategies as st

import fmeg
from fmeg.layers.attention import RESIDUAL
from fmeg.sharding.reshard import reshard
from fmeg.sharding.spec import LOGICAL_AXES, P

AXES = sorted(LOGICAL_AXES)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    names = draw(st.permutations(AXES))
    rank, pending = draw(st.integers(0, 4)), draw(st.integers(0, 2))
    blank = draw(st.lists(st.booleans(), min_size=rank, max_size=rank))
    axes = tuple(None if hide else name for name, hide in zip(names, blank, strict=False))
    return axes, tuple(names[rank : rank + pending])


@given(layouts(), layouts())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_layouts_are_equal_where_axes_and_pending_sums_are(a: tuple, b: tuple) -> None:
    p, q = P(*a[0], unreduced=a[1]), P(*b[0], unreduced=b[1])
    assert p == P(*a[0], unreduced=list(a[1])) and hash(p) == hash(P(*a[0], unreduced=a[1]))
    assert (p == q) is (a == b) is not (p != q)
    assert eval(repr(p), {"P": P}) == p


def test_a_layout_is_not_a_bare_tuple_and_a_pending_sum_counts() -> None:
    assert P("batch", "seq") != ("batch", "seq")
    assert tuple(P("batch", "seq")) != P("batch", "seq")
    assert P("batch", "seq") != P("batch", "seq", unreduced="mlp")
    assert P("batch", unreduced="mlp") == P("batch", unreduced=("mlp",))
    assert len({P("batch"), P("batch"), P("batch", unreduced="mlp"), P("seq")}) == 3


def test_repr_is_what_one_would_type() -> None:
    assert repr(P()) == "P()"
    assert repr(P("batch", None)) == "P('batch', None)"
    assert repr(P("batch", unreduced="mlp")) == "P('batch', unreduced='mlp')"
    assert repr(P(unreduced=("mlp", "heads"))) == "P(unreduced=('mlp', 'heads'))"


def test_unknown_axes_are_refused_with_the_known_ones() -> None:
    names = "batch, seq, residual_seq, embed, heads, kv_heads, head_dim, mlp, vocab, positions, layers or None"
    message = re.escape(f"unknown logical axis 'time' in P('batch', 'time'): use {names}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        P("batch", "time")
    with pytest.raises(ValueError, match=r"unknown logical axis 'tp' in P\('batch', unreduced='tp'\)"):
        P("batch", unreduced="tp")


def test_an_axis_is_used_once() -> None:
    message = r"^logical axis 'mlp' appears twice in P\('mlp', 'mlp'\): a layout uses each axis once$"
    with pytest.raises(ValueError, match=message):
        P("mlp", "mlp")
    with pytest.raises(ValueError, match=r"'mlp' appears twice in P\('batch', 'mlp', unreduced='mlp'\)"):
        P("batch", "mlp", unreduced="mlp")
    assert P(None, None) == P(None, None)


def test_reshard_on_one_device_is_nothing_at_all() -> None:
    x = torch.zeros(2, 3, 4)
    for src, dst in [
        (RESIDUAL, P("batch", "seq", "embed")),
        (P("batch", "seq", "embed", unreduced=("mlp", "heads")), P("batch", None, "embed", unreduced="mlp")),
        (P(None, None, None), P("vocab", "mlp", "heads")),
    ]:
        assert reshard(x, src, dst, None) is x


def test_a_layout_of_another_rank_is_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^reshard: src P\('batch'\) names 1 dimensions, the array has 2: \(2, 3\)$"):
        reshard(x, P("batch"), P("batch", "seq"), None)
    with pytest.raises(ValueError, match=r"^reshard: dst P\('batch', 'seq', 'embed'\) names 3 dimensions, the"):
        reshard(x, P("batch", "seq"), P("batch", "seq", "embed"), None)


def test_a_new_pending_sum_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^reshard: dst P\('batch', unreduced=\('mlp', 'heads'\)\) leaves \['heads'\] unreduced, "
        r"but src P\('batch', unreduced='mlp'\) has no such pending sum$",
    ):
        reshard(torch.zeros(2), P("batch", unreduced="mlp"), P("batch", unreduced=("mlp", "heads")), None)


def test_what_is_not_a_mesh_is_refused_everywhere() -> None:
    message = r"^mesh is 'tp=2': must be a Mesh, by make_mesh\(cfg\) or simulated_mesh\(cfg\), or None$"
    cfg = fmeg.TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    params: Any = fmeg.init_params(cfg)
    mesh: Any = "tp=2"
    calls = [
        lambda: fmeg.init_params(cfg, mesh=mesh),
        lambda: fmeg.gpt_forward(params, torch.tensor([[1]]), cfg, mesh=mesh),
        lambda: fmeg.shard_params(params, cfg, mesh),
        lambda: fmeg.unshard_params(params, cfg, mesh),
        lambda: fmeg.make_grad_step(cfg, mesh=mesh),
        lambda: fmeg.make_train_step(cfg, fmeg.sgd(0.1), mesh=mesh),
        lambda: fmeg.init_state(cfg, fmeg.sgd(0.1), mesh=mesh),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()


def test_a_mesh_of_another_config_and_a_missing_one_are_refused() -> None:
    cfg = small_config()
    tp = cfg.replace(tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"^tensor_model_parallel_size is 2 but mesh is None: start a multiple of 2 processes"):
        fmeg.init_params(tp)
    for other in (cfg, cfg.replace(tensor_model_parallel_size=4), tp.replace(sequence_parallel=True)):
        with pytest.raises(ValueError, match="is not the config's: use make_mesh"):
            fmeg.init_params(tp, mesh=fmeg.simulated_mesh(other))

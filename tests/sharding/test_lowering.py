"""Which collectives a layer runs under each table of rules, and which layouts a mesh refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import random_batch, small_config

import fmeg
from fmeg.sharding import collectives
from fmeg.sharding.mesh import Mesh
from fmeg.sharding.spec import TP, TP_SP, P

KINDS = {"_AllReduce": "all_reduce", "_AllGather": "all_gather", "_ReduceScatter": "reduce_scatter", "_AllToAll": "all_to_all"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each collective has communicated so far."""
    counted: Counter[str] = Counter()

    def count(name: str) -> None:
        real = getattr(collectives, name).simulated.__func__

        def simulated(cls: type, *args: Any) -> torch.Tensor:
            counted[KINDS.get(cls.__name__, cls.__name__)] += 1
            return real(cls, *args)

        monkeypatch.setattr(getattr(collectives, name), "simulated", classmethod(simulated))

    for name in (*KINDS, "_AllReduceMax"):
        count(name)
    return counted


def per_layer(calls: Counter[str], tp: int, dp: int, sp: bool, **changes: Any) -> tuple[dict[str, int], dict[str, int]]:
    """What one more layer adds, forward and backward. (Reductions of gradients are one for each stack of layers.)"""

    def count(layers: int, gradient: bool) -> Counter[str]:
        cfg = small_config(num_layers=layers, tensor_model_parallel_size=tp, sequence_parallel=sp, **changes)
        mesh = fmeg.simulated_mesh(cfg, data_parallel_size=dp) if tp * dp > 1 else None
        params, batch = fmeg.init_params(cfg, mesh=mesh), random_batch(cfg)
        calls.clear()
        if gradient:
            fmeg.make_grad_step(cfg, mesh=mesh, compile=False)(params, batch)
        else:
            fmeg.gpt_forward(params, batch["tokens"], cfg, mesh=mesh)
        return Counter(calls)

    def more(gradient: bool) -> Counter[str]:
        a, b = count(3, gradient), count(2, gradient)
        assert a >= b
        return a - b

    forward, both = more(False), more(True)
    return dict(forward), dict(both - forward)


TWO_SUMS = {"all_reduce": 2}
TWO_PAIRS = {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize(
    "changes",
    [{}, {"add_bias_linear": True, "qk_layernorm": True, "normalization": "LayerNorm"}, {"gated_linear_unit": False}],
    ids=["gated", "biases and norms", "plain"],
)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tp", [2, 4])
class TestALayer:
    """tp 4 repeats each of the two key/value heads on two ranks, which costs nothing."""

    def test_tensor_parallel_sums_twice_forward_and_twice_backward(
        self, calls: Counter[str], tp: int, dp: int, changes: dict[str, Any]
    ) -> None:
        assert per_layer(calls, tp, dp, False, **changes) == (TWO_SUMS, TWO_SUMS)

    def test_sequence_parallel_gathers_and_scatters_instead(
        self, calls: Counter[str], tp: int, dp: int, changes: dict[str, Any]
    ) -> None:
        assert per_layer(calls, tp, dp, True, **changes) == (TWO_PAIRS, TWO_PAIRS)


@pytest.mark.parametrize(("dp", "sp"), [(1, False), (2, False), (2, True)])
def test_without_tensor_parallelism_a_layer_does_not_communicate(calls: Counter[str], dp: int, sp: bool) -> None:
    assert per_layer(calls, 1, dp, sp) == ({}, {})


def test_on_one_device_nothing_communicates(calls: Counter[str]) -> None:
    cfg = small_config()
    fmeg.make_grad_step(cfg, compile=False)(fmeg.init_params(cfg), random_batch(cfg))
    assert not calls


def test_the_loss_sums_once_and_takes_one_maximum_forward_and_nothing_backward(calls: Counter[str]) -> None:
    cfg = small_config(tensor_model_parallel_size=2)
    mesh = fmeg.simulated_mesh(cfg)
    fmeg.make_grad_step(cfg, mesh=mesh, compile=False)(fmeg.init_params(cfg, mesh=mesh), random_batch(cfg))
    assert (calls["_AllReduceOfEquals"], calls["_AllReduceMax"]) == (1, 1)


def test_a_layout_maps_logical_axes_to_mesh_axes_major_to_minor() -> None:
    mesh = Mesh((("dp", 2), ("tp_kv", 2), ("tp_rep", 3)), TP_SP)
    wanted = {
        "batch": ("dp",),
        "residual_seq": ("tp_kv", "tp_rep"),
        "heads": ("tp_kv", "tp_rep"),
        "kv_heads": ("tp_kv",),
        "mlp": ("tp_kv", "tp_rep"),
        "vocab": ("tp_kv", "tp_rep"),
        "seq": (),
        "embed": (),
        "head_dim": (),
        "layers": (),
        "positions": (),
        None: (),
    }
    assert {axis: mesh.axes_of(axis) for axis in wanted} == wanted
    assert Mesh(mesh.axes, TP).axes_of("residual_seq") == ()
    assert mesh.unused_axes(P("layers", "embed", "kv_heads", "head_dim")) == ("dp", "tp_rep")
    assert mesh.unused_axes(P("batch", "residual_seq")) == ()
    assert mesh.local_shape((4, 36, 5), P("batch", "heads", "embed")) == (2, 6, 5)


def test_a_layout_that_uses_a_mesh_axis_twice_is_refused() -> None:
    mesh = Mesh((("tp_kv", 2), ("tp_rep", 2)), TP)
    message = r"^P\('heads', 'mlp'\) uses a mesh axis twice, \['tp_kv', 'tp_kv', 'tp_rep', 'tp_rep'\]: shard one of"
    with pytest.raises(ValueError, match=message):
        mesh.local_shape((4, 4), P("heads", "mlp"))
    with pytest.raises(ValueError, match=r"uses a mesh axis twice, \['tp_kv', 'tp_kv', 'tp_rep'\]"):
        mesh.local_shape((4, 4), P("heads", "kv_heads"))


def test_a_dimension_that_does_not_divide_is_refused_with_the_sizes() -> None:
    with pytest.raises(ValueError, match=r"^mlp of size 6 is not divisible over 4 ranks: use a multiple of 4$"):
        Mesh((("tp", 4),), TP).local_shape((8, 6), P("embed", "mlp"))


def test_an_unknown_logical_axis_is_refused_in_a_layout_that_a_mesh_would_map() -> None:
    with pytest.raises(ValueError, match=r"unknown logical axis 'tp' in P\('tp'\): use batch, seq"):
        Mesh((("tp", 4),), TP).local_shape((8,), P("tp"))

"""Matrix products by every kernel are the same numbers, everywhere, and the choice among them is a measurement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_trees_close, random_batch, small_config
from torch import Tensor

import fmeg
from fmeg.backends import matmul
from fmeg.backends.matmul import KERNELS, choose_kernels

OTHERS = [("onednn", torch.float32), ("fp32", torch.bfloat16)]
WITHIN = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the largest element; in bf16 the last bit, which the order of a sum decides."""


@pytest.mark.parametrize(("name", "dtype"), OTHERS)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [(64, 96, 160), (7, 33, 5), (1, 1, 1)])
def test_a_kernel_gives_torchs_product_and_gradients(
    name: str, dtype: torch.dtype, transposed: tuple[bool, bool], sizes: tuple[int, int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, inner, columns = sizes
    shapes = [(rows, inner), (inner, columns)]
    arrays = [
        (torch.randn(shape[::-1], generator=generator).t() if t else torch.randn(shape, generator=generator)).to(dtype)
        for shape, t in zip(shapes, transposed, strict=True)
    ]

    def results(kernel: str) -> tuple[Tensor, ...]:
        out, vjp = torch.func.vjp(KERNELS[kernel].product, *arrays)
        return out, *vjp(torch.ones_like(out))

    for have, want in zip(results(name), results("torch"), strict=True):
        assert have.dtype == want.dtype and have.shape == want.shape
        assert (have - want).abs().max() <= WITHIN[dtype] * want.abs().max()


def test_a_product_that_loses_its_gradient_would_be_seen() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    _, vjp = torch.func.vjp(KERNELS["onednn"].product, a, b)
    grad_a, grad_b = vjp(torch.ones(4, 3))
    torch.testing.assert_close(grad_a, torch.ones(4, 3) @ b.t())
    torch.testing.assert_close(grad_b, a.t() @ torch.ones(4, 3))


def gradients(cfg: fmeg.TransformerConfig, mesh: fmeg.Mesh | None, *, compile: bool) -> Any:
    params = fmeg.shard_params(fmeg.init_params(cfg.on_one_device()), cfg, mesh)
    grads, metrics = fmeg.make_grad_step(cfg, mesh=mesh, compile=compile)(params, random_batch(cfg))
    return fmeg.unshard_params(grads, cfg, mesh), metrics


@pytest.mark.parametrize(("name", "dtype"), OTHERS)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_has_the_same_gradients_by_every_kernel(name: str, dtype: torch.dtype, sharded: bool) -> None:
    cfg = small_config(bf16=dtype == torch.bfloat16, tensor_model_parallel_size=2 if sharded else 1)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2) if sharded else None
    have, want = (gradients(cfg.replace(matmul_kernel=kernel), mesh, compile=False) for kernel in (name, "torch"))
    assert_trees_close(have, want, rtol={torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype])


@pytest.mark.parametrize(("name", "dtype"), OTHERS)
def test_compiled_too(name: str, dtype: torch.dtype) -> None:
    cfg = small_config(bf16=dtype == torch.bfloat16, num_layers=1, matmul_kernel=name)
    have, want = (gradients(cfg, None, compile=compile) for compile in (True, False))
    assert_trees_close(have, want, rtol={torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype])


@pytest.mark.parametrize(
    ("name", "target", "count"),
    [("torch", "aten.mm.default", 3 * (7 * 2 + 1)), ("onednn", "fmeg.onednn_matmul.default", 3 * (7 * 2 + 1))],
)
def test_the_graph_holds_the_named_kernel_for_every_product(name: str, target: str, count: int) -> None:
    """Seven matrices in each of two layers and the output projection: a product forward and two backward."""
    cfg = small_config(matmul_kernel=name)
    step = fmeg.make_grad_step(cfg)
    traced, _ = step.trace(fmeg.init_params(cfg), random_batch(cfg))
    products = [str(node.target) for node in traced.graph.graph.nodes if node.op == "call_function"]
    assert products.count(target) == count
    assert sum(p in ("aten.mm.default", "fmeg.onednn_matmul.default") for p in products) == count


def test_bf16_by_way_of_fp32_multiplies_and_attends_in_fp32_alone() -> None:
    cfg = small_config(bf16=True, matmul_kernel="fp32")
    traced, _ = fmeg.make_grad_step(cfg).trace(fmeg.init_params(cfg), random_batch(cfg))
    for node in traced.graph.graph.nodes:
        if "aten.mm" in str(node.target) or "flash_attention" in str(node.target):
            assert all(arg.meta["val"].dtype != torch.bfloat16 for arg in node.args if isinstance(arg, torch.fx.Node)), node


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the seconds that each kernel is measured to take."""

    def set_seconds(**seconds: float) -> list[str]:
        asked: list[str] = []

        def measured(name: str, dtype: torch.dtype, threads: int) -> float:
            asked.append(name)
            return seconds[name]

        monkeypatch.setattr(matmul, "_seconds", measured)
        return asked

    return set_seconds


@pytest.mark.parametrize(("onednn", "choice"), [(0.5, "onednn"), (0.95, "torch"), (2.0, "torch")])
def test_the_fastest_is_chosen_if_it_is_worth_it(timed: Any, onednn: float, choice: str) -> None:
    asked = timed(torch=1.0, onednn=onednn)
    cfg = small_config()
    for mesh in (None, fmeg.simulated_mesh(cfg, data_parallel_size=2)):
        assert choose_kernels(cfg, mesh) == cfg.replace(matmul_kernel=choice)
        assert fmeg.explain(cfg, mesh).matmul_kernel == choice
    assert set(asked) == {"torch", "onednn"}


def test_only_what_is_left_open_is_measured(timed: Any) -> None:
    asked = timed()
    for cfg in (small_config(matmul_kernel="onednn"), small_config(matmul_kernel="torch")):
        assert choose_kernels(cfg) == cfg
    assert choose_kernels(small_config(params_dtype=torch.float64)).matmul_kernel == "torch"
    assert asked == []


def test_the_measurement_is_a_time_and_is_taken_once() -> None:
    first = matmul._seconds("torch", torch.float32, 1)
    assert 0 < first < 1 and matmul._seconds("torch", torch.float32, 1) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"matmul_kernel": "onednn", "bf16": True},
            "^matmul_kernel 'onednn' is for torch.float32, but the model computes in torch.bf",
        ),
        (
            {"matmul_kernel": "fp32"},
            "^matmul_kernel 'fp32' is for torch.bfloat16, but the model computes in torch.float32: use",
        ),
        ({"matmul_kernel": "mkl"}, "matmul_kernel.*mkl.*auto"),
    ],
)
def test_a_kernel_for_another_dtype_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**changes)

"""Worked numbers on a mesh, what a mesh refuses, and a graph that is compiled once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import RELATIVE, assert_trees_close, assert_trees_equal, random_batch, small_config
from torch import Tensor

import fmeg
from fmeg import tree
from fmeg.layers.loss import cross_entropy
from fmeg.params import ONES, ZEROS, ParamSpec
from fmeg.sharding.mesh import Context, Mesh
from fmeg.sharding.spec import TP, TP_SP


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cross_entropy_of_four_logits(tp: int) -> None:
    """Logits 0, 1, 2, 3 and label 3: softmax 0.0320586, 0.0871443, 0.2368828, 0.6439143, loss -ln of the last."""
    cfg = small_config(vocab_size=4, make_vocab_size_divisible_by=1, tensor_model_parallel_size=tp)
    mesh = fmeg.simulated_mesh(cfg)
    logits = torch.arange(4.0, dtype=torch.float64).view(tp, 1, 1, 4 // tp)

    def run(ctx: Context | None, logits_BTV: Tensor) -> tuple[Tensor, Tensor]:
        gradient, loss = torch.func.grad_and_value(lambda x: cross_entropy(x, torch.tensor([[3]]), cfg, ctx).loss_BT.sum())(
            logits_BTV
        )
        return loss, gradient

    loss, gradient = fmeg.on_mesh(run, mesh)(logits)
    assert loss.sum().item() == pytest.approx(0.4401897, abs=1e-7)
    wanted = [0.0320586, 0.0871443, 0.2368828, -0.3560857]
    assert gradient.flatten().tolist() == pytest.approx(wanted, abs=1e-7)


def token_losses(params: Any, batch: Any, cfg: Any, ctx: Any, *, key: Any = None) -> Any:
    loss = ((batch["loss"] + batch["slope"] * (params["w"] - 1)) * batch["mask"]).sum()
    return loss, batch["mask"].sum(), {}


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_loss_is_a_sum_over_a_count_for_every_cut(dp: int, microbatches: int) -> None:
    """Token losses [4] and [1, 1, 1], in two rows and two rows without any: 1.75; gradients 6 and 3: 2.25."""
    cfg, specs = small_config(), {"w": ParamSpec((1,), fmeg.P("embed"), ONES)}
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=dp)
    nothing = [9.0, 9.0, 9.0]
    batch = {
        "loss": torch.tensor([[4.0, 9.0, 9.0], nothing, [1.0, 1.0, 1.0], nothing]),
        "slope": torch.tensor([[6.0, 9.0, 9.0], nothing, [1.0, 1.0, 1.0], nothing]),
        "mask": torch.tensor([[1.0, 0.0, 0.0], [0.0] * 3, [1.0] * 3, [0.0] * 3]),
    }
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 2, 0]):
        step = fmeg.make_grad_step(
            cfg,
            mesh=mesh,
            forward_step=token_losses,
            specs=specs,
            num_microbatches=microbatches,
            compile=False,
            check=None,
        )
        grads, metrics = step(fmeg.init_params(cfg, specs=specs, mesh=mesh), tree.map(lambda x: x[order], batch))  # noqa: B023
        assert (metrics["loss"].item(), metrics["num_tokens"].item()) == (1.75, 4.0)
        assert grads["w"].flatten().tolist() == [2.25] * dp


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mesh_of_one_rank_computes_what_no_mesh_does(microbatches: int, sp: bool) -> None:
    cfg = small_config(hidden_dropout=0.1, label_smoothing=0.1, z_loss_coeff=0.1, params_dtype=torch.float64)
    mesh, batch, opt = Mesh((), TP_SP if sp else TP), random_batch(cfg), fmeg.adamw(0.1)
    on_one = cfg.replace(sequence_parallel=sp)
    assert sp or mesh == fmeg.simulated_mesh(cfg)
    options: Any = {"compile": False, "key": fmeg.random.key(1), "num_microbatches": microbatches}
    first = lambda tree_: tree.map(lambda leaf: leaf[0], tree_)  # noqa: E731
    grads, metrics = fmeg.make_grad_step(on_one, mesh=mesh, **options)(fmeg.init_params(on_one, mesh=mesh), batch)
    want = fmeg.make_grad_step(cfg, **options)(fmeg.init_params(cfg), batch)
    assert_trees_equal((first(grads), metrics), want)
    state, metrics = fmeg.make_train_step(on_one, opt, mesh=mesh, **options)(fmeg.init_state(on_one, opt, mesh=mesh), batch)
    want_state, want_metrics = fmeg.make_train_step(cfg, opt, **options)(fmeg.init_state(cfg, opt), batch)
    assert_trees_close((first(state), metrics), (want_state, want_metrics), rtol=RELATIVE[torch.float64])


def test_global_norm_counts_every_element_of_the_whole_arrays_once() -> None:
    """3 and 4 on one rank each, 12 on both: 13; and clipping to 1 divides by it."""
    mesh = Mesh((("tp", 2),), TP)
    specs = {"a": ParamSpec((2,), fmeg.P("mlp"), ZEROS), "b": ParamSpec((1,), fmeg.P("embed"), ZEROS)}
    grads = {"a": torch.tensor([[3.0], [4.0]]), "b": torch.tensor([[12.0], [12.0]])}
    norm = fmeg.on_mesh(lambda ctx, grads: fmeg.global_norm(grads, specs, ctx), mesh)(grads)
    assert norm.tolist() == [13.0, 13.0]
    clip = fmeg.clip_by_global_norm(1.0, eps=0.0)
    clipped = fmeg.on_mesh(lambda ctx, grads: clip.update(grads, clip.init(grads), grads, specs, ctx)[0], mesh)(grads)
    assert_trees_close(clipped, tree.map(lambda g: g / 13, grads), rtol=1e-7)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_an_infinity_on_one_data_parallel_rank_makes_every_rank_skip(tp: int, sp: bool) -> None:
    cfg = small_config(tensor_model_parallel_size=tp, sequence_parallel=sp)
    mesh, opt = fmeg.simulated_mesh(cfg, data_parallel_size=2), fmeg.adamw(0.1)
    state, batch = fmeg.init_state(cfg, opt, mesh=mesh), random_batch(cfg)
    batch["loss_mask"][3, 5] = torch.inf
    new, metrics = fmeg.make_train_step(cfg, opt, mesh=mesh, compile=False)(state, batch)
    assert metrics["skipped"] == 1 and not math.isfinite(metrics["grad_norm"])
    assert new.step.tolist() == [1] * mesh.world_size
    assert_trees_equal((new.params, new.opt_state), (state.params, state.opt_state))


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work() -> None:
    message = (
        r"^num_attention_heads 6 is not divisible by tensor_model_parallel_size 4: "
        r"use tensor_model_parallel_size 1, 2, 3 or 6, or another num_attention_heads$"
    )
    with pytest.raises(ValueError, match=message):
        small_config(num_attention_heads=6, num_query_groups=6, hidden_size=48, tensor_model_parallel_size=4)


def test_the_sizes_that_a_refusal_names_do_work() -> None:
    for tp in (1, 2, 3, 6):
        small_config(num_attention_heads=6, num_query_groups=6, hidden_size=48, tensor_model_parallel_size=tp)
    with pytest.raises(ValueError, match="num_query_groups 3 neither divides nor is divided by tensor_model_parallel_size 4"):
        small_config(num_attention_heads=12, num_query_groups=3, hidden_size=48, tensor_model_parallel_size=4)
    with pytest.raises(ValueError, match="ffn_hidden_size 50 is not divisible by tensor_model_parallel_size 4"):
        small_config(ffn_hidden_size=50, tensor_model_parallel_size=4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_an_id_outside_the_vocabulary_is_refused_alike(tp: int, name: str) -> None:
    """96 is a row of the padded table, on the second of two ranks, but no id."""
    cfg = small_config(tensor_model_parallel_size=tp)
    mesh = fmeg.simulated_mesh(cfg)
    params, batch = fmeg.init_params(cfg, mesh=mesh), random_batch(cfg)
    batch[name][1, 1], batch["loss_mask"][1, 1] = 96, 1
    message = rf"^{name} hold id 96, outside the vocabulary: must be in \[0, 96\)$"
    with pytest.raises(ValueError, match=message):
        fmeg.make_grad_step(cfg, mesh=mesh, compile=False)(params, batch)
    if name == "tokens":
        with pytest.raises(ValueError, match=message):
            fmeg.gpt_forward(params, batch["tokens"], cfg, mesh=mesh)


def test_batches_that_do_not_divide_are_refused_with_the_sizes() -> None:
    cfg = small_config(tensor_model_parallel_size=4, sequence_parallel=True)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    params, step = fmeg.init_params(cfg, mesh=mesh), fmeg.make_grad_step(cfg, mesh=mesh, compile=False)
    message = "^sequence length 14 is not divisible by tensor_model_parallel_size 4, over which sequence_parallel shards it"
    with pytest.raises(ValueError, match=message):
        step(params, random_batch(cfg, length=14))
    with pytest.raises(ValueError, match=message):
        fmeg.gpt_forward(params, random_batch(cfg, length=14)["tokens"], cfg, mesh=mesh)
    with pytest.raises(ValueError, match=r"a microbatch of 3 sequences is not divisible over 2 data-parallel ranks: use"):
        step(params, random_batch(cfg, size=3))


def test_parameters_of_another_mesh_are_refused_by_name() -> None:
    cfg = small_config(tensor_model_parallel_size=2)
    mesh = fmeg.simulated_mesh(cfg)
    with pytest.raises(ValueError, match=r"shape of .*embedding/tokens \(128, 32\) instead of \(2, 128, 32\)"):
        fmeg.make_grad_step(cfg, mesh=mesh, compile=False)(fmeg.init_params(small_config()), random_batch(cfg))


@pytest.mark.parametrize("tied", [False, True])
def test_sharding_and_back_is_the_identity_and_padding_is_zero(tied: bool) -> None:
    alone = small_config(vocab_size=90, share_embeddings_and_output_weights=tied)
    cfg = alone.replace(tensor_model_parallel_size=4)
    mesh, params = fmeg.simulated_mesh(cfg, data_parallel_size=2), fmeg.init_params(alone)
    parts = fmeg.shard_params(params, cfg, mesh)
    assert_trees_equal(fmeg.unshard_params(parts, cfg, mesh), params)
    assert parts["embedding"]["tokens"].shape == (8, 128, 32)
    assert not parts["embedding"]["tokens"][1:4].any() and not parts["embedding"]["tokens"][0, 90:].any()


def test_a_compiled_step_on_a_mesh_equals_the_eager_one() -> None:
    cfg = small_config(
        num_layers=1,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        add_bias_linear=True,
        label_smoothing=0.1,
        z_loss_coeff=0.1,
    )
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=2)
    params, batch = fmeg.init_params(cfg, mesh=mesh), random_batch(cfg)
    grads, metrics = fmeg.make_grad_step(cfg, mesh=mesh, compile=True)(params, batch)
    want, want_metrics = fmeg.make_grad_step(cfg, mesh=mesh, compile=False)(params, batch)
    assert_trees_close(grads, want, rtol=RELATIVE[torch.float32])
    assert_trees_close(metrics, want_metrics, rtol=RELATIVE[torch.float32])

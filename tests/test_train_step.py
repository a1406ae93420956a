"""The train step: sums and counts, skipping, purity, compiled against eager, leaf by leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RELATIVE, assert_trees_close, assert_trees_equal, random_batch, small_config
from torch import Tensor
from torch._dynamo.utils import counters

import fmeg
from fmeg import random, tree
from fmeg.params import ONES, ParamSpec


def test_loss_is_a_sum_over_a_count_for_every_cut() -> None:
    """Token losses [4] and [1, 1, 1] in two rows: 1.75, never the 2.5 of a mean of means; gradients 6 and 3: 2.25."""
    cfg = small_config()
    specs = {"w": ParamSpec((1,), fmeg.P("embed"), ONES)}

    def forward_step(params: Any, batch: Any, cfg: Any, ctx: Any, *, key: Any = None) -> Any:
        loss = ((batch["loss"] + batch["slope"] * (params["w"] - 1)) * batch["mask"]).sum()
        return loss, batch["mask"].sum(), {}

    batch = {
        "loss": torch.tensor([[4.0, 9.0, 9.0], [1.0, 1.0, 1.0]]),
        "slope": torch.tensor([[6.0, 9.0, 9.0], [1.0, 1.0, 1.0]]),
        "mask": torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
    }
    for num_microbatches in (1, 2):
        step = fmeg.make_grad_step(
            cfg, forward_step=forward_step, specs=specs, num_microbatches=num_microbatches, compile=False, check=None
        )
        grads, metrics = step({"w": torch.ones(1)}, batch)
        assert (metrics["loss"].item(), metrics["num_tokens"].item(), grads["w"].item()) == (1.75, 4.0, 2.25)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_microbatches_do_not_change_the_gradients(dtype: torch.dtype, num_microbatches: int) -> None:
    """Also with dropout: a row's masks belong to its place in the global batch."""
    cfg = small_config(params_dtype=dtype, hidden_dropout=0.1, attention_dropout=0.1)
    params, batch, key = fmeg.init_params(cfg), random_batch(cfg), random.key(3)
    whole, want = fmeg.make_grad_step(cfg, compile=False, key=key)(params, batch)
    cut, have = fmeg.make_grad_step(cfg, compile=False, key=key, num_microbatches=num_microbatches)(params, batch)
    assert_trees_close(cut, whole, rtol=RELATIVE[dtype])
    assert_trees_close(have, want, rtol=RELATIVE[dtype])


def test_no_valid_token_gives_zeros() -> None:
    cfg = small_config()
    batch = random_batch(cfg) | {"loss_mask": torch.zeros(4, 16)}
    grads, metrics = fmeg.make_grad_step(cfg, compile=False)(fmeg.init_params(cfg), batch)
    assert metrics["loss"].item() == 0 == metrics["num_tokens"].item()
    assert all((g == 0).all() for g in tree.leaves(grads))


def test_labels_at_masked_positions_do_not_matter() -> None:
    cfg = small_config()
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    ignored = batch | {"labels": torch.where(batch["loss_mask"] > 0, batch["labels"], -100)}
    step = fmeg.make_grad_step(cfg, compile=False)
    assert_trees_equal(step(params, ignored)[0], step(params, batch)[0])


@pytest.mark.parametrize("bf16", [False, True])
def test_non_finite_gradients_change_nothing_but_the_step(bf16: bool) -> None:
    """An inf in one gradient: parameters, moments and schedule stay; the batch is consumed and the skip is counted."""
    cfg = small_config(bf16=bf16)
    opt = fmeg.adamw(fmeg.cosine_schedule(max_lr=1e-2, warmup_steps=2, decay_steps=10), clip_grad=1.0)

    def broken(params: Any, batch: Any, cfg: Any, ctx: Any, *, key: Any = None) -> Any:
        loss, count, metrics = fmeg.gpt_forward_step(params, {k: batch[k] for k in ("tokens", "labels")}, cfg, ctx)
        return loss + (params["final_norm"]["scale"] * batch["poison"].sum()).sum(), count, metrics

    step = fmeg.make_train_step(cfg, opt, forward_step=broken, compile=False)
    state, batch = fmeg.init_state(cfg, opt), random_batch(cfg)
    good, bad = batch | {"poison": torch.zeros(4)}, batch | {"poison": torch.tensor([0.0, torch.inf, 0.0, 0.0])}
    first, metrics = step(state, good)
    assert metrics["skipped"].item() == 0
    second, metrics = step(first, bad)
    assert metrics["skipped"].item() == 1
    assert second.step.item() == 2
    assert_trees_equal(second._replace(step=first.step), first)
    third, metrics = step(second, good)
    unharmed, expected = step(first, good)
    assert metrics["learning_rate"] == expected["learning_rate"]
    assert_trees_equal(third._replace(step=unharmed.step), unharmed)


def test_zero_gradient_decays_matrices_only() -> None:
    """Weight decay 0.1 at learning rate 0.1: matrices times 0.99, biases and norm weights, stacked or not, unchanged."""
    cfg = small_config(add_bias_linear=True, qk_layernorm=True, normalization="LayerNorm")
    opt = fmeg.adamw(0.1, weight_decay=0.1)

    def nothing(params: Any, batch: Any, cfg: Any, ctx: Any, *, key: Any = None) -> Any:
        return sum((0 * p).sum() for p in tree.leaves(params)), torch.tensor(1.0), {}

    state = fmeg.init_state(cfg, opt)
    ones = tree.map(torch.ones_like, state.params)
    after, _ = fmeg.make_train_step(cfg, opt, forward_step=nothing, compile=False)(
        state._replace(params=ones), random_batch(cfg)
    )
    for path, leaf in tree.flatten_with_path(after.params):
        decays = not path.endswith(("bias", "scale"))
        torch.testing.assert_close(leaf, torch.full_like(leaf, 0.99 if decays else 1.0), msg=path, rtol=1e-6, atol=0)


def compare_compiled(
    cfg: fmeg.TransformerConfig, num_microbatches: int = 1, key: Tensor | None = None, rtol: float = 2e-5
) -> None:
    """SGD steps, compiled against eager, leaf by leaf: Adam would hide a wrong scale."""
    opt = fmeg.sgd(fmeg.cosine_schedule(max_lr=0.5, min_lr=0.1, decay_steps=6), momentum=0.9, clip_grad=1.0)
    state, batch = fmeg.init_state(cfg, opt), random_batch(cfg)
    frozen = tree.map(torch.clone, state)
    eager = fmeg.make_train_step(cfg, opt, num_microbatches=num_microbatches, compile=False, key=key)
    compiled = fmeg.make_train_step(cfg, opt, num_microbatches=num_microbatches, key=key)
    donated = fmeg.make_train_step(cfg, opt, num_microbatches=num_microbatches, key=key, donate=True)
    a = b = state
    for i in range(6):
        before = counters["aot_autograd"]["total"]
        a, metrics_a = eager(a, batch)
        b, metrics_b = compiled(b, batch)
        if i:
            assert counters["aot_autograd"]["total"] == before, "a later step, or another learning rate, compiled again"
        assert_trees_close(metrics_b, metrics_a, rtol=rtol)
        assert_trees_close(b, a, rtol=rtol)
    assert_trees_equal(state, frozen)
    c = donated(tree.map(torch.clone, state), batch)[0]
    assert_trees_close(c, eager(state, batch)[0], rtol=rtol)


def test_compiled_equals_eager_and_compiles_once() -> None:
    compare_compiled(small_config())


@pytest.mark.slow
def test_compiled_equals_eager_with_every_option() -> None:
    cfg = small_config(
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
        activation="gelu",
        gated_linear_unit=False,
        add_bias_linear=True,
        qk_layernorm=True,
        window_size=(5, 0),
        window_attn_skip_freq=2,
        rotary_percent=0.5,
        rotary_interleaved=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        label_smoothing=0.1,
        z_loss_coeff=1e-3,
        share_embeddings_and_output_weights=True,
    )
    compare_compiled(cfg, key=random.key(5))


@pytest.mark.slow
def test_compiled_equals_eager_over_microbatches() -> None:
    compare_compiled(small_config(position_embedding_type="learned_absolute"), num_microbatches=2)


@pytest.mark.slow
def test_compiled_bf16_gradients_are_as_near_to_fp32_as_eager_ones() -> None:
    """Where the compiler keeps fp32 between fused operations the two round differently, so fp32 is the judge of both."""
    cfg = small_config()
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    exact, _ = fmeg.make_grad_step(cfg, compile=False)(params, batch)
    eager, compiled = (fmeg.make_grad_step(cfg.replace(bf16=True), compile=c)(params, batch)[0] for c in (False, True))
    for (path, want), a, b in zip(tree.flatten_with_path(exact), tree.leaves(eager), tree.leaves(compiled), strict=True):
        assert (b - want).norm() <= 1.25 * (a - want).norm() + 1e-3 * want.norm(), path


def test_bf16_keeps_everything_but_compute_in_fp32() -> None:
    """Parameters, gradients and moments are fp32; gradients are near the fp32 ones and not equal to them."""
    cfg = small_config()
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    want, _ = fmeg.make_grad_step(cfg, compile=False)(params, batch)
    have, metrics = fmeg.make_grad_step(cfg.replace(bf16=True), compile=False)(params, batch)
    assert {leaf.dtype for leaf in tree.leaves((have, metrics))} == {torch.float32}
    for (path, a), (_, b) in zip(tree.flatten_with_path(have), tree.flatten_with_path(want), strict=True):
        error = (a - b).norm() / b.norm()
        assert 0 < error < 5e-2, f"{path}: {error}"


def test_parameters_are_cast_once_per_step() -> None:
    """In the traced bf16 step each parameter that computes in bf16 is cast by one operation, however often it is used."""
    cfg = small_config(bf16=True, share_embeddings_and_output_weights=True)
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    specs = fmeg.gpt_specs(cfg)

    def forward(params: Any, batch: Any) -> Tensor:
        return fmeg.gpt_forward_step(params, batch, cfg, None)[0]

    graph = fmeg.jit(forward).trace(params, batch).graph.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"][: len(tree.leaves(params))]
    for node, spec in zip(inputs, tree.leaves(specs), strict=True):
        casts = [user for user in node.users if user.target == torch.ops.aten._to_copy.default]
        assert len(casts) == (0 if spec.full_precision else 1), node.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.full((4, 16), 96)}, r"tokens hold id 96, outside the vocabulary: must be in \[0, 96\)"),
        ({"tokens": torch.full((4, 16), -1)}, "tokens hold id -1"),
        ({"labels": torch.full((4, 16), 100), "loss_mask": torch.ones(4, 16)}, "labels hold id 100"),
        ({"tokens": torch.zeros(4, 16)}, "tokens have dtype torch.float32: must be torch.int64 or torch.int32"),
        ({"tokens": torch.zeros(64, dtype=torch.int64)}, r"tokens have shape \(64,\): must be \[batch, sequence\]"),
        (
            {"labels": torch.zeros((4, 15), dtype=torch.int64)},
            r"labels have shape \(4, 15\): must be that of tokens",
        ),
        ({"loss_mask": torch.zeros(4)}, "loss_mask have shape"),
    ],
)
@pytest.mark.parametrize("compile", [False, True])
def test_bad_batches_are_refused_alike(change: dict[str, Tensor], message: str, compile: bool) -> None:
    """Before anything is compiled."""
    cfg = small_config()
    step = fmeg.make_grad_step(cfg, compile=compile)
    with pytest.raises((ValueError, TypeError), match=message):
        step(fmeg.init_params(cfg), random_batch(cfg) | change)


def test_long_sequences_uneven_batches_and_wrong_parameters_are_refused() -> None:
    cfg = small_config()
    params = fmeg.init_params(cfg)
    with pytest.raises(ValueError, match="sequence length 33 is above max_position_embeddings 32"):
        fmeg.make_grad_step(cfg, compile=False)(params, random_batch(cfg, length=33))
    with pytest.raises(ValueError, match="a batch of 4 sequences cannot be cut into num_microbatches 3"):
        fmeg.make_grad_step(cfg, compile=False, num_microbatches=3)(params, random_batch(cfg))
    with pytest.raises(ValueError, match=r"different numbers of sequences: .*'extra': 3"):
        fmeg.make_grad_step(cfg, compile=False)(params, random_batch(cfg) | {"extra": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"batch has the keys \['attention_mask', 'labels', 'loss_mask', 'tokens'\]: must be"):
        fmeg.make_grad_step(cfg, compile=False)(params, random_batch(cfg) | {"attention_mask": torch.ones(4, 16)})
    with pytest.raises(ValueError, match="but no tokens: give tokens, or check=None"):
        fmeg.make_grad_step(cfg, compile=False)(params, {"pixels": torch.ones(4, 16)})
    with pytest.raises(ValueError, match="shape of layers/dense/mlp/down/weight"):
        fmeg.make_grad_step(cfg.replace(ffn_hidden_size=64), compile=False)(params, random_batch(cfg))
    with pytest.raises(ValueError, match="missing output/weight, unexpected none"):
        fmeg.make_grad_step(cfg, compile=False)({k: v for k, v in params.items() if k != "output"}, random_batch(cfg))
    with pytest.raises(TypeError, match=r"^mesh is 'tp=2': must be a Mesh"):
        fmeg.make_grad_step(cfg, mesh="tp=2")  # type: ignore[arg-type]

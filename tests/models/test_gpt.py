"""The whole model: per-sample gradients, second derivatives, purity, causality, number formats, refusals, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import RELATIVE, assert_trees_close, assert_trees_equal, random_batch, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmeg
from fmeg import random, tree
from fmeg.autodiff import value_and_grad
from fmeg.models.sample import sample

FP64 = torch.float64
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu",
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": True,
    },
    "windows": {
        "num_layers": 4,
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
        "qk_layernorm": True,
        "rotary_percent": 0.5,
        "label_smoothing": 0.1,
        "z_loss_coeff": 0.01,
    },
}
models = pytest.mark.parametrize("name", MODELS)


def key_biases_with_query_biases(grads: Any) -> Any:
    """Derivatives in which each key bias is judged by the size of its query bias.

    Without a rotation a key bias adds the same number to all of a row's scores: its derivatives are rounding around zero.
    """

    def join(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        node = {name: join(child) for name, child in node.items()}
        if "key" in node and "bias" in node["key"]:
            both = torch.cat((node["query"]["bias"].flatten(), node["key"]["bias"].flatten()))
            node["key"] = node["key"] | {"bias": both}
        return node

    return join(grads)


def assert_derivatives_close(have: Any, want: Any, *, rtol: float) -> None:
    assert_trees_close(key_biases_with_query_biases(have), key_biases_with_query_biases(want), rtol=rtol)


def loss_sum(params: Any, batch: dict[str, Tensor], cfg: fmeg.TransformerConfig, key: Tensor | None = None) -> Tensor:
    return fmeg.gpt_forward_step(params, batch, cfg, None, key=key)[0]


@models
@pytest.mark.parametrize("drop", [False, True])
def test_per_sample_gradients_sum_to_the_batchs(name: str, drop: bool) -> None:
    """vmap(grad) over single sequences, on the fused kernel; with dropout too, since a row's mask is its own."""
    rate = 0.2 if drop else 0.0
    cfg = small_config(params_dtype=FP64, hidden_dropout=rate, attention_dropout=rate, **MODELS[name])
    params, key = fmeg.init_params(cfg), random.key(1) if drop else None
    batch = random_batch(cfg) | {"rows": torch.tensor([3, 0, 8, 1])}

    def one(params: Any, example: dict[str, Tensor]) -> Tensor:
        return loss_sum(params, tree.map(lambda x: x[None], example), cfg, key)

    each = torch.func.vmap(torch.func.grad(one), (None, 0))(params, batch)
    whole = torch.func.grad(loss_sum)(params, batch, cfg, key)
    assert_derivatives_close(tree.map(lambda g: g.sum(0), each), whole, rtol=RELATIVE[FP64])
    for i in range(4):
        alone = torch.func.grad(loss_sum)(params, tree.map(lambda x, i=i: x[i : i + 1], batch), cfg, key)
        assert_derivatives_close(tree.map(lambda g, i=i: g[i], each), alone, rtol=RELATIVE[FP64])


@models
def test_hessian_vector_products_equal_differences_of_gradients(name: str) -> None:
    cfg = small_config(params_dtype=FP64, attention_backend="unfused", init_method_std=0.2, **MODELS[name])
    params, batch = fmeg.init_params(cfg), random_batch(cfg, size=2, length=6)
    gen, h = torch.Generator().manual_seed(0), 2e-4
    direction = tree.map(lambda p: 0.2 * torch.randn(p.shape, generator=gen, dtype=FP64), params)

    def gradient(params: Any) -> Any:
        return torch.func.grad(loss_sum)(params, batch, cfg)

    _, have = torch.func.jvp(gradient, (params,), (direction,))

    def difference(h: float) -> Any:
        ahead, behind = (gradient(tree.map(lambda p, d, s=s: p + s * h * d, params, direction)) for s in (1, -1))
        return tree.map(lambda a, b: (a - b) / (2 * h), ahead, behind)

    # Central differences of three steps, extrapolated: the error left is h^6 times the seventh derivative.
    want = tree.map(lambda a, b, c: (64 * a - 20 * b + c) / 45, difference(h), difference(2 * h), difference(4 * h))
    assert_derivatives_close(have, want, rtol=RELATIVE[FP64])


def test_reverse_over_reverse_equals_forward_over_reverse() -> None:
    cfg = small_config(params_dtype=FP64, attention_backend="unfused")
    params, batch = fmeg.init_params(cfg), random_batch(cfg, size=2, length=6)
    gradient = torch.func.grad(lambda p: loss_sum(p, batch, cfg))
    _, forward = torch.func.jvp(gradient, (params,), (params,))
    _, pullback = torch.func.vjp(gradient, params)
    assert_trees_close(pullback(params)[0], forward, rtol=RELATIVE[FP64])


def test_second_derivatives_of_the_fused_model_are_refused_with_the_remedy() -> None:
    cfg = small_config()
    params, batch = fmeg.init_params(cfg), random_batch(cfg, size=1, length=4)
    with pytest.raises(ValueError, match="use attention_backend='unfused'"):
        torch.func.jvp(torch.func.grad(lambda p: loss_sum(p, batch, cfg)), (params,), (params,))


@models
@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_the_gradient_is_the_slope_in_every_leaf(name: str, backend: str) -> None:
    """A central difference along a random direction of each leaf alone."""
    cfg = small_config(params_dtype=FP64, attention_backend=backend, **MODELS[name])
    params, batch = fmeg.init_params(cfg), random_batch(cfg, size=2, length=8)
    flat, treedef = tree.flatten(params)
    _, gradient = value_and_grad(lambda p: loss_sum(p, batch, cfg))(params)
    gen, h = torch.Generator().manual_seed(0), 1e-5
    for i, (path, g) in enumerate(tree.flatten_with_path(gradient)):
        direction = torch.randn(g.shape, generator=gen, dtype=FP64)
        ends = [
            loss_sum(tree.unflatten(treedef, [*flat[:i], flat[i] + step * direction, *flat[i + 1 :]]), batch, cfg)
            for step in (h, -h)
        ]
        slope = ((ends[0] - ends[1]) / (2 * h)).item()
        # Rounding of a loss near 60 is 1e-14, over 2h; key biases have no slope at all.
        assert (g * direction).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-7), path


@models
def test_logits_do_not_depend_on_later_tokens(name: str) -> None:
    cfg = small_config(**MODELS[name])
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    whole = fmeg.gpt_forward(params, tokens, cfg)
    for t in (1, 7, 15):
        changed = tokens.clone()
        changed[:, t:] = (tokens[:, t:] + 1) % cfg.vocab_size
        other = fmeg.gpt_forward(params, changed, cfg)
        assert torch.equal(other[:, :t], whole[:, :t])
        assert (other[:, t] != whole[:, t]).any(-1).all()
        torch.testing.assert_close(fmeg.gpt_forward(params, tokens[:, :t], cfg), whole[:, :t], rtol=0, atol=1e-6)


def test_sequences_do_not_see_each_other() -> None:
    cfg = small_config(params_dtype=FP64)
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    alone = torch.cat([fmeg.gpt_forward(params, row[None], cfg) for row in tokens])
    assert_trees_close(fmeg.gpt_forward(params, tokens, cfg), alone, rtol=RELATIVE[FP64])


CALLS: dict[str, Callable[[fmeg.TransformerConfig, Any, dict[str, Tensor], Tensor], Any]] = {
    "init_params": lambda cfg, params, batch, key: fmeg.init_params(cfg, seed=1),
    "gpt_forward": lambda cfg, params, batch, key: fmeg.gpt_forward(params, batch["tokens"], cfg),
    "gpt_forward_step": lambda cfg, params, batch, key: fmeg.gpt_forward_step(params, batch, cfg, None, key=key),
    "grad": lambda cfg, params, batch, key: torch.func.grad(loss_sum)(params, batch, cfg, key),
    "make_grad_step": lambda cfg, params, batch, key: fmeg.make_grad_step(cfg, compile=False, key=key, num_microbatches=2)(
        params, batch
    ),
    "sample": lambda cfg, params, batch, key: sample(params, batch["tokens"][0], cfg, num_tokens=2, temperature=1.0, key=key),
}


@models
@pytest.mark.parametrize("call", CALLS)
def test_functions_are_pure(call: str, name: str) -> None:
    """The same result twice, whatever torch's generator does; it, the parameters and the batch stay as they were."""
    cfg = small_config(hidden_dropout=0.1, attention_dropout=0.1, **MODELS[name])
    args = (fmeg.init_params(cfg), random_batch(cfg) | {"rows": torch.arange(4)}, random.key(2))
    kept = tree.map(torch.clone, args)
    state = torch.random.get_rng_state()
    first = CALLS[call](cfg, *args)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_trees_equal(args, kept)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        again = CALLS[call](cfg, *args)
    assert_trees_equal(again, first)
    assert_trees_equal(args, kept)
    ours = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(args)}
    assert ours.isdisjoint({leaf.untyped_storage().data_ptr() for leaf in tree.leaves(first)}), "a result shares memory"


def test_a_key_turns_dropout_on_and_decides_it() -> None:
    cfg = small_config(hidden_dropout=0.1)
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    none, one, same, two = (loss_sum(params, batch, cfg, k) for k in (None, random.key(1), random.key(1), random.key(2)))
    assert one == same
    assert len({none.item(), one.item(), two.item()}) == 3
    assert loss_sum(params, batch, small_config(), random.key(1)) == none
    assert loss_sum(params, batch | {"rows": torch.tensor([4, 5, 6, 7])}, cfg, random.key(1)) != one


def test_a_tied_gradient_is_the_sum_of_both_uses() -> None:
    """An untied model with equal matrices gives the same loss, and its two gradients add up to the tied one."""
    untied = small_config(params_dtype=FP64)
    tied = untied.replace(share_embeddings_and_output_weights=True)
    params, batch = fmeg.init_params(tied), random_batch(tied)
    assert "output" not in params
    both = params | {"output": {"weight": params["embedding"]["tokens"]}}
    loss, want = value_and_grad(loss_sum)(both, batch, untied)
    tied_loss, have = value_and_grad(loss_sum)(params, batch, tied)
    assert tied_loss == loss
    total = want["embedding"]["tokens"] + want["output"]["weight"]
    assert_trees_close(have, {k: v for k, v in want.items() if k != "output"} | {"embedding": {"tokens": total}}, rtol=1e-9)


def test_loss_of_an_untrained_model_is_that_of_a_guess() -> None:
    """ln V within 2%, and the sum over tokens weighted by the mask."""
    cfg = small_config()
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    loss, count, metrics = fmeg.gpt_forward_step(params, batch, cfg, None)
    assert count == batch["loss_mask"].sum()
    assert (loss / count).item() == pytest.approx(torch.tensor(96.0).log().item(), rel=0.02)
    assert metrics.keys() == {"nll"}
    assert metrics["nll"] == loss
    nll = -torch.log_softmax(fmeg.gpt_forward(params, batch["tokens"], cfg), -1).gather(-1, batch["labels"][..., None])
    torch.testing.assert_close((nll.squeeze(-1) * batch["loss_mask"]).sum(), loss, rtol=RELATIVE[torch.float32], atol=0)


def test_the_mask_is_a_weight_and_is_all_ones_if_absent() -> None:
    cfg = small_config(params_dtype=FP64, z_loss_coeff=0.01, label_smoothing=0.1)
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    ones = fmeg.gpt_forward_step(params, batch | {"loss_mask": torch.ones(4, 16)}, cfg, None)
    absent = fmeg.gpt_forward_step(params, {k: v for k, v in batch.items() if k != "loss_mask"}, cfg, None)
    assert_trees_equal(absent, ones)
    assert ones[2].keys() == {"nll", "z_loss"}
    double = fmeg.gpt_forward_step(params, batch | {"loss_mask": torch.full((4, 16), 2.0)}, cfg, None)
    assert_trees_close(double, tree.map(lambda x: 2 * x, ones), rtol=RELATIVE[FP64])
    for dtype in (torch.bool, torch.int64):
        typed = fmeg.gpt_forward_step(params, batch | {"loss_mask": batch["loss_mask"].to(dtype)}, cfg, None)
        assert_trees_equal(typed, fmeg.gpt_forward_step(params, batch, cfg, None))


@pytest.mark.parametrize("params_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_and_loss_are_in_at_least_fp32(params_dtype: torch.dtype) -> None:
    cfg = small_config(params_dtype=params_dtype)
    params, batch = fmeg.init_params(cfg), random_batch(cfg)
    want = torch.promote_types(params_dtype, torch.float32)
    logits = fmeg.gpt_forward(params, batch["tokens"], cfg)
    assert (logits.dtype, logits.shape) == (want, (4, 16, 96))
    assert loss_sum(params, batch, cfg).dtype == want
    gradients = torch.func.grad(loss_sum)(params, batch, cfg)
    assert {g.dtype for g in tree.leaves(gradients)} == {params_dtype}


def test_bf16_is_near_fp32_and_fp32_nearer_to_fp64() -> None:
    cfg = small_config(init_method_std=0.1)
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    exact = fmeg.gpt_forward(tree.map(Tensor.double, params), tokens, cfg.replace(params_dtype=FP64))
    for changed, dtype in (({}, torch.float32), ({"bf16": True}, torch.bfloat16)):
        error = (fmeg.gpt_forward(params, tokens, cfg.replace(**changed)) - exact).norm() / exact.norm()
        assert 0 < error < RELATIVE[dtype]


@given(
    st.fixed_dictionaries(
        {
            "normalization": st.sampled_from(["LayerNorm", "RMSNorm"]),
            "activation": st.sampled_from(["gelu", "gelu_tanh", "silu", "squared_relu"]),
            "gated_linear_unit": st.booleans(),
            "add_bias_linear": st.booleans(),
            "qk_layernorm": st.booleans(),
            "num_query_groups": st.sampled_from([1, 2, 4]),
            "kv_channels": st.sampled_from([None, 6]),
            "position_embedding_type": st.sampled_from(["rope", "learned_absolute", "none"]),
            "window_size": st.sampled_from([None, (2, 0)]),
            "num_layers": st.integers(1, 3),
        }
    )
)
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_combination_has_finite_gradients_on_both_backends(options: dict[str, Any]) -> None:
    """The two backends agree in every leaf; a leaf is zero only where it has no influence."""
    cfg = small_config(params_dtype=FP64, **options)
    params, batch = fmeg.init_params(cfg), random_batch(cfg, size=2, length=6)
    fused, unfused = (value_and_grad(loss_sum)(params, batch, cfg.replace(attention_backend=b)) for b in ("fused", "unfused"))
    size = max(g.abs().max().item() for g in tree.leaves(unfused))
    for (path, a), (_, b) in zip(tree.flatten_with_path(fused), tree.flatten_with_path(unfused), strict=True):
        assert a.isfinite().all() and (a - b).abs().max() <= RELATIVE[FP64] * size, path
        assert b.any(), path


def test_what_the_model_cannot_take_is_refused() -> None:
    cfg = small_config()
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    for bad, error, message in [
        (tokens[0], ValueError, r"^tokens have shape \(16,\): must be \[batch, sequence\]$"),
        (tokens.float(), TypeError, "^tokens have dtype torch.float32: must be torch.int64 or torch.int32$"),
        (tokens + 90, ValueError, r"^tokens hold id \d+, outside the vocabulary: must be in \[0, 96\)$"),
        (tokens - 96, ValueError, r"^tokens hold id -\d+, outside the vocabulary: must be in \[0, 96\)$"),
        (torch.zeros((1, 33), dtype=torch.int64), ValueError, "^sequence length 33 is above max_position_embeddings 32: short"),
    ]:
        with pytest.raises(error, match=message):
            fmeg.gpt_forward(params, bad, cfg)
    message = r"shape of layers/dense/attention/key/weight \(2, 32, 2, 8\) instead of \(2, 32, 1, 8\)"
    with pytest.raises(ValueError, match=message):
        fmeg.gpt_forward(params, tokens, cfg.replace(num_query_groups=1))
    with pytest.raises(ValueError, match="missing none, unexpected output/weight"):
        fmeg.gpt_forward(params, tokens, cfg.replace(share_embeddings_and_output_weights=True))


def test_an_id_of_the_padding_is_outside_the_vocabulary() -> None:
    cfg = small_config(vocab_size=96)
    assert cfg.padded_vocab_size == 128
    with pytest.raises(ValueError, match=r"tokens hold id 96, outside the vocabulary: must be in \[0, 96\)"):
        fmeg.gpt_forward(fmeg.init_params(cfg), torch.tensor([[96]]), cfg)


def test_int32_tokens_and_empty_batches_are_taken() -> None:
    cfg = small_config()
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    assert torch.equal(fmeg.gpt_forward(params, tokens.int(), cfg), fmeg.gpt_forward(params, tokens, cfg))
    assert fmeg.gpt_forward(params, tokens[:0], cfg).shape == (0, 16, 96)


def test_sampling_at_temperature_zero_takes_the_most_probable_token() -> None:
    cfg = small_config(init_method_std=0.2)
    params, prompt = fmeg.init_params(cfg), torch.tensor([5, 17, 3])
    want = prompt
    for _ in range(6):
        want = torch.cat((want, fmeg.gpt_forward(params, want[None], cfg)[0, -1].argmax()[None]))
    for seed in (0, 1):
        have = sample(params, prompt, cfg, num_tokens=6, temperature=0.0, key=random.key(seed))
        assert torch.equal(have, want)


def test_sampling_is_decided_by_the_key() -> None:
    cfg = small_config()
    params, prompt = fmeg.init_params(cfg), torch.tensor([5, 17, 3])
    a, b, c = (sample(params, prompt, cfg, num_tokens=8, temperature=1.0, key=random.key(seed)).tolist() for seed in (0, 0, 1))
    assert a == b != c
    assert a[:3] == [5, 17, 3] and len(a) == 11
    longer = sample(params, prompt, cfg, num_tokens=10, temperature=1.0, key=random.key(0)).tolist()
    assert longer[:11] == a


def test_sampling_draws_from_the_softmax() -> None:
    """One token under many keys: frequencies within five standard errors of softmax(logits / temperature)."""
    cfg = small_config(vocab_size=4, init_method_std=0.05)
    params, prompt, n = fmeg.init_params(cfg), torch.tensor([1, 2]), 20_000
    probs = torch.softmax(fmeg.gpt_forward(params, prompt[None], cfg)[0, -1] / 0.7, -1)
    draws = torch.func.vmap(lambda key: sample(params, prompt, cfg, num_tokens=1, temperature=0.7, key=key)[-1])(
        random.split(random.key(0), n)
    )
    frequency = torch.bincount(draws, minlength=4) / n
    assert ((frequency - probs).abs() < 5 * (probs * (1 - probs) / n).sqrt()).all()
    assert 0.4 < probs.max() < 0.9


def test_sampling_past_the_longest_sequence_slides_the_context() -> None:
    cfg = small_config(max_position_embeddings=4, init_method_std=0.2)
    params = fmeg.init_params(cfg)
    out = sample(params, torch.tensor([1, 2, 3]), cfg, num_tokens=6, temperature=0.0, key=random.key(0))
    assert out[-1] == fmeg.gpt_forward(params, out[None, -5:-1], cfg)[0, -1].argmax()

"""Embedding, logits and loss: known numbers, torch's cross-entropy, and padding that never shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import RELATIVE, assert_trees_close, random_batch, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmeg
from fmeg import random, tree
from fmeg.layers.attention import RESIDUAL
from fmeg.layers.dropout import DropoutKey, dropout
from fmeg.layers.embedding import embed, embedding_specs, unembed
from fmeg.layers.loss import cross_entropy
from fmeg.params import init_from_specs


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_labels(V: int, *shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


def padded(logits: Tensor, cfg: fmeg.TransformerConfig) -> Tensor:
    return F.pad(logits, (0, cfg.padded_vocab_size - cfg.vocab_size), value=-torch.inf)


@pytest.mark.parametrize("unit", [1, 128])
def test_known_loss_and_gradient(unit: int) -> None:
    """Logits 0, 1, 2, 3 and label 3: loss 0.4401897; the padding's columns have gradient 0."""
    cfg = small_config(vocab_size=4, make_vocab_size_divisible_by=unit)
    logits = padded(torch.tensor([[[0.0, 1.0, 2.0, 3.0]]], dtype=torch.float64), cfg)
    loss, pullback = torch.func.vjp(lambda x: cross_entropy(x, torch.tensor([[3]]), cfg).loss_BT.sum(), logits)
    assert loss.item() == pytest.approx(0.4401897, abs=5e-8)
    gradient = pullback(torch.ones_like(loss))[0][0, 0]
    assert gradient[:4].tolist() == pytest.approx([0.0320586, 0.0871443, 0.2368828, -0.3560857], abs=5e-8)
    assert not gradient[4:].any()


@given(
    V=st.integers(1, 20),
    unit=st.sampled_from([1, 8, 32]),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    z=st.sampled_from([0.0, 1e-3, 1.0]),
    scale=st.sampled_from([0.1, 10.0]),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_loss_is_torchs_plus_z_loss(V: int, unit: int, smoothing: float, z: float, scale: float) -> None:
    """Value and gradient, under an uneven weight of positions, with and without padding."""
    cfg = small_config(vocab_size=V, make_vocab_size_divisible_by=unit, label_smoothing=smoothing, z_loss_coeff=z)
    logits, labels, weight = drawn(2, 3, V, scale=scale), drawn_labels(V, 2, 3), drawn(2, 3, seed=5)

    def ours(x: Tensor) -> Tensor:
        return (weight * cross_entropy(padded(x, cfg), labels, cfg).loss_BT).sum()

    def theirs(x: Tensor) -> Tensor:
        nll = F.cross_entropy(x.mT, labels, reduction="none", label_smoothing=smoothing)
        return (weight * (nll + z * x.logsumexp(-1) ** 2)).sum()

    have, want = (torch.func.grad_and_value(fn)(logits) for fn in (ours, theirs))
    # A gradient may be nothing but rounding (V of 1): the size of the weights is the scale.
    torch.testing.assert_close(have, want, rtol=RELATIVE[torch.float64], atol=RELATIVE[torch.float64] * scale)


def test_the_reported_parts_are_the_plain_loss_and_the_z_loss() -> None:
    cfg = small_config(vocab_size=7, label_smoothing=0.2, z_loss_coeff=0.01, make_vocab_size_divisible_by=8)
    logits, labels = drawn(2, 3, 7), drawn_labels(7, 2, 3)
    terms = cross_entropy(padded(logits, cfg), labels, cfg)
    assert_trees_close(terms.nll_BT, F.cross_entropy(logits.mT, labels, reduction="none"), rtol=RELATIVE[torch.float64])
    assert_trees_close(terms.z_loss_BT, 0.01 * logits.logsumexp(-1) ** 2, rtol=RELATIVE[torch.float64])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_stay_finite(size: float, smoothing: float) -> None:
    cfg = small_config(vocab_size=4, label_smoothing=smoothing)
    logits = padded(torch.tensor([[[size, -size, 0.0, size / 2]]]), cfg)
    gradient, loss = torch.func.grad_and_value(lambda x: cross_entropy(x, torch.tensor([[1]]), cfg).loss_BT.sum())(logits)
    assert loss.isfinite() and gradient.isfinite().all()
    plain = (1 - smoothing) * 2 * size + smoothing * (size - size / 8)
    assert loss.item() == pytest.approx(plain, rel=1e-6)
    want = torch.tensor([1.0, -(1 - smoothing), 0.0, 0.0]) - torch.tensor([1.0, 1.0, 1.0, 1.0]) * smoothing / 4
    torch.testing.assert_close(gradient[0, 0, :4], want)


def test_the_derivative_equals_finite_differences() -> None:
    cfg = small_config(vocab_size=5, label_smoothing=0.1, z_loss_coeff=0.1, make_vocab_size_divisible_by=8)
    labels = drawn_labels(5, 1, 3)

    def fn(x: Tensor) -> Tensor:
        return cross_entropy(padded(x, cfg), labels, cfg).loss_BT

    inputs = (drawn(1, 3, 5).requires_grad_(),)
    assert torch.autograd.gradcheck(fn, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fn, inputs)


def logical(params: Any, cfg: fmeg.TransformerConfig) -> Any:
    """Without the rows of the padding."""
    return tree.map(lambda p, spec: p[: spec.shape[0]], params, fmeg.gpt_specs(cfg))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss_coeff": 0.01}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("V", [65, 96])
def test_padding_never_shows(V: int, tied: bool, options: dict[str, float]) -> None:
    """The same logical weights give the same loss and gradients for every unit, whatever the padding holds."""
    cfg = small_config(vocab_size=V, params_dtype=torch.float64, share_embeddings_and_output_weights=tied, **options)
    batch = random_batch(cfg)
    plain = cfg.replace(make_vocab_size_divisible_by=1)
    want, want_metrics = fmeg.make_grad_step(plain, compile=False)(fmeg.init_params(plain), batch)
    for unit in (64, 128):
        wide = cfg.replace(make_vocab_size_divisible_by=unit)
        start = fmeg.init_params(wide)
        assert_trees_close(logical(start, wide), fmeg.init_params(plain), rtol=0)
        loud = tree.map(lambda p, s: p.index_fill(0, torch.arange(s.shape[0], len(p)), 1e3), start, fmeg.gpt_specs(wide))
        for params in (start, loud):
            grads, metrics = fmeg.make_grad_step(wide, compile=False)(params, batch)
            assert_trees_close(metrics, want_metrics, rtol=RELATIVE[torch.float64])
            assert_trees_close(logical(grads, wide), want, rtol=RELATIVE[torch.float64])
            for weight in [grads["embedding"]["tokens"]] + ([] if tied else [grads["output"]["weight"]]):
                assert weight.shape[0] % unit == 0 and not weight[V:].any()
            logits = fmeg.gpt_forward(params, batch["tokens"], wide)
            want_logits = fmeg.gpt_forward(fmeg.init_params(plain), batch["tokens"], plain)
            assert_trees_close(logits, want_logits, rtol=RELATIVE[torch.float64])


def test_logits_are_products_with_the_weights_rows() -> None:
    cfg = small_config(vocab_size=5, make_vocab_size_divisible_by=8)
    weight, x = drawn(8, 32), drawn(2, 3, 32, seed=1)
    logits = unembed(weight, x, cfg, None)
    assert_trees_close(logits[..., :5], x @ weight[:5].T, rtol=RELATIVE[torch.float64])
    assert (logits[..., 5:] == -torch.inf).all()
    assert unembed(weight.bfloat16(), x.bfloat16(), cfg, None).dtype == torch.float32


def test_an_embedding_is_the_row_of_the_token() -> None:
    cfg = small_config()
    params = init_from_specs(embedding_specs(cfg), seed=0, dtype=torch.float64)
    assert params.keys() == {"tokens"}
    tokens = drawn_labels(96, 2, 5)
    assert torch.equal(embed(params, tokens, torch.arange(5), cfg, None), params["tokens"][tokens])


def test_learned_positions_are_added_by_position() -> None:
    """Positions are data: those of any part of a sequence."""
    cfg = small_config(position_embedding_type="learned_absolute")
    params = init_from_specs(embedding_specs(cfg), seed=0, dtype=torch.float64)
    assert params["positions"].shape == (cfg.max_position_embeddings, 32)
    tokens, positions = drawn_labels(96, 2, 5), torch.tensor([7, 0, 31, 3, 4])
    want = params["tokens"][tokens] + params["positions"][positions]
    assert torch.equal(embed(params, tokens, positions, cfg, None), want)


def test_learned_positions_are_the_only_thing_that_tells_order_in_a_bag_of_tokens() -> None:
    """One token repeated: without positions all logits are equal, with them they are not, and longest is allowed."""
    tokens = torch.full((1, 32), 3)
    for kind, same in (("none", True), ("learned_absolute", False)):
        cfg = small_config(position_embedding_type=kind, params_dtype=torch.float64)
        logits = fmeg.gpt_forward(fmeg.init_params(cfg), tokens, cfg)
        assert torch.allclose(logits, logits[:, :1].expand_as(logits), atol=1e-12) is same


def test_hidden_dropout_is_on_the_sum_of_both_embeddings() -> None:
    cfg = small_config(position_embedding_type="learned_absolute", hidden_dropout=0.5)
    params = init_from_specs(embedding_specs(cfg), seed=0, dtype=torch.float64)
    tokens, positions, key = drawn_labels(96, 2, 5), torch.arange(5), DropoutKey(random.key(1), torch.arange(2))
    plain = embed(params, tokens, positions, cfg, None)
    assert torch.equal(embed(params, tokens, positions, cfg, None, key=key), dropout(plain, 0.5, key, RESIDUAL, None))

"""Attention: the fused kernel against plain products, masks by perturbation, grouped heads, and every derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import RELATIVE, assert_trees_close, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmeg
from fmeg import random, tree
from fmeg.layers.attention import attention, attention_specs, causal_mask, dot_product_attention
from fmeg.layers.dropout import DropoutKey
from fmeg.layers.norm import norm
from fmeg.layers.rotary import apply_rotary, rotary_table
from fmeg.params import init_from_specs

QKV = tuple[Tensor, Tensor, Tensor]
REMEDY = (
    "^fused attention has first reverse-mode derivatives only: "
    "for jvp, Hessians or gradients of gradients use attention_backend='unfused'$"
)
BACKENDS = ["fused", "unfused"]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heads(B: int, T: int, N: int, K: int, H: int, dtype: torch.dtype = torch.float64) -> QKV:
    return drawn(B, T, N, H, dtype=dtype), drawn(B, T, K, H, seed=1, dtype=dtype), drawn(B, T, K, H, seed=2, dtype=dtype)


def config(H: int = 8, **changes: Any) -> fmeg.TransformerConfig:
    """Without rotary positions where the head dimension is odd."""
    return small_config(kv_channels=H, **{"position_embedding_type": "none" if H % 2 else "rope"} | changes)


def by_definition(q: Tensor, k: Tensor, v: Tensor, cfg: fmeg.TransformerConfig, mask_TS: Tensor) -> Tensor:
    """Head by head, from the formula."""
    scale = cfg.head_dim**-0.5 if cfg.softmax_scale is None else cfg.softmax_scale
    group = q.shape[2] // k.shape[2]
    outs = []
    for n in range(q.shape[2]):
        scores = (q[:, :, n] @ k[:, :, n // group].mT * scale).masked_fill(~mask_TS, -torch.inf)
        outs.append(torch.softmax(scores, -1) @ v[:, :, n // group])
    return torch.stack(outs, 2)


def value_and_gradients(fn: Callable[..., Tensor], qkv: QKV) -> tuple[Tensor, ...]:
    """The gradients are those of an uneven sum of squares."""
    out, pullback = torch.func.vjp(fn, *qkv)
    return out, *pullback(out * torch.arange(1, out.shape[-1] + 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 24), st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)),
    window=st.none() | st.integers(0, 25),
    scale=st.none() | st.sampled_from([0.1, 1.0]),
)
@settings(deadline=None, derandomize=True, max_examples=40)
def test_fused_equals_unfused_equals_the_formula(
    dtype: torch.dtype, sizes: tuple[int, ...], window: int | None, scale: float | None
) -> None:
    """Values and all three gradients."""
    B, T, K, G, H = sizes
    cfg, qkv = config(H, softmax_scale=scale), heads(B, T, K * G, K, H, dtype)
    mask_TS = None if window is None else causal_mask(T, window)

    def on(backend: str) -> tuple[Tensor, ...]:
        chosen = cfg.replace(attention_backend=backend)
        return value_and_gradients(lambda q, k, v: dot_product_attention(q, k, v, chosen, mask_TS=mask_TS), qkv)

    full_TS = causal_mask(T, window)
    want = value_and_gradients(lambda q, k, v: by_definition(q, k, v, cfg, full_TS), tree.map(Tensor.double, qkv))
    # Gradients that are zero but for rounding (one position only) are compared with the size of all of them.
    size = max(w.abs().max().item() for w in want)
    for backend in BACKENDS:
        for a, b in zip(on(backend), want, strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).abs().max() <= RELATIVE[dtype] * size


@pytest.mark.parametrize("backend", BACKENDS)
def test_auto_is_fused_unless_something_drops(backend: str) -> None:
    cfg, qkv = config(attention_dropout=0.5), heads(2, 5, 4, 2, 8, torch.float32)
    key = DropoutKey(random.key(0), torch.arange(2))
    auto = dot_product_attention(*qkv, cfg)
    assert_trees_close(auto, dot_product_attention(*qkv, config(attention_backend=backend)), rtol=RELATIVE[torch.float32])
    assert torch.equal(auto, dot_product_attention(*qkv, config(attention_backend="fused")))
    dropped = dot_product_attention(*qkv, cfg, key=key)
    assert torch.equal(dropped, dot_product_attention(*qkv, cfg.replace(attention_backend="unfused"), key=key))
    assert not torch.allclose(dropped, auto)


def test_attention_dropout_is_on_probabilities() -> None:
    """With value vectors of ones every output is the sum of what was kept: 1 in the mean over keys."""
    cfg = config(attention_dropout=0.3)
    q, k, v = heads(1, 6, 2, 2, 8, torch.float32)
    n, rows = 1000, torch.arange(1)
    out = torch.func.vmap(lambda key: dot_product_attention(q, k, torch.ones_like(v), cfg, key=DropoutKey(key, rows)))(
        random.split(random.key(0), n)
    )
    first = out[:, 0, 0, 0, 0]  # sees itself only: all or nothing
    assert sorted(first.unique().tolist()) == pytest.approx([0.0, 1 / 0.7])
    assert ((out.mean(0) - 1).abs() < 5 * (0.3 / 0.7 / n) ** 0.5).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [1, 2, 4])
def test_grouped_heads_are_repeated_heads(backend: str, K: int) -> None:
    """Query head n reads key head n // (N / K); a key head's gradient is the sum over the queries that read it."""
    cfg = config(attention_backend=backend)
    q, k, v = heads(2, 7, 4, K, 8)
    have = value_and_gradients(lambda q, k, v: dot_product_attention(q, k, v, cfg), (q, k, v))
    repeated = value_and_gradients(
        lambda q, k, v: dot_product_attention(
            q, k.repeat_interleave(4 // K, 2), v.repeat_interleave(4 // K, 2), cfg.replace(num_query_groups=4)
        ),
        (q, k, v),
    )
    assert_trees_close(have, repeated, rtol=RELATIVE[torch.float64])


def influence(cfg: fmeg.TransformerConfig, T: int, window: tuple[int, int] | None) -> Tensor:
    """Bool [T, S]: whether the layer's output at t changes with its input at s."""
    params = init_from_specs(attention_specs(cfg.replace(init_method_std=0.5)), seed=0, dtype=torch.float64)
    x, rotary = drawn(1, T, cfg.hidden_size), rotary_table(cfg, torch.arange(T))

    def run(x: Tensor) -> Tensor:
        return attention(params, x, cfg, None, rotary=rotary, window=window)[0]

    before = run(x)
    changed = [(run(x + drawn(*x.shape, seed=7) * (torch.arange(T) == s)[:, None]) != before).any(-1) for s in range(T)]
    return torch.stack(changed, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_changes_nothing_before_it(backend: str) -> None:
    T = 12
    assert torch.equal(influence(config(attention_backend=backend), T, None), torch.ones(T, T, dtype=torch.bool).tril())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [0, 1, 4, 11, 50])
def test_a_window_sees_left_tokens_and_itself(backend: str, left: int) -> None:
    T = 12
    seen = influence(config(attention_backend=backend), T, (left, 0))
    assert torch.equal(seen, torch.ones(T, T, dtype=torch.bool).tril().triu(-left))
    assert seen.sum(1).tolist() == [min(t, left) + 1 for t in range(T)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients(backend: str, dtype: torch.dtype) -> None:
    cfg, qkv = config(attention_backend=backend), heads(2, 5, 4, 2, 8, dtype)
    mask_TS = causal_mask(5, None)
    mask_TS[[0, 3]] = False
    out, *gradients = value_and_gradients(lambda q, k, v: dot_product_attention(q, k, v, cfg, mask_TS=mask_TS), qkv)
    assert (out[:, [0, 3]] == 0).all() and (out[:, [1, 2, 4]] != 0).all()
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, [0, 3]] == 0).all(), "the query of such a row has no influence"
    kept = [1, 2, 4]
    want = by_definition(*tree.map(Tensor.double, qkv), cfg, causal_mask(5, None))[:, kept]
    assert (out.double()[:, kept] - want).abs().max() <= RELATIVE[dtype] * want.abs().max()


def test_bf16_softmax_is_in_fp32_on_both_backends() -> None:
    """Against fp64 of the same bf16 numbers, over 64 positions."""
    qkv = heads(2, 64, 4, 2, 16, torch.bfloat16)
    for backend in BACKENDS:
        cfg = config(16, attention_backend=backend)
        out = dot_product_attention(*qkv, cfg)
        want = by_definition(*tree.map(Tensor.double, qkv), cfg, causal_mask(64, None))
        assert out.dtype == torch.bfloat16
        assert (out.double() - want).abs().max() <= RELATIVE[torch.bfloat16] * want.abs().max(), backend


def test_large_scores_stay_finite() -> None:
    for backend in BACKENDS:
        cfg = config(attention_backend=backend, softmax_scale=1e4)
        results = value_and_gradients(lambda q, k, v, c=cfg: dot_product_attention(q, k, v, c), heads(1, 6, 2, 2, 8))
        assert all(r.isfinite().all() for r in results), backend


@given(
    in_dims=st.tuples(*[st.sampled_from([None, 0, 1, 2])] * 3).filter(any),
    windowed=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=30)
def test_vmap_over_the_fused_kernel_is_a_loop(in_dims: tuple[int | None, ...], windowed: bool) -> None:
    """Values, and gradients per example, mapped over any of the arguments."""
    n, cfg = 3, config(attention_backend="fused")
    mask_TS = causal_mask(5, 2) if windowed else None
    qkv = [
        x if dim is None else torch.stack([x * (1 + i) for i in range(n)], dim)
        for x, dim in zip(heads(2, 5, 4, 2, 8), in_dims, strict=True)
    ]

    def results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return value_and_gradients(lambda q, k, v: dot_product_attention(q, k, v, cfg, mask_TS=mask_TS), (q, k, v))

    have = torch.func.vmap(results, in_dims)(*qkv)
    loop = [results(*(x if d is None else x.select(d, i) for x, d in zip(qkv, in_dims, strict=True))) for i in range(n)]
    assert_trees_close(have, tuple(torch.stack(parts) for parts in zip(*loop, strict=True)), rtol=RELATIVE[torch.float64])


def test_vmap_of_grad_nests() -> None:
    """Per-example gradients over two mapped dimensions, on the fused kernel and on plain products."""
    qkv = tuple(
        torch.stack([torch.stack([x, 2 * x]), torch.stack([-x, x + 1]), torch.stack([x, x])]) for x in heads(1, 4, 2, 1, 4)
    )

    def per_example(backend: str) -> Any:
        cfg = config(4, attention_backend=backend)
        grad = torch.func.grad(lambda q, k, v: dot_product_attention(q, k, v, cfg).square().sum(), (0, 1, 2))
        return torch.func.vmap(torch.func.vmap(grad))(*qkv)

    assert per_example("fused")[0].shape == (3, 2, 1, 4, 2, 4)
    assert_trees_close(per_example("fused"), per_example("unfused"), rtol=RELATIVE[torch.float64])


def test_one_mask_for_each_example_is_refused_by_the_fused_kernel_and_done_by_the_other() -> None:
    qkv, masks = heads(1, 4, 2, 2, 8), torch.stack([causal_mask(4, left) for left in (0, 1, 2)])

    def run(backend: str) -> Tensor:
        cfg = config(attention_backend=backend)
        return torch.func.vmap(lambda mask: dot_product_attention(*qkv, cfg, mask_TS=mask))(masks)

    with pytest.raises(ValueError, match="takes one mask for all: use attention_backend='unfused'"):
        run("fused")
    want = torch.stack([dot_product_attention(*qkv, config(), mask_TS=mask) for mask in masks])
    assert_trees_close(run("unfused"), want, rtol=RELATIVE[torch.float64])


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),)),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "gradient of a gradient": lambda f, q: torch.func.grad(lambda q: torch.func.grad(f)(q).square().sum())(q),
    "hessian": lambda f, q: torch.func.hessian(f)(q),
    "jvp of a gradient": lambda f, q: torch.func.jvp(torch.func.grad(f), (q,), (torch.ones_like(q),)),
    "autograd twice": lambda f, q: torch.autograd.functional.hessian(f, q),
}


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_what_the_fused_kernel_cannot_differentiate_is_refused_with_the_remedy(name: str, windowed: bool) -> None:
    q, k, v = heads(1, 3, 2, 1, 4)
    mask_TS = causal_mask(3, 1) if windowed else None

    def loss(backend: str) -> Callable[[Tensor], Tensor]:
        cfg = config(4, attention_backend=backend)
        return lambda q: dot_product_attention(q, k, v, cfg, mask_TS=mask_TS).square().sum()

    with pytest.raises(ValueError, match=REMEDY):
        DERIVATIVES[name](loss("fused"), q)
    result = tree.leaves(DERIVATIVES[name](loss("unfused"), q))
    assert all(r.isfinite().all() and r.any() for r in result)


def test_plain_products_have_every_derivative() -> None:
    """First and second, forward and reverse, against finite differences, also with a row that sees nothing."""
    cfg = config(2, attention_backend="unfused")
    qkv = tuple(x.requires_grad_() for x in heads(1, 3, 2, 1, 2))
    mask_TS = causal_mask(3, 1)
    mask_TS[1] = False
    for mask in (None, mask_TS):

        def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = mask) -> Tensor:
            return dot_product_attention(q, k, v, cfg, mask_TS=mask)

        assert torch.autograd.gradcheck(fn, qkv, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(fn, qkv)


def test_the_fused_kernels_gradient_equals_finite_differences() -> None:
    cfg = config(3, attention_backend="fused")
    qkv = tuple(x.requires_grad_() for x in heads(1, 4, 2, 1, 3))
    assert torch.autograd.gradcheck(lambda q, k, v: dot_product_attention(q, k, v, cfg), qkv, check_batched_grad=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_layernorm", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_the_layer_by_its_formula(kind: str, qk_layernorm: bool, bias: bool) -> None:
    """Projections, a norm over each head of q and k (not v) before the rotation, attention, projection."""
    cfg = small_config(
        normalization=kind, qk_layernorm=qk_layernorm, add_bias_linear=bias, kv_channels=6, params_dtype=torch.float64
    )
    specs = attention_specs(cfg)
    gen = torch.Generator().manual_seed(0)
    zeros = init_from_specs(specs, seed=0, dtype=torch.float64)
    params = tree.map(lambda p: torch.randn(p.shape, generator=gen, dtype=p.dtype), zeros)
    assert ("query_norm" in params) is ("key_norm" in params) is qk_layernorm
    x, rotary = drawn(2, 5, 32), rotary_table(cfg, torch.arange(5))
    assert rotary is not None

    def project(name: str) -> Tensor:
        return torch.einsum("btd,dnh->btnh", x, params[name]["weight"]) + params[name].get("bias", 0)

    q, k, v = (project(name) for name in ("query", "key", "value"))
    if qk_layernorm:
        q, k = norm(params["query_norm"], q, cfg), norm(params["key_norm"], k, cfg)
    q, k = apply_rotary(q, rotary, cfg), apply_rotary(k, rotary, cfg)
    o = by_definition(q, k, v, cfg, causal_mask(5, None))
    want = torch.einsum("btnh,nhd->btd", o, params["output"]["weight"]) + params["output"].get("bias", 0)
    assert_trees_close(attention(params, x, cfg, None, rotary=rotary), want, rtol=RELATIVE[torch.float64])


def test_qkv_bias_alone_leaves_the_output_without() -> None:
    specs = attention_specs(small_config(add_bias_linear=False, add_qkv_bias=True))
    assert {name for name, part in specs.items() if "bias" in part} == {"query", "key", "value"}

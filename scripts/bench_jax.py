"""The jax peer of scripts/bench.py: the same model, clipping and AdamW as one jitted step with a donated state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench import SIZES, Case, Size
from bench_peers import ADAM_EPSILON, BETAS, CLIP_GRAD, INIT_STD, LEARNING_RATE, NORM_EPSILON, ROTARY_BASE, WEIGHT_DECAY, Built

Params = Any
State = tuple[jax.Array, Params, Params, Params]
"""Updates done, parameters, and the running means of gradient and square."""


def init(size: Size) -> Params:
    """Parameters by Hugging Face's names; weights are stored input first, layers as a list, so that none is sliced."""
    draw = np.random.default_rng(1)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(INIT_STD * scale * draw.standard_normal(shape), jnp.float32)

    D, F, N, K, H = size.hidden, size.ffn, size.heads, size.kv_heads, size.head_dim
    shapes = {
        "q_proj": (D, N * H),
        "k_proj": (D, K * H),
        "v_proj": (D, K * H),
        "o_proj": (N * H, D),
        "gate_proj": (D, F),
        "up_proj": (D, F),
        "down_proj": (F, D),
    }
    last = dict.fromkeys(("o_proj", "down_proj"), (2 * size.layers) ** -0.5)
    norms = ("input_layernorm", "post_attention_layernorm")
    layers = [
        {name: normal(*shape, scale=last.get(name, 1.0)) for name, shape in shapes.items()}
        | {name: jnp.ones(D) for name in norms}
        for _ in range(size.layers)
    ]
    return {
        "embed_tokens": normal(size.vocab, D),
        "layers": layers,
        "norm": jnp.ones(D),
        "lm_head": normal(D, size.vocab),
    }


def loss(params: Params, tokens: jax.Array, labels: jax.Array, size: Size, dtype: str) -> jax.Array:
    """Mean cross-entropy. Matrix products in `dtype`; norms, rotation, softmax and loss in fp32."""
    if dtype == "bf16":
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim > 1 else p, params)
    freqs = ROTARY_BASE ** (-np.arange(0, size.head_dim, 2, dtype=np.float32) / size.head_dim)
    angles = np.arange(tokens.shape[1], dtype=np.float32)[:, None] * freqs
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, size.head_dim)

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x.dtype)

    x = params["embed_tokens"][tokens]
    for p in params["layers"]:
        y = rms_norm(x, p["input_layernorm"])
        q, k, v = (heads(y @ p[name]) for name in ("q_proj", "k_proj", "v_proj"))
        o = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + o.reshape(*x.shape[:2], -1) @ p["o_proj"]
        y = rms_norm(x, p["post_attention_layernorm"])
        x = x + (jax.nn.silu(y @ p["gate_proj"]) * (y @ p["up_proj"])) @ p["down_proj"]
    logits = jnp.matmul(rms_norm(x, params["norm"]), params["lm_head"], preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale, in fp32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + NORM_EPSILON)
    return (wide * scale).astype(x.dtype)


def update(state: State, tokens: jax.Array, labels: jax.Array, size: Size, dtype: str) -> tuple[State, jax.Array]:
    """One step of AdamW with clipped gradients; gives the loss before it."""
    count, params, mu, nu = state
    value, grads = jax.value_and_grad(loss)(params, tokens, labels, size, dtype)
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP_GRAD / (norm + 1e-6)), grads)
    count = count + 1
    b1, b2 = BETAS
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), nu, grads)

    def move(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        direction = m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + ADAM_EPSILON)
        return p - LEARNING_RATE * (direction + (WEIGHT_DECAY * p if p.ndim > 1 else 0.0))

    return (count, jax.tree.map(move, params, mu, nu), mu, nu), value


def init_state(params: Params) -> State:
    """A fresh state."""
    return (jnp.zeros(()), params, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))


def build(case: Case, batch: tuple[np.ndarray, np.ndarray]) -> Built:
    """A peer as scripts/bench_peers.py has them. XLA takes as many threads as the process has cores."""
    size = SIZES[case.size]
    state = init_state(init(size))
    tokens, labels = (jnp.asarray(part, jnp.int32) for part in batch)
    jitted = jax.jit(functools.partial(update, size=size, dtype=case.dtype), donate_argnums=0)

    def step() -> jax.Array:
        nonlocal state
        state, value = jitted(state, tokens, labels)
        return value

    return Built(step, sum(p.size for p in jax.tree.leaves(state[1])), lambda: jax.block_until_ready(state) and None)

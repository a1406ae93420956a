"""A layer is two sublayers on a residual stream; a model's layers are stacks of equal ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from fmeg.config import TransformerConfig
from fmeg.layers.attention import RESIDUAL, attention, attention_specs
from fmeg.layers.dropout import DropoutKey, dropout
from fmeg.layers.mlp import mlp, mlp_specs
from fmeg.layers.norm import norm, norm_specs
from fmeg.layers.rotary import Rotary
from fmeg.params import Params, Specs
from fmeg.remat import selective
from fmeg.sharding.mesh import Ctx


@dataclass(frozen=True)
class Sublayer:
    """A pair of pure functions: `specs(cfg)` declares the parameters that `apply` uses.

    An attention's `apply(params, x_BTD, cfg, ctx, *, rotary, key)` and an MLP's `apply(params, x_BTD, cfg, ctx, *, key)`
    take the normalized residual stream and return what is added to it.
    """

    specs: Callable[[TransformerConfig], Specs]
    apply: Callable[..., Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """Which functions make a layer. `name` is the key of its parameters; layers with equal specs share a stack."""

    name: str = "dense"
    attention: Sublayer = Sublayer(attention_specs, attention)
    mlp: Sublayer = Sublayer(mlp_specs, mlp)


def get_gpt_layer_local_spec(cfg: TransformerConfig) -> LayerSpec:
    """The layer of a GPT from torch's own operations. Swap a part with `dataclasses.replace`.

    A config with a mixture of windowed and full layers has no single layer: see `get_gpt_decoder_block_spec`.

    >>> cfg = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> get_gpt_layer_local_spec(cfg).mlp.apply is mlp
    True
    """
    if cfg.window_attn_skip_freq is not None:
        raise ValueError("window_attn_skip_freq makes layers differ: use get_gpt_decoder_block_spec(cfg), one per layer")
    return get_gpt_decoder_block_spec(cfg)[0]


def get_gpt_decoder_block_spec(cfg: TransformerConfig) -> tuple[LayerSpec, ...]:
    """One LayerSpec for each layer, windowed where the config says so.

    >>> cfg = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=96, window_size=(3, 0),
    ...     window_attn_skip_freq=2)
    >>> [layer.name for layer in get_gpt_decoder_block_spec(cfg)]
    ['windowed', 'dense', 'windowed', 'dense']
    """
    full, windowed = LayerSpec(), LayerSpec()
    if cfg.window_size is not None:
        name = "dense" if cfg.window_attn_skip_freq is None else "windowed"
        windowed = LayerSpec(name, Sublayer(attention_specs, partial(attention, window=cfg.window_size)))
    return tuple(full if cfg.layer_window(i) is None else windowed for i in range(cfg.num_layers))


class LayerKeys(NamedTuple):
    """One dropout key for each place of a layer that may drop."""

    attention: DropoutKey
    attention_residual: DropoutKey
    mlp: DropoutKey
    mlp_residual: DropoutKey


def layer_specs(cfg: TransformerConfig, layer: LayerSpec) -> Specs:
    """Parameters of one layer."""
    return {
        "attention_norm": norm_specs(cfg, cfg.hidden_size),
        "attention": layer.attention.specs(cfg),
        "mlp_norm": norm_specs(cfg, cfg.hidden_size),
        "mlp": layer.mlp.specs(cfg),
    }


def transformer_layer(
    params: Params,
    x_BTD: Tensor,
    cfg: TransformerConfig,
    ctx: Ctx,
    layer: LayerSpec,
    *,
    rotary: Rotary | None = None,
    keys: LayerKeys | None = None,
) -> Tensor:
    """x[B,T,D] -> x[B,T,D]: x + attention(norm(x)), then x + mlp(norm(x)); dropout on what is added."""
    k = keys or (None,) * 4
    normalize, mlp_apply = selective("layernorm", norm, cfg), selective("mlp", layer.mlp.apply, cfg)
    h_BTD = normalize(params["attention_norm"], x_BTD, cfg)
    h_BTD = layer.attention.apply(params["attention"], h_BTD, cfg, ctx, rotary=rotary, key=k[0])
    x_BTD = x_BTD + dropout(h_BTD, cfg.hidden_dropout, k[1], RESIDUAL, ctx)
    h_BTD = normalize(params["mlp_norm"], x_BTD, cfg)
    h_BTD = mlp_apply(params["mlp"], h_BTD, cfg, ctx, key=k[2])
    return x_BTD + dropout(h_BTD, cfg.hidden_dropout, k[3], RESIDUAL, ctx)


class Group(NamedTuple):
    """A unit of layers, repeated: each layer of the unit is one stack of `repeats` on a leading "layers" axis."""

    names: tuple[str, ...]
    unit: tuple[LayerSpec, ...]
    repeats: int


def group_layers(layers: Sequence[LayerSpec]) -> tuple[Group, ...]:
    """Layers in groups: the shortest unit that tiles all of them, or else the runs of equal layers.

    >>> a, b = LayerSpec("full"), LayerSpec("windowed")
    >>> [(g.names, g.repeats) for g in group_layers([a, a, a])]
    [(('full',), 3)]
    >>> [(g.names, g.repeats) for g in group_layers([b, a, b, a])]
    [(('windowed', 'full'), 2)]
    >>> [(g.names, g.repeats) for g in group_layers([b, b, a, b])]
    [(('windowed',), 2), (('full',), 1), (('windowed_2',), 1)]
    """
    units = _tile(layers) or _runs(layers)
    groups: list[Group] = []
    taken: list[str] = []
    for unit, repeats in units:
        for layer in unit:
            numbered = (f"{layer.name}_{i}" for i in itertools.count(2))
            taken.append(next(name for name in itertools.chain([layer.name], numbered) if name not in taken))
        groups.append(Group(tuple(taken[-len(unit) :]), unit, repeats))
    return tuple(groups)


def _tile(layers: Sequence[LayerSpec]) -> list[tuple[tuple[LayerSpec, ...], int]]:
    """One unit that repeats at least twice (or a single layer), if there is one."""
    n = len(layers)
    for period in range(1, n // 2 + 1 if n > 1 else 2):
        if n % period == 0 and all(layers[i] == layers[i % period] for i in range(n)):
            return [(tuple(layers[:period]), n // period)]
    return []


def _runs(layers: Sequence[LayerSpec]) -> list[tuple[tuple[LayerSpec, ...], int]]:
    runs: list[tuple[tuple[LayerSpec, ...], int]] = []
    for layer in layers:
        if runs and runs[-1][0] == (layer,):
            runs[-1] = ((layer,), runs[-1][1] + 1)
        else:
            runs.append(((layer,), 1))
    return runs

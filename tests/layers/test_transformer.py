"""Layers in groups, and layers made of other functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import RELATIVE, assert_trees_close, random_batch, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmeg
from fmeg import LayerSpec, Sublayer, random, tree
from fmeg.layers.attention import RESIDUAL, attention, attention_specs
from fmeg.layers.dropout import DropoutKey, dropout
from fmeg.layers.linear import linear, linear_specs
from fmeg.layers.mlp import mlp, mlp_specs
from fmeg.layers.norm import norm
from fmeg.layers.rotary import rotary_table
from fmeg.layers.transformer import LayerKeys, group_layers, layer_specs, transformer_layer
from fmeg.models.gpt import gpt_hidden
from fmeg.params import init_from_specs, normal

# Unequal layers: two of one name, and names that look like a numbered one.
KINDS = [LayerSpec("a"), LayerSpec("a", mlp=Sublayer(mlp_specs, partial(mlp))), LayerSpec("b"), LayerSpec("a_2")]
PATTERNS = st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=9)


def expand(groups: Sequence[Any]) -> list[LayerSpec]:
    return [layer for group in groups for _ in range(group.repeats) for layer in group.unit]


@given(PATTERNS, st.integers(1, 3))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_groups_hold_the_layers_in_order_under_names_of_their_own(pattern: list[int], repeats: int) -> None:
    layers = [KINDS[i] for i in pattern * repeats]
    groups = group_layers(layers)
    assert expand(groups) == layers
    names = [name for group in groups for name in group.names]
    assert len(set(names)) == len(names)
    assert all(len(group.names) == len(group.unit) for group in groups)


@given(PATTERNS, st.integers(2, 4))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_pattern_that_repeats_is_one_group(pattern: list[int], repeats: int) -> None:
    (group,) = group_layers([KINDS[i] for i in pattern * repeats])
    assert group.repeats >= repeats
    assert len(pattern) % len(group.unit) == 0


def layer_by_layer(params: Any, tokens: Tensor, cfg: fmeg.TransformerConfig, places: list[tuple[str, int]]) -> Tensor:
    """The model without stacks: the i-th layer is at `places[i]`, and its window is the config's."""
    x = params["embedding"]["tokens"][tokens]
    rotary = rotary_table(cfg, torch.arange(tokens.shape[1]))
    for i, (name, index) in enumerate(places):
        p = tree.map(lambda leaf, index=index: leaf[index], params["layers"][name])
        h = norm(p["attention_norm"], x, cfg)
        x = x + attention(p["attention"], h, cfg, None, rotary=rotary, window=cfg.layer_window(i))
        x = x + mlp(p["mlp"], norm(p["mlp_norm"], x, cfg), cfg, None)
    return norm(params["final_norm"], x, cfg)


@pytest.mark.parametrize(
    ("skip", "places"),
    [
        (None, [("dense", 0), ("dense", 1), ("dense", 2), ("dense", 3)]),
        (1, [("dense", 0), ("dense", 1), ("dense", 2), ("dense", 3)]),
        (2, [("windowed", 0), ("dense", 0), ("windowed", 1), ("dense", 1)]),
        (3, [("windowed", 0), ("windowed", 1), ("dense", 0), ("windowed_2", 0)]),
        (4, [("windowed", 0), ("windowed", 1), ("windowed", 2), ("dense", 0)]),
        ((0, 1, 0, 1), [("dense", 0), ("windowed", 0), ("dense", 1), ("windowed", 1)]),
        ((0, 1, 1, 0), [("dense", 0), ("windowed", 0), ("windowed", 1), ("dense_2", 0)]),
    ],
    ids=str,
)
def test_a_stacked_model_is_its_layers_one_by_one(skip: Any, places: list[tuple[str, int]]) -> None:
    """Also the gradients: each layer's is at its place in the stack."""
    cfg = small_config(
        num_layers=4, window_size=(2, 0), window_attn_skip_freq=skip, params_dtype=torch.float64, init_method_std=0.2
    )
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    used = {name for name, _ in places}
    assert params["layers"].keys() == used
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = torch.func.grad_and_value(lambda p: (layer_by_layer(p, tokens, cfg, places) @ weight).square().sum())(params)
    have = torch.func.grad_and_value(lambda p: (gpt_hidden(p, tokens, cfg, None) @ weight).square().sum())(params)
    assert_trees_close(have, want, rtol=RELATIVE[torch.float64])


def test_the_place_of_the_window_matters() -> None:
    """The same weights under another pattern give other numbers, so that the test above can tell."""
    cfg = small_config(num_layers=4, window_size=(2, 0), init_method_std=0.2)
    a, b = (cfg.replace(window_attn_skip_freq=skip) for skip in ((0, 1, 0, 1), (1, 0, 1, 0)))
    params, tokens = fmeg.init_params(a), random_batch(cfg)["tokens"]
    assert not torch.allclose(gpt_hidden(params, tokens, a, None), gpt_hidden(params, tokens, b, None), rtol=1e-3)


def test_a_mixture_of_windows_has_no_single_layer() -> None:
    cfg = small_config(window_size=(4, 0))
    assert len(fmeg.get_gpt_decoder_block_spec(cfg)) == cfg.num_layers
    assert fmeg.get_gpt_layer_local_spec(cfg).attention.apply.keywords == {"window": (4, 0)}  # type: ignore[attr-defined]
    assert fmeg.get_gpt_layer_local_spec(small_config()) == LayerSpec()
    with pytest.raises(ValueError, match=r"window_attn_skip_freq makes layers differ: use get_gpt_decoder_block_spec\(cfg\)"):
        fmeg.get_gpt_layer_local_spec(cfg.replace(window_attn_skip_freq=2))


def test_a_layer_drops_at_four_places_with_four_keys() -> None:
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x)))."""
    cfg = small_config(hidden_dropout=0.5, attention_dropout=0.5, params_dtype=torch.float64)
    params = init_from_specs(layer_specs(cfg, LayerSpec()), seed=0, dtype=torch.float64)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = LayerKeys(*DropoutKey(random.key(0), torch.arange(2)).split(4))
    h = attention(params["attention"], norm(params["attention_norm"], x, cfg), cfg, None, key=keys.attention)
    middle = x + dropout(h, 0.5, keys.attention_residual, RESIDUAL, None)
    h = mlp(params["mlp"], norm(params["mlp_norm"], middle, cfg), cfg, None)
    want = middle + dropout(h, 0.5, keys.mlp_residual, RESIDUAL, None)
    have = transformer_layer(params, x, cfg, None, LayerSpec(), keys=keys)
    assert_trees_close(have, want, rtol=RELATIVE[torch.float64])


def mean_attention(params: Any, x_BTD: Tensor, cfg: Any, ctx: Any, *, rotary: Any = None, key: Any = None) -> Tensor:
    """What came before, averaged, through one projection; a gate decides how much of it."""
    mean_BTD = x_BTD.cumsum(1) / torch.arange(1, x_BTD.shape[1] + 1, dtype=x_BTD.dtype)[:, None]
    return params["gate"] * linear(params["project"], mean_BTD, cfg, ctx, src=RESIDUAL, dst=RESIDUAL)


def mean_attention_specs(cfg: fmeg.TransformerConfig) -> Any:
    D = cfg.hidden_size
    project = linear_specs({"embed": D}, {"mlp": D}, init=normal(0.1), bias=True)
    return {"project": project, "gate": fmeg.ParamSpec((D,), fmeg.P("embed"), normal(1.0))}


def positive_mlp(params: Any, x_BTD: Tensor, cfg: Any, ctx: Any, *, key: Any = None) -> Tensor:
    return mlp(params, F.relu(x_BTD), cfg, ctx, key=key)


SWAPPED = dataclasses.replace(
    LayerSpec(), name="swapped", attention=Sublayer(mean_attention_specs, mean_attention), mlp=Sublayer(mlp_specs, positive_mlp)
)


@pytest.mark.parametrize(
    "layers",
    [SWAPPED, (SWAPPED, LayerSpec(), SWAPPED, LayerSpec()), (SWAPPED, SWAPPED, LayerSpec(), LayerSpec())],
    ids=["all", "alternating", "runs"],
)
def test_a_model_of_other_layers_trains(layers: Any) -> None:
    """Its parameters get gradients that equal finite differences, decay by their own flags, and lower the loss."""
    cfg = small_config(num_layers=4, params_dtype=torch.float64)
    specs, step = fmeg.gpt_specs(cfg, layers=layers), partial(fmeg.gpt_forward_step, layers=layers)
    assert specs["layers"]["swapped"]["attention"].keys() == {"project", "gate"}
    assert not specs["layers"]["swapped"]["attention"]["gate"].decay
    params, batch = fmeg.init_params(cfg, specs=specs), random_batch(cfg)
    grads, metrics = fmeg.make_grad_step(cfg, specs=specs, forward_step=step, compile=False)(params, batch)
    assert all(g.any() for g in tree.leaves(grads))

    direction = tree.map(lambda g: g / metrics["grad_norm"], grads)

    def loss(distance: float) -> float:
        moved = tree.map(lambda p, d: p + distance * d, params, direction)
        loss_sum, count, _ = step(moved, batch, cfg, None)
        return (loss_sum / count).item()

    assert (loss(1e-5) - loss(-1e-5)) / 2e-5 == pytest.approx(metrics["grad_norm"].item(), rel=1e-6)

    opt = fmeg.adamw(1e-2)
    train = fmeg.make_train_step(cfg, opt, specs=specs, forward_step=step, compile=False)
    state = fmeg.init_state(cfg, opt, specs=specs)
    for _ in range(5):
        state, after = train(state, batch)
    assert after["loss"] < metrics["loss"] - 0.1
    logits = fmeg.gpt_forward(state.params, batch["tokens"], cfg, layers=layers)
    assert logits.shape == (4, 16, 96)


def test_one_layer_given_for_all_is_the_default_model() -> None:
    cfg = small_config()
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    want = fmeg.gpt_forward(params, tokens, cfg)
    for layers in (LayerSpec(), [LayerSpec(), LayerSpec()], fmeg.get_gpt_layer_local_spec(cfg)):
        assert torch.equal(fmeg.gpt_forward(params, tokens, cfg, layers=layers), want)


def test_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^layers holds 3 LayerSpecs for num_layers 2: give one, or one per layer$"):
        fmeg.gpt_specs(small_config(), layers=(LayerSpec(),) * 3)


def test_attention_alone_can_be_swapped() -> None:
    """With the rest as the config says, including its own specs, also over a config's window."""
    cfg = small_config(window_size=(3, 0))
    spec = dataclasses.replace(
        fmeg.get_gpt_layer_local_spec(cfg), attention=Sublayer(attention_specs, partial(attention, window=(1, 0)))
    )
    params, tokens = fmeg.init_params(cfg), random_batch(cfg)["tokens"]
    have = fmeg.gpt_forward(params, tokens, cfg, layers=spec)
    assert torch.equal(have, fmeg.gpt_forward(params, tokens, cfg.replace(window_size=(1, 0))))

"""The MLP by its formula, activations against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import RELATIVE, assert_trees_close, small_config
from torch import Tensor

from fmeg import tree
from fmeg.layers.mlp import activation, mlp, mlp_specs
from fmeg.params import init_from_specs

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "silu": torch.nn.SiLU(),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_torchs(name: str) -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    assert_trees_close(activation(x, name), ACTIVATIONS[name](x), rtol=RELATIVE[torch.float64])


def test_gelu_is_the_exact_one() -> None:
    """x times the normal distribution function; the tanh form is 4.7e-4 away at its worst."""
    x = torch.linspace(-4, 4, 801, dtype=torch.float64)
    exact = x * 0.5 * (1 + torch.erf(x / 2**0.5))
    assert_trees_close(activation(x, "gelu"), exact, rtol=RELATIVE[torch.float64])
    assert 4e-4 < (activation(x, "gelu_tanh") - exact).abs().max() < 5e-4


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^activation is 'relu': must be gelu, gelu_tanh, silu or squared_relu$"):
        activation(torch.zeros(1), "relu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_formula(name: str, gated: bool, bias: bool) -> None:
    """act(x Wup + bup) Wdown + bdown; gated: the activation is on the gate, and multiplies the plain projection."""
    cfg = small_config(activation=name, gated_linear_unit=gated, add_bias_linear=bias, params_dtype=torch.float64)
    specs = mlp_specs(cfg)
    assert specs.keys() == ({"gate", "up", "down"} if gated else {"up", "down"})
    gen = torch.Generator().manual_seed(0)
    params = tree.map(
        lambda p: torch.randn(p.shape, generator=gen, dtype=p.dtype), init_from_specs(specs, seed=0, dtype=torch.float64)
    )
    x = torch.randn(2, 3, 32, generator=gen, dtype=torch.float64)

    def project(part: str, x: Tensor) -> Tensor:
        return F.linear(x, params[part]["weight"].mT, params[part].get("bias"))

    act = ACTIVATIONS[name]
    hidden = act(project("gate", x)) * project("up", x) if gated else act(project("up", x))
    assert_trees_close(mlp(params, x, cfg, None), project("down", hidden), rtol=RELATIVE[torch.float64])

"""A model on a simulated mesh computes what it computes on one device: losses, metrics, every gradient, and updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers import RELATIVE, assert_trees_close, assert_trees_equal, random_batch, small_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmeg
from fmeg import random, tree
from fmeg.params import unshard_tree

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are six times slower on two threads that wait for a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    """A config, the number of data-parallel ranks, and how the batch is drawn and cut."""

    cfg: fmeg.TransformerConfig
    data_parallel_size: int
    microbatches: int
    sequences: int
    length: int
    seed: int

    @property
    def key(self) -> Tensor | None:
        return random.key(self.seed) if self.cfg.hidden_dropout else None


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    """Any options of the layers, on any mesh of up to 8 tensor- and 4 data-parallel ranks."""

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    tp, dp = pick(*[(tp, dp) for tp in (1, 2, 4, 8) for dp in (1, 2, 4) if tp * dp > 1])
    heads = pick(*[n for n in (1, 2, 4, 6, 8, 12) if n % tp == 0])
    groups = pick(*[n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)])
    hidden, layers = pick(16, 24, 32), pick(1, 2)
    channels = pick(*([None] if hidden % heads == 0 else []), 4, 6, 8)
    head_dim = hidden // heads if channels is None else channels
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "ffn_hidden_size": tp * pick(3, 4),
        "normalization": pick("LayerNorm", "RMSNorm"),
        "layernorm_zero_centered_gamma": pick(False, True),
        "activation": pick("gelu", "gelu_tanh", "silu", "squared_relu"),
        "gated_linear_unit": pick(False, True),
        "add_bias_linear": pick(False, True),
        "add_qkv_bias": pick(False, True),
        # A norm over fewer dimensions saturates: its result is a sign, and its gradient is rounding.
        "qk_layernorm": head_dim >= 4 and pick(False, True),
        "softmax_scale": pick(None, 0.3),
        "share_embeddings_and_output_weights": pick(False, True),
        "label_smoothing": pick(0.0, 0.1),
        "z_loss_coeff": pick(0.0, 0.1),
        "vocab_size": pick(16, 17, 31, 48),
        "make_vocab_size_divisible_by": pick(1, 3, 8),
        "attention_backend": pick("auto", "unfused"),
        "loss_chunk_tokens": pick(512, 5),
    }
    # A window of (0, 0) is left out: attention to one position has no gradient to compare but rounding.
    if pick(False, True):
        fields["window_size"] = (pick(1, 2, 5), 0)
        fields["window_attn_skip_freq"] = pick(None, 2, tuple(draw(st.integers(0, 1)) for _ in range(layers)))
    percents = [p for p in (1.0, 0.7, 0.5) if int(head_dim * p) % 2 == 0 and int(head_dim * p)]
    fields["position_embedding_type"] = pick("learned_absolute", "none", *(["rope"] * 3 if percents else []))
    if fields["position_embedding_type"] == "rope":
        llama3 = fmeg.Llama3RopeScaling(original_max_position_embeddings=32)
        yarn = fmeg.YarnRopeScaling(factor=4.0, original_max_position_embeddings=32)
        fields |= {"rotary_percent": pick(*percents), "rotary_interleaved": pick(False, True)}
        fields["rope_scaling"] = pick(None, llama3, yarn)
    rate = pick(0.0, 0.1)
    cfg = fmeg.TransformerConfig(
        **fields,
        params_dtype=dtype,
        max_position_embeddings=16,
        init_method_std=0.2,
        hidden_dropout=rate,
        attention_dropout=rate,
        tensor_model_parallel_size=tp,
        sequence_parallel=pick(False, True),
    )
    microbatches = pick(1, 2, 3, 4)
    return Case(cfg, dp, microbatches, dp * microbatches * pick(1, 2), pick(8, 16), draw(st.integers(0, 2**31)))


def one_device(cfg: fmeg.TransformerConfig) -> fmeg.TransformerConfig:
    return cfg.replace(tensor_model_parallel_size=1, sequence_parallel=False)


def lively_params(cfg: fmeg.TransformerConfig, seed: int) -> Any:
    """Parameters as large as initial ones, but no bias is zero and no norm weight is 1, so that none of them can be left out
    unseen; and neither is the padding.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(spec: fmeg.ParamSpec) -> Tensor:
        noise = torch.randn(spec.stored, generator=generator, dtype=torch.float64) * math.hypot(spec.init.std, 0.1)
        return (noise + (spec.init.kind == "ones")).to(cfg.params_dtype)

    return tree.map(draw, fmeg.gpt_specs(cfg))


def uneven_batch(case: Case) -> dict[str, Tensor]:
    """Weights of 0, 0.5 and 1, whose sums are exact in any order; every third row has no token at all."""
    batch = random_batch(case.cfg, case.sequences, case.length, case.seed)
    weights = batch["loss_mask"] * torch.where(batch["labels"] % 3 == 0, 0.5, 1.0)
    weights[1::3] = 0
    # The first position attends to nothing but itself: with no other one, queries would have no gradient but rounding.
    weights[0, -1] = 1
    return batch | {"loss_mask": weights}


def whole(grads: Any, cfg: fmeg.TransformerConfig, mesh: fmeg.Mesh) -> Any:
    """The tree on one device, after a look at every rank: all of them must hold the same bits."""
    specs = fmeg.gpt_specs(cfg)
    parts = fmeg.on_mesh(lambda ctx, grads: unshard_tree(grads, specs, cfg, ctx), mesh)(grads)
    for path, leaf in tree.flatten_with_path(parts):
        assert torch.equal(leaf, leaf[:1].expand_as(leaf)), f"{path} differs between ranks"
    return tree.map(lambda leaf: leaf[0], parts)


def assert_gradients_close(have: Any, want: Any, cfg: fmeg.TransformerConfig) -> None:
    """Every leaf within RELATIVE of its largest element.

    Without rope, what is added to all keys of a head alike adds one number to all of a row's scores, which the softmax
    ignores: the gradients of the key's bias, or with qk_layernorm of the key norm's, are zero but for rounding. They are
    judged by the size of the query's.
    """
    rtol, wanted = RELATIVE[cfg.params_dtype], dict(tree.flatten_with_path(want))
    shift = "attention/key_norm/bias" if cfg.qk_layernorm else "attention/key/bias"
    assert [path for path, _ in tree.flatten_with_path(have)] == list(wanted)
    for path, got in tree.flatten_with_path(have):
        judge = path
        if path.endswith(shift) and cfg.position_embedding_type != "rope":
            judge = path.replace("/key", "/query")
        assert got.shape == wanted[path].shape and got.dtype == wanted[path].dtype, path
        error, scale = (got - wanted[path]).abs().max(), wanted[judge].abs().max()
        assert error <= rtol * scale, f"{path}: differs by {error / scale:.1e} of its largest element, allowed {rtol:.0e}"


def check_parity(case: Case) -> None:
    cfg, alone = case.cfg, one_device(case.cfg)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=case.data_parallel_size)
    params, batch = lively_params(alone, case.seed), uneven_batch(case)
    want, metrics = fmeg.make_grad_step(alone, key=case.key, compile=False)(params, batch)
    step = fmeg.make_grad_step(cfg, mesh=mesh, key=case.key, compile=False, num_microbatches=case.microbatches)
    grads, mesh_metrics = step(fmeg.shard_params(params, cfg, mesh), batch)
    assert_trees_close(mesh_metrics, metrics, rtol=RELATIVE[cfg.params_dtype])
    assert_gradients_close(whole(grads, cfg, mesh), want, cfg)


@given(cases(torch.float64))
@settings(deadline=None, derandomize=True, max_examples=240, suppress_health_check=QUIET)
def test_loss_metrics_and_every_gradient_are_those_of_one_device(case: Case) -> None:
    check_parity(case)


@given(cases(torch.float32))
@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=QUIET)
def test_loss_metrics_and_every_gradient_are_those_of_one_device_in_fp32(case: Case) -> None:
    check_parity(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=3000, suppress_health_check=QUIET)
def test_loss_metrics_and_every_gradient_are_those_of_one_device_in_3000_cases(data: st.DataObject) -> None:
    check_parity(data.draw(cases(data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32])))))


@given(cases(torch.float64))
@settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=QUIET)
def test_logits_are_those_of_one_device(case: Case) -> None:
    cfg, alone = case.cfg, one_device(case.cfg)
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=case.data_parallel_size)
    params, tokens = lively_params(alone, case.seed), uneven_batch(case)["tokens"]
    logits = fmeg.gpt_forward(fmeg.shard_params(params, cfg, mesh), tokens, cfg, mesh=mesh)
    assert_trees_close(logits, fmeg.gpt_forward(params, tokens, alone), rtol=RELATIVE[torch.float64])


MESHES = [(tp, dp, sp) for tp in (1, 2, 4, 8) for dp in (1, 2, 4) for sp in (False, True) if tp * dp > 1]


def mesh_config(tp: int, sp: bool, **changes: Any) -> fmeg.TransformerConfig:
    fields = {"num_attention_heads": 8, "vocab_size": 90, "make_vocab_size_divisible_by": 4, "qk_layernorm": True}
    return small_config(**fields | {"tensor_model_parallel_size": tp, "sequence_parallel": sp} | changes)


@pytest.mark.parametrize(("tp", "dp", "sp"), MESHES)
def test_initial_weights_are_the_same_bits_on_every_mesh(tp: int, dp: int, sp: bool) -> None:
    for tied in (False, True):
        changes = {"share_embeddings_and_output_weights": tied, "position_embedding_type": "learned_absolute"}
        cfg = mesh_config(tp, sp, **changes, add_bias_linear=True)
        mesh = fmeg.simulated_mesh(cfg, data_parallel_size=dp)
        want = fmeg.init_params(one_device(cfg), seed=7)
        params = fmeg.init_params(cfg, seed=7, mesh=mesh)
        assert_trees_equal(whole(params, cfg, mesh), want)
        assert_trees_equal(params, fmeg.shard_params(want, cfg, mesh))


OPTIMIZERS = {
    "sgd": fmeg.sgd(0.5, momentum=0.9, weight_decay=0.1, clip_grad=0.05),
    "adamw": fmeg.adamw(1e-2, weight_decay=0.1, clip_grad=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("tp", "dp", "sp"), [(2, 1, False), (1, 2, False), (4, 2, True), (8, 1, True), (4, 4, False)])
def test_two_clipped_steps_end_in_the_state_of_one_device(name: str, tp: int, dp: int, sp: bool) -> None:
    """With rope: without it, key biases have a zero gradient, and Adam divides its rounding by its own size."""
    cfg, opt = mesh_config(tp, sp, params_dtype=torch.float64, add_bias_linear=True), OPTIMIZERS[name]
    mesh = fmeg.simulated_mesh(cfg, data_parallel_size=dp)
    state, parts = fmeg.init_state(one_device(cfg), opt), fmeg.init_state(cfg, opt, mesh=mesh)
    step = fmeg.make_train_step(one_device(cfg), opt, compile=False)
    mesh_step = fmeg.make_train_step(cfg, opt, mesh=mesh, compile=False, num_microbatches=2)
    for seed in range(2):
        batch = random_batch(cfg, 8, seed=seed)
        state, want = step(state, batch)
        parts, metrics = mesh_step(parts, batch)
        assert want["grad_norm"] > 0.05  # clipping takes part
        assert_trees_close(metrics, want, rtol=RELATIVE[torch.float64])
    assert parts.step.tolist() == [2] * mesh.world_size

    def close(have: Any, want: Any) -> None:
        assert_trees_close(whole(have, cfg, mesh), want, rtol=RELATIVE[torch.float64])

    close(parts.params, state.params)
    if name == "adamw":
        close(parts.opt_state[1].mu, state.opt_state[1].mu)
        close(parts.opt_state[1].nu, state.opt_state[1].nu)
    else:
        close(parts.opt_state[2].buffer, state.opt_state[2].buffer)

"""megatron-core 0.19: logits, losses, every gradient, and five AdamW steps, from the files in tests/data/megatron.

The files hold `param.*` and `grad.*`, the per-token loss of each microbatch [M, B, T], and the logits of the first one;
those of five steps hold `curve`, the loss and the gradient norm of each step, and `update.*`, final minus initial
weights as int16 multiples of 2^-22.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gradient_errors
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import fmeg
from fmeg import tree
from fmeg.checkpoint.megatron import from_megatron, to_megatron

DATA = Path(__file__).parent.parent / "data" / "megatron"
GRADIENTS = ["gpt_learned_gelu_tied", "gpt_qknorm_window_partial_interleaved_rope", "gpt_rope_swiglu_gqa"]
STEPS = ["gpt_rope_swiglu_gqa_5_steps", "gpt_tied_5_steps"]
TOLERANCE = 1e-5


class Oracle:
    """One file: its config, its batch, and its tensors by what their names start with."""

    def __init__(self, name: str) -> None:
        file = DATA / f"{name}.safetensors"
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata()
        self.tensors = load_file(file)
        self.args, self.config = json.loads(metadata["args"]), json.loads(metadata["config"])
        self.curve = json.loads(metadata.get("curve", "[]"))
        self.microbatches = len(self.tensors["tokens"])
        self.batch = {key: self.tensors[key].flatten(0, 1) for key in ("tokens", "labels")}

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}

    def cfg(self) -> fmeg.TransformerConfig:
        same = (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "kv_channels",
        )
        same += ("layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "rotary_interleaved")
        same += ("normalization", "qk_layernorm")
        window = self.config["window_size"]
        return fmeg.TransformerConfig(
            **{name: self.config[name] for name in same},
            vocab_size=self.args["vocab"],
            max_position_embeddings=self.args["seq"],
            activation={"swiglu": "silu", "gelu": "gelu"}[self.args["act"]],
            window_size=None if window is None else tuple(window),
            position_embedding_type={"learned": "learned_absolute", "rope": "rope"}[self.args["pos"]],
            rotary_base=self.args["rope_base"],
            rotary_percent=self.args["rope_percent"],
            share_embeddings_and_output_weights=self.args["tied"],
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )


@pytest.mark.parametrize("name", GRADIENTS)
def test_logits(name: str) -> None:
    oracle, cfg = Oracle(name), Oracle(name).cfg()
    logits = fmeg.gpt_forward(from_megatron(oracle.named("param."), cfg), oracle.tensors["tokens"][0], cfg)
    torch.testing.assert_close(logits, oracle.tensors["logits"][0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", GRADIENTS)
def test_loss_and_every_gradient(name: str) -> None:
    oracle, cfg = Oracle(name), Oracle(name).cfg()
    params, want = from_megatron(oracle.named("param."), cfg), from_megatron(oracle.named("grad."), cfg)
    for microbatches in {1, oracle.microbatches}:
        step = fmeg.make_grad_step(cfg, num_microbatches=microbatches, compile=False)
        grads, metrics = step(params, oracle.batch)
        torch.testing.assert_close(metrics["loss"], oracle.tensors["loss"].mean(), rtol=0, atol=TOLERANCE)
        for path, error in gradient_errors(grads, want, cfg).items():
            assert error < TOLERANCE, f"{path}, {microbatches} microbatches: {error}"


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_logits_loss_and_every_gradient_on_two_tensor_parallel_ranks(name: str, sp: bool) -> None:
    oracle, alone = Oracle(name), Oracle(name).cfg()
    cfg = alone.replace(tensor_model_parallel_size=2, sequence_parallel=sp)
    mesh, want = fmeg.simulated_mesh(cfg), from_megatron(oracle.named("grad."), alone)
    params = fmeg.shard_params(from_megatron(oracle.named("param."), alone), cfg, mesh)
    logits = fmeg.gpt_forward(params, oracle.tensors["tokens"][0], cfg, mesh=mesh)
    torch.testing.assert_close(logits, oracle.tensors["logits"][0], rtol=0, atol=TOLERANCE)
    for microbatches in {1, oracle.microbatches}:
        step = fmeg.make_grad_step(cfg, mesh=mesh, num_microbatches=microbatches, compile=False)
        grads, metrics = step(params, oracle.batch)
        torch.testing.assert_close(metrics["loss"], oracle.tensors["loss"].mean(), rtol=0, atol=TOLERANCE)
        for path, error in gradient_errors(fmeg.unshard_params(grads, cfg, mesh), want, alone).items():
            assert error < TOLERANCE, f"{path}, {microbatches} microbatches: {error}"


@pytest.mark.parametrize("name", GRADIENTS)
def test_loss_of_each_token(name: str) -> None:
    oracle, cfg = Oracle(name), Oracle(name).cfg()
    params = from_megatron(oracle.named("param."), cfg)
    logits = fmeg.gpt_forward(params, oracle.batch["tokens"], cfg)
    loss = -torch.log_softmax(logits, -1).gather(-1, oracle.batch["labels"][..., None]).squeeze(-1)
    torch.testing.assert_close(loss, oracle.tensors["loss"].flatten(0, 1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", STEPS)
def test_five_steps(name: str, microbatches: int) -> None:
    oracle, cfg = Oracle(name), Oracle(name).cfg()
    start = from_megatron(oracle.named("param."), cfg)
    # This run of Megatron decayed every parameter; fmeg spares norm weights and biases unless specs say otherwise.
    specs = tree.map(lambda spec: dataclasses.replace(spec, decay=True), fmeg.gpt_specs(cfg))
    opt = fmeg.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_grad=1.0)
    step = fmeg.make_train_step(cfg, opt, num_microbatches=microbatches, compile=False, specs=specs)
    first, _ = fmeg.make_grad_step(cfg, compile=False)(start, oracle.batch)
    state = fmeg.TrainState(torch.tensor(0), start, opt.init(start))
    for loss, norm in oracle.curve:
        state, metrics = step(state, oracle.batch)
        assert metrics["loss"].item() == pytest.approx(loss, rel=TOLERANCE)
        assert metrics["grad_norm"].item() == pytest.approx(norm, rel=TOLERANCE)
    updates = from_megatron({key: value.float() / 2**22 for key, value in oracle.named("update.").items()}, cfg)
    for path, error in tree.flatten_with_path(tree.map(update_error, state.params, start, updates, first)):
        assert error < TOLERANCE, f"{path}: {error}"


def update_error(param: Tensor, start: Tensor, update: Tensor, first: Tensor) -> float:
    """The largest deviation of a leaf's update, a tenth of it where the first gradient is nothing but rounding.

    Adam divides such a gradient (a handful of elements in 300,000) by its own size: its sign decides the update.
    """
    noise = (first != 0) & (first.abs() < 1e-5 * first.abs().max())
    return torch.where(noise, 0.1, 1.0).mul(param - start - update).abs().max().item()


@pytest.mark.parametrize("name", GRADIENTS + STEPS)
def test_import_then_export_is_bit_exact(name: str) -> None:
    oracle, cfg = Oracle(name), Oracle(name).cfg()
    assert_same(to_megatron(from_megatron(oracle.named("param."), cfg), cfg), oracle.named("param."))


def small(**changes: Any) -> fmeg.TransformerConfig:
    fields = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
    return fmeg.TransformerConfig(**fields | {"vocab_size": 96, "hidden_dropout": 0.0} | changes)


def state_dict(cfg: fmeg.TransformerConfig, seed: int = 0) -> dict[str, Tensor]:
    """A state dict in which every number is another one, so that nothing can be mixed up unseen."""
    gen = torch.Generator().manual_seed(seed)
    names = to_megatron(fmeg.init_params(cfg), cfg)
    return {name: torch.randn(value.shape, generator=gen, dtype=cfg.params_dtype) for name, value in names.items()}


def test_fused_qkv_rows_follow_the_query_groups() -> None:
    """4 heads, 2 groups, head dimension 16 (not 48 / 4): rows q0 q1 k0 v0 q2 q3 k1 v1."""
    cfg = small()
    source = state_dict(cfg)
    params = from_megatron(source, cfg)
    attention = params["layers"]["dense"]["attention"]
    for layer in range(2):
        for what, leaf in (("weight", "weight"), ("bias", "bias")):
            rows = source[f"decoder.layers.{layer}.self_attention.linear_qkv.{what}"].split(16)
            order = [("query", 0), ("query", 1), ("key", 0), ("value", 0)]
            order += [("query", 2), ("query", 3), ("key", 1), ("value", 1)]
            for (name, head), row in zip(order, rows, strict=True):
                assert torch.equal(
                    attention[name][leaf][layer][..., head, :].mT if row.ndim == 2 else attention[name][leaf][layer][head],
                    row,
                )
    assert_same(to_megatron(params, cfg), source)


def test_gated_fc1_is_gate_above_up() -> None:
    cfg = small(gated_linear_unit=True, activation="silu", ffn_hidden_size=40)
    source = state_dict(cfg)
    params = from_megatron(source, cfg)
    gate, up = source["decoder.layers.1.mlp.linear_fc1.weight"].split(40)
    assert torch.equal(params["layers"]["dense"]["mlp"]["gate"]["weight"][1], gate.mT)
    assert torch.equal(params["layers"]["dense"]["mlp"]["up"]["weight"][1], up.mT)
    assert_same(to_megatron(params, cfg), source)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_query_groups": 1, "add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True},
        {"qk_layernorm": True, "normalization": "LayerNorm", "share_embeddings_and_output_weights": True},
        {"normalization": "RMSNorm", "position_embedding_type": "rope", "layernorm_zero_centered_gamma": True},
        {"num_layers": 5, "window_size": (3, 0), "window_attn_skip_freq": 2},
        {"num_layers": 6, "window_size": (3, 0), "window_attn_skip_freq": (1, 1, 0, 1, 1, 0)},
        {"params_dtype": torch.bfloat16},
        {"params_dtype": torch.float64},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_config_goes_and_comes_back(changes: dict[str, Any]) -> None:
    cfg = small(**changes)
    source = state_dict(cfg)
    params = from_megatron(source, cfg)
    assert_same(to_megatron(params, cfg), source)
    fmeg.gpt_forward(params, torch.tensor([[1, 2, 3]]), cfg.replace(attention_dropout=0.0, attention_backend="unfused"))


def test_layers_of_a_mixture_keep_their_order() -> None:
    cfg = small(num_layers=5, window_size=(3, 0), window_attn_skip_freq=(1, 1, 0, 1, 0))
    source = state_dict(cfg)
    stacks = from_megatron(source, cfg)["layers"]
    places = [("windowed", 0), ("windowed", 1), ("dense", 0), ("windowed_2", 0), ("dense_2", 0)]
    for layer, (stack, index) in enumerate(places):
        scale = stacks[stack]["mlp_norm"]["scale"][index]
        assert torch.equal(scale, source[f"decoder.layers.{layer}.pre_mlp_layernorm.weight"])


def test_transformer_engine_names_and_extra_state() -> None:
    cfg = small()
    source = state_dict(cfg)
    renamed: dict[str, Any] = {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}
    for name, value in source.items():
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        renamed[name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")] = value
    assert renamed.keys().isdisjoint({"decoder.layers.0.input_layernorm.weight"})
    assert_same(to_megatron(from_megatron(renamed, cfg), cfg), source)
    with pytest.raises(ValueError, match=r"holds decoder.layers.0.input_layernorm.weight twice, as"):
        from_megatron(source | renamed, cfg)


def test_padding_is_cut_on_import_and_zero_in_storage() -> None:
    cfg = small()
    source = state_dict(cfg)
    padded = dict(source)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padded[name] = torch.cat([source[name], torch.full((160, 48), 7.0)])
    params = from_megatron(padded, cfg)
    assert params["output"]["weight"].shape == (128, 48)
    assert not params["output"]["weight"][96:].any()
    assert_same(to_megatron(params, cfg), source)


def test_nothing_is_shared_between_the_two_sides() -> None:
    cfg = small()
    source = state_dict(cfg)
    params = from_megatron(source, cfg)
    exported = to_megatron(params, cfg)
    taken = {p.untyped_storage().data_ptr() for p in (*source.values(), *tree.leaves(params))}
    assert taken.isdisjoint({value.untyped_storage().data_ptr() for value in exported.values()})
    assert all(value.is_contiguous() for value in exported.values())


def test_a_tied_head_may_repeat_the_embedding() -> None:
    cfg = small(share_embeddings_and_output_weights=True)
    source = state_dict(cfg)
    head = source["embedding.word_embeddings.weight"].clone()
    assert_same(to_megatron(from_megatron(source | {"output_layer.weight": head}, cfg), cfg), source)
    with pytest.raises(ValueError, match=r"output_layer.weight differs from embedding.word_embeddings.weight"):
        from_megatron(source | {"output_layer.weight": head + 1}, cfg)


def test_names_shapes_and_dtypes_are_refused_by_name() -> None:
    cfg = small()
    source = state_dict(cfg)
    missing = {name: value for name, value in source.items() if name != "decoder.layers.1.mlp.linear_fc2.bias"}
    with pytest.raises(ValueError, match=r"missing decoder.layers.1.mlp.linear_fc2.bias; unexpected none"):
        from_megatron(missing, cfg)
    with pytest.raises(ValueError, match=r"missing none; unexpected decoder.layers.2.mlp.router.weight"):
        from_megatron(source | {"decoder.layers.2.mlp.router.weight": torch.zeros(2)}, cfg)
    with pytest.raises(ValueError, match=r"linear_qkv.weight has shape \(128, 48\): the config asks for \(192, 48\)"):
        from_megatron(source, cfg.replace(num_query_groups=4))
    with pytest.raises(ValueError, match=r"word_embeddings.weight has shape \(96, 48\): the config asks for \(97, 48\)"):
        from_megatron(source, cfg.replace(vocab_size=97))
    with pytest.raises(ValueError, match=r"is torch.float32, which params_dtype torch.bfloat16 does not hold exactly"):
        from_megatron(source, cfg.replace(params_dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="mesh is 'tp'"):
        from_megatron(source, cfg, mesh="tp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameters do not match the config"):
        to_megatron(from_megatron(source, cfg), cfg.replace(num_layers=3))


def test_narrower_dtypes_are_widened() -> None:
    cfg = small()
    source = state_dict(cfg.replace(params_dtype=torch.bfloat16))
    params = from_megatron(source, cfg)
    assert {p.dtype for p in tree.leaves(params)} == {torch.float32}
    assert_same({name: value.bfloat16() for name, value in to_megatron(params, cfg).items()}, source)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name

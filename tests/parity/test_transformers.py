"""Random models of every architecture, by transformers itself: its files are read, ours load there, and logits agree."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import fmeg
from fmeg import tree
from fmeg.checkpoint.hf_config import find_architecture
from fmeg.checkpoint.huggingface import from_hf, hf_family, to_hf
from fmeg.checkpoint.mapping import read

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPE = {"rope_theta": 1e4}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3 | ROPE | {"rope_type": "llama3"}}),
    "llama_biases_tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_yarn": (
        "Llama",
        {"rope_parameters": YARN | ROPE | {"rope_type": "yarn", "mscale": 2.0, "mscale_all_dim": 0.5}},
    ),
    "qwen2": ("Qwen2", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2_windows_yarn": (
        "Qwen2",
        SLIDING | {"layer_types": MIXED, "rope_parameters": YARN | ROPE | {"rope_type": "yarn", "truncate": False}},
    ),
    "qwen2_upper_windows": ("Qwen2", SLIDING | {"max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_windows_llama3": (
        "Qwen3",
        SLIDING | {"head_dim": 12, "layer_types": MIXED[:2] * 2, "rope_parameters": LLAMA3 | ROPE | {"rope_type": "llama3"}},
    ),
    "mistral": ("Mistral", {"sliding_window": 5, "num_key_value_heads": 1}),
    "mistral_odd": ("Mistral", {"sliding_window": None, "hidden_size": 50, "head_dim": 16}),
    "gpt2": ("GPT2", {}),
    "gpt2_untied": (
        "GPT2",
        {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu", "scale_attn_weights": False},
    ),
}
SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 90, "max_position_embeddings": 64}
GPT2_SIZES = {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 90}


def random_model(kind: str, options: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    ends = {"bos_token_id": None, "eos_token_id": None}
    sizes = GPT2_SIZES if kind == "GPT2" else SIZES
    config = getattr(transformers, f"{kind}Config")(**sizes | ends | options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # also what starts as all zeros or ones
            parameter.add_(torch.randn(parameter.shape, generator=gen), alpha=0.1)
    return model


@pytest.fixture
def quiet() -> Any:
    """transformers logs a few lines and draws progress bars."""
    transformers = pytest.importorskip("transformers")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_agrees_in_both_directions(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = random_model(*MODELS[name])
    tokens = torch.randint(90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(tokens).logits
    model.save_pretrained(tmp_path / "theirs")

    cfg, params = from_hf(tmp_path / "theirs")
    cfg = cfg.replace(attention_dropout=0.0)
    torch.testing.assert_close(fmeg.gpt_forward(params, tokens, cfg), want, rtol=0, atol=1e-5)

    to_hf(tmp_path / "ours", cfg, params, max_shard_bytes=60_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    original = model.state_dict()
    assert loaded.state_dict().keys() == original.keys()
    assert all(torch.equal(value, original[key]) for key, value in loaded.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, want, rtol=0, atol=1e-5)

    again, params_again = from_hf(tmp_path / "ours")
    assert again == cfg
    for a, b in zip(tree.leaves(params_again), tree.leaves(params), strict=True):
        assert torch.equal(a, b)


def fp64_norms(model: Any) -> Any:
    """transformers' RMSNorm computes in fp32 whatever the model's dtype; here it follows the model."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = module.variance_epsilon
            module.forward = lambda x, w=module.weight, eps=eps: w * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return model


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_rope_llama3", "llama_tied", "mistral_swa", "qwen2", "qwen3"])
def test_fp64_logits_and_every_gradient_to_nine_digits(name: str) -> None:
    """The stored fp64 logits of RMSNorm models hold fp32 rounding; without it the two agree to 1e-9, gradients too."""
    transformers = pytest.importorskip("transformers")
    directory = Path(__file__).parent.parent / "data" / "huggingface" / name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    model = fp64_norms(loaded.eval().double())
    tokens, targets = torch.randint(96, (2, 2, 24), generator=torch.Generator().manual_seed(1))
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    cfg, params = from_hf(directory)
    cfg = cfg.replace(params_dtype=torch.float64, hidden_dropout=0.0, attention_dropout=0.0)
    params = tree.map(lambda p: p.double(), params)
    torch.testing.assert_close(fmeg.gpt_forward(params, tokens, cfg), logits.detach(), rtol=0, atol=1e-9)

    grads, _ = fmeg.make_grad_step(cfg, compile=False)(params, {"tokens": tokens, "labels": targets})
    family = hf_family(find_architecture(model.config.to_dict(), name))
    theirs = {path: p.grad for path, p in model.named_parameters()}
    want = read(cfg, family, {path: path for path in theirs}, theirs.__getitem__, "gradients")
    for (path, g), (_, w) in zip(tree.flatten_with_path(grads), tree.flatten_with_path(want), strict=True):
        assert (g - w).abs().max() <= 1e-9 * w.abs().max() + 1e-15, path

"""Logits, losses and every gradient against Hugging Face models, whose numbers are stored in tests/data/huggingface.

Gradients there are fp32. transformers' RMSNorm computes in fp32 in an fp64 model too, so that logits64 of the RMSNorm
models hold 3e-7; GPT-2's are good to the last digits.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gradient_errors
from safetensors.torch import load_file
from torch import Tensor

import fmeg
from fmeg import tree
from fmeg.checkpoint.hf_config import find_architecture
from fmeg.checkpoint.huggingface import from_hf, hf_family
from fmeg.checkpoint.mapping import read

DATA = Path(__file__).parent.parent / "data" / "huggingface"
NAMES = ["gpt2", "llama", "llama_rope_llama3", "llama_tied", "mistral_swa", "qwen2", "qwen3"]
LOGITS = {torch.float32: 1e-5, torch.float64: 1e-6}
LOSS, GRADIENT = 1e-6, 1e-5  # relative: to the loss, and to the largest value of each leaf


def load(name: str, dtype: torch.dtype) -> tuple[fmeg.TransformerConfig, Any, dict[str, Tensor]]:
    cfg, params = from_hf(DATA / name)
    assert cfg.params_dtype == torch.float32
    cfg = cfg.replace(hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype)
    return cfg, tree.map(lambda p: p.to(dtype), params), load_file(DATA / name / "oracle.safetensors")


def oracle_gradients(name: str, cfg: fmeg.TransformerConfig, oracle: dict[str, Tensor]) -> Any:
    arch = find_architecture(json.loads((DATA / name / "config.json").read_text()), name)
    grads = {key.removeprefix("grad."): value for key, value in oracle.items() if key.startswith("grad.")}
    return read(cfg, hf_family(arch), {key: key for key in grads}, grads.__getitem__, "gradients")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, dtype: torch.dtype) -> None:
    cfg, params, oracle = load(name, dtype)
    logits = fmeg.gpt_forward(params, oracle["tokens"], cfg)
    want = oracle["logits64" if dtype == torch.float64 else "logits"]
    assert logits.dtype == want.dtype
    tolerance = 1e-9 if (name, dtype) == ("gpt2", torch.float64) else LOGITS[dtype]
    torch.testing.assert_close(logits, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient(name: str, dtype: torch.dtype) -> None:
    cfg, params, oracle = load(name, dtype)
    batch = {"tokens": oracle["tokens"], "labels": oracle["targets"]}
    grads, metrics = fmeg.make_grad_step(cfg, compile=False)(params, batch)
    torch.testing.assert_close(metrics["loss"].float(), oracle["loss"], rtol=LOSS, atol=0)
    for path, error in gradient_errors(grads, oracle_gradients(name, cfg, oracle), cfg).items():
        assert error < GRADIENT, f"{path}: {error}"

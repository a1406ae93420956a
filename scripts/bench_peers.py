"""The peers of scripts/bench.py that torch runs, and the loop of a peer's process.

A peer is a function `build(case) -> Built` whose `step` runs one update of the model on the same random batch. All use AdamW
with the same numbers, no decay on norms, and gradients clipped to norm 1. None keeps gradients between steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from bench import SIZES, Case, Size
from torch import Tensor, nn

LEARNING_RATE, BETAS, ADAM_EPSILON, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
CLIP_GRAD = 1.0
INIT_STD = 0.02
NORM_EPSILON = 1e-5
ROTARY_BASE = 10000.0


class Built(NamedTuple):
    """A peer that is ready to run."""

    step: Callable[[], Any]
    """One update; gives the loss before it, as an array."""
    parameters: int
    wait: Callable[[], None] = lambda: None
    """Returns when everything that the steps write is there."""
    note: str | None = None
    """What the table should say about it."""


def make_batch(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and labels [B, T], the same for every peer: what a model can learn of them is to remember them."""
    draw = np.random.default_rng(0)
    tokens, labels = (draw.integers(size.vocab, size=(size.batch, size.sequence)) for _ in range(2))
    return tokens, labels


# fmeg


def fmeg_config(size: Size, dtype: str = "fp32", ranks: int = 1) -> Any:
    """The TransformerConfig of a size."""
    import fmeg

    return fmeg.TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_query_groups=size.kv_heads,
        ffn_hidden_size=size.ffn,
        vocab_size=size.vocab,
        max_position_embeddings=size.sequence,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPSILON,
        activation="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == "bf16",
        tensor_model_parallel_size=ranks,
    )


def fmeg_optimizer() -> Any:
    """What every peer does with its gradients."""
    import fmeg

    b1, b2 = BETAS
    return fmeg.adamw(LEARNING_RATE, b1=b1, b2=b2, eps=ADAM_EPSILON, weight_decay=WEIGHT_DECAY, clip_grad=CLIP_GRAD)


def build_fmeg(case: Case) -> Built:
    """The whole step as the training loop makes it, on one device or on tensor-parallel ranks."""
    import fmeg
    from fmeg.backends.matmul import choose_kernels

    if case.ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{case.rendezvous}", rank=case.rank, world_size=case.ranks
        )
    cfg = fmeg_config(SIZES[case.size], case.dtype, case.ranks)
    mesh = fmeg.make_mesh(cfg)
    cfg = choose_kernels(cfg, mesh)  # as a training run does, so that the table can name the choice
    opt = fmeg_optimizer()
    state = fmeg.init_state(cfg, opt, seed=0, mesh=mesh)
    train_step = fmeg.make_train_step(cfg, opt, mesh=mesh, compile=case.compile, donate=True)
    batch = dict(zip(("tokens", "labels"), map(torch.from_numpy, make_batch(SIZES[case.size])), strict=True))

    def step() -> Tensor:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics["loss"]

    return Built(step, fmeg.count_params(fmeg.gpt_specs(cfg)), note=f"matmul kernel {cfg.matmul_kernel}")


# An nn.Module as one would write it; its parameters have Hugging Face's names, so that tests can copy them.


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, by torch's fused kernel."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.q_proj = nn.Linear(size.hidden, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R) of x [B, N, T, 2R] by their angles [T, R], in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.hidden, NORM_EPSILON)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden, NORM_EPSILON)
        self.mlp = MLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, NORM_EPSILON)
        self.lm_head = nn.Linear(size.hidden, size.vocab, bias=False)
        freqs = ROTARY_BASE ** (-torch.arange(0, size.head_dim, 2).float() / size.head_dim)
        angles = torch.arange(size.sequence).float()[:, None] * freqs
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))


def build_module(case: Case) -> Built:
    """The nn.Module, eager."""
    return torch_step(initialize(GPT(SIZES[case.size])), case, compile=False)


def build_module_compiled(case: Case) -> Built:
    """The nn.Module, compiled."""
    return torch_step(initialize(GPT(SIZES[case.size])), case, compile=True)


def build_huggingface(case: Case) -> Built:
    """transformers' Llama, compiled."""
    model = initialize(huggingface_model(SIZES[case.size]))
    return torch_step(model, case, compile=case.compile, forward=lambda tokens: model(input_ids=tokens, use_cache=False).logits)


def huggingface_model(size: Size) -> Any:
    """LlamaForCausalLM of a size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.sequence,
        rms_norm_eps=NORM_EPSILON,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def initialize(model: nn.Module) -> nn.Module:
    """Megatron-LM's initial values, so that the peers' losses can be compared."""
    torch.manual_seed(0)
    layers = sum(name.endswith("o_proj.weight") for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        if p.ndim > 1:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(p, std=INIT_STD / (2 * layers) ** 0.5 if last else INIT_STD)
    return model


def torch_step(model: nn.Module, case: Case, *, compile: bool, forward: Callable[[Tensor], Tensor] | None = None) -> Built:
    """A training loop's body around a module."""
    forward = model if forward is None else forward
    tokens, labels = map(torch.from_numpy, make_batch(SIZES[case.size]))
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LEARNING_RATE, BETAS, ADAM_EPSILON, fused=True)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if case.dtype == "bf16" else contextlib.nullcontext():
            return token_loss(forward(tokens), labels)

    loss_fn = torch.compile(loss_of) if compile else loss_of

    def step() -> Tensor:
        loss = loss_fn(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_GRAD, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Built(step, sum(p.numel() for p in parameters))


def build_jax(case: Case) -> Built:
    """The jax peer, in its own file because it imports jax."""
    import bench_jax

    return bench_jax.build(case, make_batch(SIZES[case.size]))


BUILDERS: dict[str, Callable[[Case], Built]] = {
    "fmeg": build_fmeg,
    "module": build_module,
    "module-compiled": build_module_compiled,
    "huggingface": build_huggingface,
    "jax": build_jax,
}


# The machine's own speed


def measure_products(size: Size) -> list[dict[str, Any]]:
    """GFLOP/s of the model's largest matrix products in fp32, by each kernel that torch has."""
    found = []
    for M, K, N in size.matmul_shapes:
        x, w_NK = torch.randn(M, K), torch.randn(N, K)
        w_KN = w_NK.t().contiguous()
        kernels: dict[str, Callable[[], Tensor]] = {
            "torch.mm, w row major": lambda x=x, w=w_KN: torch.mm(x, w),
            "torch.mm, w transposed": lambda x=x, w=w_NK: torch.mm(x, w.t()),
        }
        if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            one_dnn = torch.ops.mkldnn._linear_pointwise
            kernels["oneDNN linear"] = lambda x=x, w=w_NK, f=one_dnn: f(x, w, None, "none", [], "")
        for name, kernel in kernels.items():
            kernel()
            start = time.perf_counter()
            kernel()
            seconds = time.perf_counter() - start
            found.append({"kernel": name, "shape": f"{M} x {K} x {N}", "gflops": 2 * M * K * N / seconds / 1e9})
    return found


# The loop of a peer's process


def serve(case: Case, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer the requests on stdin, a line each: `start` builds and runs the first step, `memory` measures one, `run N` N."""
    torch.set_num_threads(case.threads)
    built: Built | None = None
    for line in sys.stdin:
        request, *count = line.split()
        if case.peer == "matmul":
            answer({"products": measure_products(SIZES[case.size])})
        elif request == "start":
            built = BUILDERS[case.peer](case)
            cpu = _cpu_seconds_of_all()
            reply = _timed(built, 1)
            answer({**reply, "cpu": _cpu_seconds_of_all() - cpu, "parameters": built.parameters, "note": built.note})
        elif request == "memory":
            assert built is not None
            before = _reset_peak()
            reply = _timed(built, 1)
            answer({**reply, "memory": None if before is None else {"before": before, "peak": _status("VmHWM")}})
        else:
            assert built is not None
            answer(_timed(built, int(count[0])))


def _timed(built: Built, steps: int) -> dict[str, Any]:
    """Run some steps: seconds on the clock, user and system seconds of this process, and every step's loss."""
    wall, cpu = time.perf_counter(), time.process_time()
    losses = [built.step() for _ in range(steps)]
    built.wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"steps": steps, "wall": wall, "cpu": cpu, "losses": [float(loss) for loss in losses]}


def _cpu_seconds_of_all() -> float:
    """User and system seconds of this process and its descendants, dead or alive: compilers are processes of their own."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))  # user, system, and both of children waited for

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    return sum(n for pid, n in ticks.items() if ours(pid)) / os.sysconf("SC_CLK_TCK")


def _reset_peak() -> int | None:
    """Give freed memory back, forget the peak so far, and say how much is resident; None where the kernel does not let us."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def main() -> None:
    # Answers go where stdout went; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    try:
        serve(Case(**json.loads(sys.argv[1])), answer)
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        sys.exit(1)


if __name__ == "__main__":
    main()

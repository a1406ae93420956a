"""scripts/bench.py: the peers compute the same model, and a run end to end. Never how fast anything is."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import RELATIVE
from safetensors.torch import load_file

import fmeg
from fmeg import tree

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


def by_hf_name(params: Any, cfg: fmeg.TransformerConfig, directory: Path) -> dict[str, torch.Tensor]:
    """fmeg's tree of parameters or gradients, by Hugging Face's names without their prefix."""
    fmeg.to_hf(directory, cfg, params)
    return {name.removeprefix("model."): value for name, value in load_file(directory / "model.safetensors").items()}


class Reference(NamedTuple):
    """What fmeg computes from some weights, all by Hugging Face's names."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    """Of three updates."""
    grads: dict[str, torch.Tensor]
    """Of the first."""


def fmeg_reference(directory: Path) -> Reference:
    """At the size tiny, on the bench's batch."""
    from bench import SIZES
    from bench_peers import fmeg_config, fmeg_optimizer, make_batch

    cfg = fmeg_config(SIZES["tiny"])
    params = fmeg.init_params(cfg, seed=3)

    def uneven(path: str, p: torch.Tensor) -> torch.Tensor:
        """Norm weights of one would hide a norm that does not use them."""
        return p + 0.1 * torch.arange(p.numel()).reshape(p.shape).sin() if "norm" in path else p

    params = tree.map_with_path(uneven, params)
    batch = dict(zip(("tokens", "labels"), map(torch.from_numpy, make_batch(SIZES["tiny"])), strict=True))
    grads, _ = fmeg.make_grad_step(cfg, compile=False)(params, batch)
    opt = fmeg_optimizer()
    step = fmeg.make_train_step(cfg, opt, compile=False)
    state, losses = fmeg.init_state(cfg, opt)._replace(params=params), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return Reference(by_hf_name(params, cfg, directory / "params"), losses, by_hf_name(grads, cfg, directory / "grads"))


def assert_same(losses: list[float], grads: dict[str, torch.Tensor], want: Reference) -> None:
    assert losses == pytest.approx(want.losses, rel=1e-5)
    assert grads.keys() == want.grads.keys()
    for name, grad in grads.items():
        error = ((grad - want.grads[name]).abs().max() / want.grads[name].abs().max()).item()
        assert error <= RELATIVE[torch.float32], f"{name}: {error:.1e}"


@pytest.mark.parametrize("peer", ["module", "huggingface"])
def test_torch_peers_have_fmegs_gradients_and_updates(peer: str, tmp_path: Path) -> None:
    from bench import SIZES, Case
    from bench_peers import GPT, huggingface_model, make_batch, token_loss, torch_step

    size = SIZES["tiny"]
    want = fmeg_reference(tmp_path)
    tokens, labels = map(torch.from_numpy, make_batch(size))
    if peer == "huggingface":
        pytest.importorskip("transformers")
        model = huggingface_model(size)
        model.load_state_dict({name if name == "lm_head.weight" else f"model.{name}": w for name, w in want.weights.items()})

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens).logits

    else:
        forward = model = GPT(size)
        model.load_state_dict(want.weights)
    token_loss(forward(tokens), labels).backward()
    grads = {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    step = torch_step(model, Case(peer, "tiny", "fp32", 1), compile=False, forward=forward).step
    assert_same([step().item() for _ in range(3)], grads, want)
    assert sum(p.numel() for p in model.parameters()) == size.parameters


def test_jax_has_fmegs_gradients_and_updates(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    import bench_jax
    from bench import SIZES
    from bench_peers import make_batch

    size = SIZES["tiny"]
    want = fmeg_reference(tmp_path)

    def names(path: Any) -> str:
        """Where Hugging Face has the weight at a path of the jax tree."""
        *layer, name = [str(getattr(part, "key", getattr(part, "idx", part))) for part in path]
        part = "self_attn." if name[:2] in ("q_", "k_", "v_", "o_") else "mlp." if name.endswith("_proj") else ""
        return ".".join([*layer, f"{part}{name}", "weight"])

    def turned(name: str, w: torch.Tensor) -> Any:
        """jax stores weights input first."""
        return w.T if w.ndim == 2 and not name.startswith("embed") else w

    def copy(path: Any, leaf: Any) -> Any:
        name = names(path)
        value = turned(name, want.weights[name])
        assert value.shape == leaf.shape, name
        return jax.numpy.asarray(value.numpy())

    start = bench_jax.init(size)
    assert sum(leaf.size for leaf in jax.tree.leaves(start)) == size.parameters
    params = jax.tree_util.tree_map_with_path(copy, start)
    grads = jax.grad(bench_jax.loss)(params, *make_batch(size), size, "fp32")
    state, losses = bench_jax.init_state(params), []
    for _ in range(3):
        state, value = bench_jax.update(state, *make_batch(size), size, "fp32")
        losses.append(float(value))
    flat = {names(path): torch.tensor(jax.numpy.asarray(g).tolist()) for path, g in jax.tree_util.tree_leaves_with_path(grads)}
    assert_same(losses, {name: turned(name, g) for name, g in flat.items()}, want)


def test_parameters_and_flops_are_counted_as_fmeg_counts_them() -> None:
    from bench import SIZES
    from bench_peers import fmeg_config

    for size in SIZES.values():
        specs = fmeg.gpt_specs(fmeg_config(size))
        assert fmeg.count_params(specs) == size.parameters
        layers = specs["layers"]["dense"]
        used = [specs["output"], *(layers[part] for part in ("attention", "mlp"))]
        assert fmeg.count_params(used) == size.matmul_parameters


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    command = [sys.executable, str(SCRIPTS / "bench.py"), "--sizes", "tiny", "--import-repeats", "0", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=560)


def test_a_run_end_to_end(tmp_path: Path) -> None:
    """Eager, since compiling takes longer than all the rest."""
    flags = ["--no-compile", "--peers", "fmeg", "module", "module-compiled", "megatron", "--rounds", "3", "--steps", "2"]
    done = bench(*flags, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["versions"]["torch"] == torch.__version__
    (case,) = results["cases"]
    assert {name: case[name] for name in ("size", "dtype", "threads", "failed")} == {
        **{"size": "tiny", "dtype": "fp32", "threads": 1},
        "failed": {},
    }
    assert case["skipped"].keys() == {"module-compiled", "megatron"}
    assert case["matmul_peak"]["gflops"] == max(m["gflops"] for m in case["matmul"]) > 0
    assert case["peers"].keys() == {"fmeg", "module"}
    for name, peer in case["peers"].items():
        assert peer["parameters"] == case["parameters"], name
        assert [r["round"] for r in peer["rounds"]] == [0, 1, 2] and all(r["steps"] == 2 for r in peer["rounds"])
        losses = peer["losses"]
        assert len(losses) == 1 + 3 + 6
        assert abs(losses[0] - math.log(64)) < 0.2 and losses[-1] < losses[0] - 0.1, losses
        ratios = [peer["fmeg_speed"], peer["fmeg_cpu"]]
        assert all(0 < r["min"] <= r["median"] <= r["max"] < math.inf for r in ratios)
    assert case["peers"]["fmeg"]["fmeg_speed"]["median"] == 1
    assert (tmp_path / "table.md").read_text().strip() == done.stdout.strip()
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compiled_and_tensor_parallel_runs_lose_nothing() -> None:
    """Two tensor-parallel ranks have the losses of one process."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    done = bench("--tensor-parallel", "--rounds", "1", "--dtypes", "fp32", "bf16")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| fmeg")]
    assert len(rows) == 2 * 3 and len({row[-2].strip() for row in rows[:3]}) == 1, done.stdout


def test_the_ratio_is_taken_within_rounds() -> None:
    """A machine that is twice as slow in one round changes nothing; rounds that only one of two had do not count."""
    from bench import ratio

    def rounds(*walls: float) -> dict[str, Any]:
        return {"rounds": [{"round": i, "steps": 2, "wall": wall, "cpu": 1.0} for i, wall in enumerate(walls)]}

    peers = {"fmeg": rounds(1, 2, 1, 50), "jax": rounds(3, 6, 3)}
    assert ratio(peers, "jax", "wall", invert=True) == {"median": 3, "min": 3, "max": 3}
    assert ratio(peers, "jax", "cpu", invert=False) == {"median": 1, "min": 1, "max": 1}
    assert ratio({"jax": peers["jax"]}, "jax", "wall", invert=True) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers", "fmeg", "flax"], "'flax': must be of fmeg, module"),
        (["--dtypes", "fp8"], "'fp8': must be of fp32, bf16"),
        (["--threads", "100000"], "100000 threads asked for: must be in 1 .. "),
        (["--rounds", "0"], "--rounds is 0: must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(flags: list[str], message: str) -> None:
    from bench import check, parse_args

    with pytest.raises(ValueError, match="must be") as error:
        check(parse_args(flags))
    assert message in str(error.value) and "\n" not in str(error.value)

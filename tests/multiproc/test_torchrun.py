"""Real gloo ranks under torchrun: gradients, training, checkpoints for another number of ranks, and how a run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def start(ranks: int, *command: str) -> subprocess.Popen[str]:
    """A free port each, so that jobs may run at once."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launch, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(job: subprocess.Popen[str]) -> str:
    out, err = job.communicate(timeout=500)
    assert job.returncode == 0, err[-3000:]
    return out


@pytest.mark.parametrize(
    ("ranks", "tp", "sp"),
    [
        pytest.param(2, 2, "no", marks=pytest.mark.slow),
        pytest.param(2, 1, "no", marks=pytest.mark.slow),
        (4, 2, "sp"),
        pytest.param(4, 4, "sp", marks=pytest.mark.slow),
    ],
)
def test_eager_gradients_equal_one_device_and_simulated_ranks(ranks: int, tp: int, sp: str) -> None:
    """tp 4 with 2 key/value heads repeats each of them on two ranks."""
    assert "equal on" in finish(start(ranks, "tests/multiproc/program.py", str(tp), sp, "eager"))


def test_compiled_gradients_equal_one_device_and_simulated_ranks() -> None:
    assert "equal on" in finish(start(2, "tests/multiproc/program.py", "2", "sp", "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tp", "sp", "engine"),
    [
        (2, 2, "no", "whole"),
        (2, 1, "no", "whole"),
        (4, 2, "no", "whole"),
        (4, 2, "sp", "whole"),
        (4, 2, "sp", "layerwise"),
    ],
)
def test_compiled_gradients_on_every_layout(ranks: int, tp: int, sp: str, engine: str) -> None:
    assert "equal on" in finish(start(ranks, "tests/multiproc/program.py", str(tp), sp, engine))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((ROOT / "data" / "kjv.txt").read_text()[:60_000])
    return path


def pretrain(text: Path, save: Path, *flags: str) -> list[str]:
    sizes = "--config tiny --no-compile --num-layers 1 --hidden-size 32 --ffn-hidden-size 48 --hidden-dropout 0.1"
    batch = "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr-decay-iters 8 --log-interval 1"
    return ["scripts/pretrain_gpt.py", *sizes.split(), *batch.split(), "--data-path", str(text), "--save", str(save), *flags]


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_training_is_the_same_on_every_layout_and_two_jobs_run_at_once(text: Path, tmp_path: Path) -> None:
    """Dropout is on. The first rank alone prints and writes; a checkpoint goes on with another number of ranks."""
    alone = subprocess.run(
        [sys.executable, *pretrain(text, tmp_path / "1")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    jobs = [start(2, *pretrain(text, tmp_path / "tp", *flags)), start(2, *pretrain(text, tmp_path / "dp"))]
    outputs = [finish(job) for job in jobs]
    for output in (alone.stdout, *outputs):
        assert output.count("held-out bits per byte") == 1
    want = losses(tmp_path / "1")
    assert len(want) == 4
    for name in ("tp", "dp"):
        assert losses(tmp_path / name) == pytest.approx(want, rel=2e-5)
    resumed = pretrain(text, tmp_path / "tp", *flags, "--load", str(tmp_path / "tp"), "--train-iters", "6")
    finish(start(2, *resumed))
    moved = pretrain(text, tmp_path / "moved", "--load", str(tmp_path / "tp"), "--train-iters", "8")
    subprocess.run(
        [sys.executable, *moved], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300, check=True,
        capture_output=True,
    )  # fmt: skip
    whole = pretrain(text, tmp_path / "1", "--load", str(tmp_path / "1"), "--train-iters", "8")
    subprocess.run(
        [sys.executable, *whole], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300, check=True,
        capture_output=True,
    )  # fmt: skip
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "1")[6:], rel=2e-5)


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (1, "--tensor-model-parallel-size 3", "num_attention_heads 4 is not divisible by tensor_model_parallel_size 3"),
        (2, "--tensor-model-parallel-size 4", "2 processes cannot be shared by tensor_model_parallel_size 4"),
    ],
)
def test_impossible_layouts_end_at_once_with_the_reason(
    text: Path, tmp_path: Path, ranks: int, flags: str, message: str
) -> None:
    job = start(ranks, *pretrain(text, tmp_path / "run", *flags.split()))
    _, err = job.communicate(timeout=120)
    assert job.returncode != 0
    assert message in " ".join(err.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_a_rank_that_dies_ends_the_others_within_a_minute(text: Path, tmp_path: Path) -> None:
    job: Any = start(2, *pretrain(text, tmp_path / "run", "--train-iters", "100000", "--lr-decay-iters", "100000"))
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert job.poll() is None, job.communicate()[1][-2000:]
        time.sleep(0.2)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True).stdout.split()
    killed = time.monotonic()
    os.kill(int(children[-1]), 9)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0
    assert time.monotonic() - killed < 60
    assert "SIGKILL" in err

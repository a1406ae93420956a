"""A run on a text file: exact resume, what is written, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_trees_equal
from safetensors.torch import load_file

from fmeg.checkpoint.native import latest_step
from fmeg.config import OptimizerConfig
from fmeg.training.presets import PRESETS, tiny
from fmeg.training.run import Report, RunConfig, make_schedule, run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 60 kB of the shipped text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((ROOT / "data" / "kjv.txt").read_text()[:60_000])
    return path


def small_run(text: Path, save: Path | None = None, load: Path | None = None, **train: int) -> RunConfig:
    """Eager, with dropout: the masks must resume too."""
    cfg = tiny()
    return cfg.replace(
        model=cfg.model.replace(num_layers=1, hidden_size=32, ffn_hidden_size=48, hidden_dropout=0.1, attention_dropout=0.1),
        optimizer=cfg.optimizer.replace(lr_decay_iters=8),
        train=cfg.train.replace(**{"train_iters": 8, "log_interval": 1, "eval_interval": 4, "save_interval": 4} | train),
        data_path=text,
        save=save,
        load=load,
        compile=False,
    )


def quiet(cfg: RunConfig) -> tuple[Report, list[str]]:
    lines: list[str] = []
    return run(cfg, lines.append), lines


def test_resume_is_bitwise(text: Path, tmp_path: Path) -> None:
    """8 updates, against 4, a save, a load and 4 more: parameters, moments, counts and every logged number."""
    quiet(small_run(text, tmp_path / "whole"))
    quiet(small_run(text, tmp_path / "parts", train_iters=4))
    report, lines = quiet(small_run(text, tmp_path / "parts", load=tmp_path / "parts"))
    assert any("resumed" in line and "step 4" in line for line in lines)
    assert "changed since the save: train_iters 4 -> 8" in lines
    a, b = (load_file(tmp_path / name / "step_00000008" / "state.safetensors") for name in ("whole", "parts"))
    assert_trees_equal(a, b)

    def rows(name: str) -> list[dict[str, float]]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows if "loss" in row]

    assert rows("whole") == rows("parts")
    assert math.isfinite(report.held_out_bits_per_byte)


def test_microbatches_do_not_change_a_run(text: Path) -> None:
    losses = [quiet(small_run(text, micro_batch_size=size, train_iters=3))[0].loss for size in (2, 8)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_learning_rate_given_on_resume_is_the_first_one_used(text: Path, tmp_path: Path) -> None:
    quiet(small_run(text, tmp_path / "run", train_iters=4))
    cfg = small_run(text, tmp_path / "run", load=tmp_path / "run", train_iters=5)
    quiet(cfg.replace(optimizer=OptimizerConfig(lr=0.0123, lr_decay_style="constant")))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows if row["step"] == 5 and "loss" in row] == [pytest.approx(0.0123)]


def test_what_a_run_writes(text: Path, tmp_path: Path) -> None:
    report, _ = quiet(small_run(text, tmp_path / "run"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "loss.png",
        "metrics.jsonl",
        "step_00000004",
        "step_00000008",
        "tokenizer.json",
    ]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert report.skipped == 0
    assert ">>>" in report.sample
    assert 0 < report.unigram_bits_per_byte < 8


def test_refusals_come_before_work(text: Path, tmp_path: Path) -> None:
    quiet(small_run(text, tmp_path / "run", train_iters=4))
    again = small_run(text, tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already: pass --load"):
        quiet(again)
    with pytest.raises(ValueError, match="holds another model: num_layers 1 -> 2"):
        quiet(again.replace(load=tmp_path / "run", model=again.model.replace(num_layers=2)))
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "more\n")
    with pytest.raises(ValueError, match="was trained on another text"):
        quiet(again.replace(load=tmp_path / "run", data_path=other))
    with pytest.raises(ValueError, match="there is no checkpoint under"):
        quiet(again.replace(load=tmp_path / "nothing", save=None))
    with pytest.raises(ValueError, match="seq_length 65 is above max_position_embeddings 64"):
        small_run(text, seq_length=65)
    with pytest.raises(ValueError, match="lr_warmup_iters 9 must be below lr_decay_iters, 8"):
        again.replace(optimizer=again.optimizer.replace(lr_warmup_iters=9))


def test_a_truncated_checkpoint_is_refused_and_the_one_before_it_works(text: Path, tmp_path: Path) -> None:
    quiet(small_run(text, tmp_path / "run"))
    newest = latest_step(tmp_path / "run")
    assert newest is not None and newest.name == "step_00000008"
    tensors = newest / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    resumed = small_run(text, tmp_path / "run", load=tmp_path / "run")
    with pytest.raises(ValueError, match=f"cannot read {tensors}"):
        quiet(resumed)
    shutil.rmtree(newest)
    _, lines = quiet(resumed)
    assert any("step 4" in line for line in lines)


def test_a_run_that_is_done_says_so(text: Path, tmp_path: Path) -> None:
    quiet(small_run(text, tmp_path / "run"))
    _, lines = quiet(small_run(text, load=tmp_path / "run"))
    assert "nothing left to train: step 8 of train_iters 8" in lines


def test_schedules_of_the_config() -> None:
    """Cosine with a warm-up of 2, from 1e-3 to 1e-4 at 10."""
    schedule = make_schedule(OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=2), train_iters=10)
    want = [0, 5e-4, 1e-3, 9.65746e-4, 8.68198e-4, 7.22208e-4, 5.5e-4, 3.77792e-4, 2.31802e-4, 1.34254e-4, 1e-4]
    assert [schedule(torch.tensor(n)).item() for n in range(11)] == pytest.approx(want, rel=1e-5)
    for style in ("linear", "constant", "inverse-square-root", "WSD"):
        cfg = OptimizerConfig(lr=1e-3, lr_warmup_iters=2, lr_decay_style=style, lr_wsd_decay_iters=4)  # type: ignore[arg-type]
        assert make_schedule(cfg, train_iters=10)(torch.tensor(2)).item() == pytest.approx(1e-3)


def test_presets_are_valid() -> None:
    assert {name: make().model.num_layers for name, make in PRESETS.items()} == {"quickstart": 6, "gpt2_small": 12, "tiny": 2}


@pytest.mark.slow
def test_quickstart_in_a_fresh_copy(tmp_path: Path) -> None:
    """The README's first command, shortened: a new environment, training, and the files that it promises. Twice."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".venv", ".git", "runs", ".*_cache", "__pycache__", "tests", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    for _ in range(2):
        command = ["bash", "scripts/quickstart.sh", "--train-iters", "3", "--lr-warmup-iters", "1", "--eval-iters", "1"]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        assert "held-out bits per byte" in done.stdout
    runs = list((copy / "runs").iterdir())
    assert len(runs) == 2
    assert all((run / "loss.png").exists() and (run / "step_00000003" / "meta.json").exists() for run in runs)


def test_script_errors_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    save = tmp_path / "run"
    for path, message in ((empty, "is empty"), (tmp_path / "missing.txt", "No such file")):
        command = [sys.executable, "scripts/pretrain_gpt.py", "--config", "tiny", "--data-path", str(path), "--save", str(save)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1
        assert not save.exists()

"""A saved step appears whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import assert_trees_equal

from fmeg.checkpoint.native import latest_step, load_meta, load_state, save_state

STATE = {"w": torch.arange(6.0).reshape(2, 3), "layers": ({"b": torch.ones(2, dtype=torch.bfloat16)}, torch.tensor(3))}


def test_round_trip_is_bit_exact_and_the_last_step_wins(tmp_path: Path) -> None:
    save_state(tmp_path, STATE, {"note": 1}, 9)
    newer = {**STATE, "w": STATE["w"].t().contiguous().t() + 1}  # not contiguous
    save_state(tmp_path, newer, {"note": 2}, 10)
    state, meta = load_state(tmp_path, STATE)
    assert_trees_equal(state, newer)
    assert meta == {"note": 2}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_state(tmp_path, STATE, {"note": 1}, 1)
    save_state(tmp_path, STATE, {"note": 2}, 1)
    assert load_meta(tmp_path) == {"note": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_failed_save_leaves_the_one_before_it_and_nothing_else(tmp_path: Path) -> None:
    save_state(tmp_path, STATE, {"note": 1}, 1)
    with pytest.raises(TypeError):
        save_state(tmp_path, STATE, {"note": object()}, 2)  # not JSON, after the tensors are written
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_killed_save_is_not_seen(tmp_path: Path) -> None:
    save_state(tmp_path, STATE, {"note": 1}, 1)
    partial = tmp_path / f"step_00000002.partial-{os.getpid() + 1}"
    partial.mkdir()
    (partial / "meta.json").write_text("{}")
    latest = latest_step(tmp_path)
    assert latest is not None and latest.name == "step_00000001"


def test_files_are_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    path = save_state(tmp_path, STATE, {}, 1)
    modes = {(path / name).stat().st_mode for name in ("state.safetensors", "meta.json")}
    assert len(modes) == 1


def test_differences_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint under"):
        load_meta(tmp_path)
    path = save_state(tmp_path, STATE, {}, 1)
    renamed = {"v": STATE["w"], "layers": STATE["layers"]}
    with pytest.raises(ValueError, match=r"missing \['v'\], unexpected \['w'\]"):
        load_state(tmp_path, renamed)
    with pytest.raises(ValueError, match=r"w is torch.float32 \(2, 3\), but must be torch.float32 \(3, 2\)"):
        load_state(tmp_path, {**STATE, "w": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"w is torch.float32 \(2, 3\), but must be torch.float64 \(2, 3\)"):
        load_state(tmp_path, {**STATE, "w": torch.zeros(2, 3, dtype=torch.float64)})
    (path / "meta.json").write_text(json.dumps({"a": 1})[:-2])
    with pytest.raises(ValueError, match=f"cannot read {path / 'meta.json'}"):
        load_state(tmp_path, STATE)

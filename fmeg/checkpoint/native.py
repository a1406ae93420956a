"""A training run's state on disk: one directory per saved step, safetensors for tensors and JSON for the rest.

A directory appears by a rename when it is complete, so a killed save leaves the one before it usable.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fmeg import tree

State = TypeVar("State")
_TENSORS, _META = "state.safetensors", "meta.json"


def save_state(root: Path, state: Any, meta: dict[str, Any], step: int) -> Path:
    """Write `state`, a tree of tensors, and `meta`, plain values, as `root/step_<step>`; returns that directory.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as root:
    ...     path = save_state(Path(root), {"w": torch.ones(2)}, {"note": "first"}, 7)
    ...     load_state(Path(root), {"w": torch.zeros(2)})
    ({'w': tensor([1., 1.])}, {'note': 'first'})
    """
    final = root / f"step_{step:08d}"
    partial = root / f"{final.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        save_file({path: leaf.contiguous() for path, leaf in tree.flatten_with_path(state)}, partial / _TENSORS)
        (partial / _META).write_text(json.dumps(meta, indent=2) + "\n")
        # safetensors makes files that only their owner reads; the umask should decide, as it did for the other file.
        (partial / _TENSORS).chmod((partial / _META).stat().st_mode)
        for name in (_TENSORS, _META):
            with open(partial / name, "rb") as file:
                os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def latest_step(root: Path) -> Path | None:
    """The directory of the last step saved under `root`, if there is one."""
    steps = sorted(path for path in root.glob("step_*") if path.name.removeprefix("step_").isdigit())
    return steps[-1] if steps else None


def load_meta(root: Path) -> dict[str, Any]:
    """The plain values of the last save under `root`."""
    path = _require_step(root) / _META
    try:
        meta = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}; delete {path.parent} to go back to the save before it") from error
    return meta


def load_state(root: Path, like: State) -> tuple[State, dict[str, Any]]:
    """The last save under `root`: the state, with the structure, shapes and dtypes of `like`, and the plain values.

    Errors: ValueError for a missing, truncated or unreadable file, and for names, shapes or dtypes that differ.
    """
    meta, path = load_meta(root), _require_step(root) / _TENSORS
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}; delete {path.parent} to go back to the save before it") from error
    want = dict(tree.flatten_with_path(like))
    missing, unexpected = sorted(want.keys() - saved.keys()), sorted(saved.keys() - want.keys())
    if missing or unexpected:
        raise ValueError(f"{path} does not fit this run: missing {missing or 'none'}, unexpected {unexpected or 'none'}")
    for name, leaf in want.items():
        if _kind(saved[name]) != _kind(leaf):
            raise ValueError(f"{path} does not fit this run: {name} is {_kind(saved[name])}, but must be {_kind(leaf)}")
    return tree.map_with_path(lambda name, leaf: saved[name].to(leaf.device), like), meta


def _require_step(root: Path) -> Path:
    step = latest_step(root)
    if step is None:
        raise ValueError(f"there is no checkpoint under {root}: give the directory that a run saved to")
    return step


def _kind(leaf: Tensor) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}"

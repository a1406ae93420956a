"""A training run on a text file: set up, train, evaluate, save, resume, and show what was learned."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmeg import optim, random
from fmeg.backends.matmul import choose_kernels
from fmeg.checkpoint.native import latest_step, load_meta, load_state, save_state
from fmeg.config import OptimizerConfig, TrainConfig, TransformerConfig, config_to_dict
from fmeg.data.text import (
    TextData,
    encode_text,
    evaluation_batches,
    make_batches,
    read_text,
    split_text,
    train_tokenizer,
    unigram_bits_per_byte,
)
from fmeg.jit import Engine
from fmeg.models.gpt import gpt_forward_step, gpt_specs, unshard_params
from fmeg.models.sample import sample
from fmeg.params import Params, count_params
from fmeg.sharding.collectives import all_reduce
from fmeg.sharding.mesh import Ctx, Mesh, make_mesh
from fmeg.sharding.reshard import on_mesh, take_batch
from fmeg.train_step import TrainState, init_state, make_train_step, shard_state, unshard_state
from fmeg.validation import Replaceable


@dataclass(frozen=True, kw_only=True)
class RunConfig(Replaceable):
    """What to train, on which text, and where to write."""

    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    data_path: Path = Path("data/kjv.txt")
    """A UTF-8 text file; its last 5% are held out."""
    save: Path | None = None
    """Directory for the tokenizer, checkpoints, metrics.jsonl and the loss curve. A finished one is not overwritten."""
    load: Path | None = None
    """Directory of a run to resume from its last checkpoint. Give the same as --save to go on writing there."""
    compile: bool = True
    """Compile the step. Eager gives the same numbers, slower."""
    engine: Engine = "whole"
    """How: whole, the step as one graph; layerwise, a layer at a time, in a time that does not grow with the layers."""

    def __post_init__(self) -> None:
        if self.train.seq_length > self.model.max_position_embeddings:
            raise ValueError(
                f"seq_length {self.train.seq_length} is above max_position_embeddings "
                f"{self.model.max_position_embeddings}: lower the first or raise the second"
            )
        end = self.optimizer.lr_decay_iters or self.train.train_iters
        if self.optimizer.lr_warmup_iters >= end:
            raise ValueError(
                f"lr_warmup_iters {self.optimizer.lr_warmup_iters} must be below lr_decay_iters, {end} "
                "(train_iters unless given): warm up for fewer updates or train for more"
            )
        make_optimizer(self.optimizer, self.train.train_iters)  # checks the rest of the schedule before any work


class Report(NamedTuple):
    """What a finished run says of itself."""

    loss: float
    held_out_bits_per_byte: float
    unigram_bits_per_byte: float
    skipped: int
    sample: str


def make_optimizer(cfg: OptimizerConfig, train_iters: int) -> optim.Optimizer:
    """The optimizer and schedule that a config describes."""
    clip_grad = cfg.clip_grad or None
    schedule = make_schedule(cfg, train_iters)
    if cfg.optimizer == "sgd":
        return optim.sgd(schedule, momentum=cfg.sgd_momentum, weight_decay=cfg.weight_decay, clip_grad=clip_grad)
    betas = {"b1": cfg.adam_beta1, "b2": cfg.adam_beta2, "eps": cfg.adam_eps}
    return optim.adamw(schedule, **betas, weight_decay=cfg.weight_decay, clip_grad=clip_grad)


def make_schedule(cfg: OptimizerConfig, train_iters: int) -> optim.Schedule:
    """The learning rate as a function of the number of updates done."""
    decay_steps = train_iters if cfg.lr_decay_iters is None else cfg.lr_decay_iters
    common: dict[str, Any] = {
        "max_lr": cfg.lr,
        "min_lr": cfg.min_lr,
        "init_lr": cfg.lr_warmup_init,
        "warmup_steps": cfg.lr_warmup_iters,
        "decay_steps": decay_steps,
    }
    if cfg.lr_decay_style == "WSD":
        assert cfg.lr_wsd_decay_iters is not None  # OptimizerConfig has checked it
        return optim.wsd_schedule(**common, wsd_decay_steps=cfg.lr_wsd_decay_iters, style=cfg.lr_wsd_decay_style)
    styles: dict[str, Callable[..., optim.Schedule]] = {
        "linear": optim.linear_schedule,
        "cosine": optim.cosine_schedule,
        "inverse-square-root": optim.inverse_square_root_schedule,
    }
    if cfg.lr_decay_style == "constant":
        return optim.constant_schedule(cfg.lr, warmup_steps=cfg.lr_warmup_iters, init_lr=cfg.lr_warmup_init)
    return styles[cfg.lr_decay_style](**common)


def run(cfg: RunConfig, say: Callable[[str], None] = print) -> Report | None:
    """Train as `cfg` says, on the processes that torchrun started or on this one; `say` receives lines for a person.

    The first rank alone talks and writes, and has a report. A checkpoint holds whole arrays, so that any number of ranks can
    go on from it.
    """
    mesh = make_mesh(cfg.model, timeout_seconds=60.0)
    cfg = _with_kernels(cfg, mesh)
    lead = _is_lead(mesh)
    say = say if lead else (lambda line: None)
    alone = cfg.model.on_one_device()
    if cfg.save is not None and latest_step(cfg.save) is not None and cfg.load != cfg.save:
        raise ValueError(f"{cfg.save} holds a run already: pass --load {cfg.save} to go on, or another --save")
    text = read_text(cfg.data_path)
    meta = _meta(cfg, text)
    if cfg.load is not None:
        _check_resumable(cfg.load, meta, say)
    tokenizer = _tokenizer(cfg, text)
    data = encode_text(text, tokenizer, cfg.train.seq_length)
    opt = make_optimizer(cfg.optimizer, cfg.train.train_iters)
    state = init_state(cfg.model, opt, seed=cfg.train.seed, mesh=mesh)
    if cfg.load is not None:
        whole, _ = load_state(cfg.load, init_state(alone, opt))
        state = shard_state(whole, cfg.model, mesh)
        say(f"resumed {cfg.load} at step {int(state.step)}")
    if cfg.save is not None and lead:
        cfg.save.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(cfg.save / "tokenizer.json"))
    say(
        f"{count_params(gpt_specs(cfg.model)):,} parameters; {len(data.train):,} training and {len(data.held_out):,} "
        f"held-out tokens of {cfg.data_path}; matmul kernel {cfg.model.matmul_kernel}"
    )
    evaluate = make_evaluation(cfg, mesh)
    log = _MetricsLog(cfg.save if lead else None, int(state.step))
    state, metrics, skipped = _train(cfg, mesh, state, opt, data, log, evaluate, meta, say)
    bits = evaluate(state.params, data.held_out, data.held_out_bytes, None)
    params = unshard_params(state.params, cfg.model, mesh)
    if not lead:
        return None
    report = Report(
        loss=metrics.get("loss", math.nan),
        held_out_bits_per_byte=bits,
        unigram_bits_per_byte=unigram_bits_per_byte(data, cfg.model.vocab_size),
        skipped=skipped,
        sample=_sample_text(cfg, alone, params, data, tokenizer),
    )
    log.write({"step": int(state.step), "held_out_bits_per_byte": bits, "unigram_bits_per_byte": report.unigram_bits_per_byte})
    if log.path is not None:
        plot_loss(log.path, log.path.with_name("loss.png"))
    return report


def _with_kernels(cfg: RunConfig, mesh: Mesh | None) -> RunConfig:
    """ "auto" kernels resolved: to those that the resumed run used, else to what is measured here."""
    model = cfg.model
    if cfg.load is not None and model.matmul_kernel == "auto":
        model = model.replace(matmul_kernel=load_meta(cfg.load).get("layout", {}).get("matmul_kernel", "auto"))
    return replace(cfg, model=choose_kernels(model, mesh))


def _tokenizer(cfg: RunConfig, text: str) -> Any:
    """The resumed run's tokenizer, or one learned from the training part of the text."""
    if cfg.load is None:
        return train_tokenizer(split_text(text)[0], cfg.model.vocab_size)
    from tokenizers import Tokenizer

    path = cfg.load / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"cannot read {path}: {error}; --load needs the directory that a run saved to") from error


def _check_resumable(load: Path, now: dict[str, Any], say: Callable[[str], None]) -> None:
    """Refuse a checkpoint of another model or text; whatever else changed since the save is said."""
    then = load_meta(load)
    if then.get("format") != now["format"]:
        raise ValueError(
            f"{load} has format {then.get('format')!r}: must be {now['format']!r}; train it again with this version"
        )
    changed = {
        part: {name: (then[part].get(name), value) for name, value in now[part].items() if then[part].get(name) != value}
        for part in ("model", "layout", "optimizer", "train", "text")
    }
    if changed["model"]:
        raise ValueError(f"{load} holds another model: {_changes(changed['model'])}; resume with the model it was saved with")
    if changed["text"]:
        raise ValueError(f"{load} was trained on another text than --data-path holds: pass the same text")
    if others := changed["layout"] | changed["optimizer"] | changed["train"]:
        say(f"changed since the save: {_changes(others)}")


def _changes(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())


def _meta(cfg: RunConfig, text: str) -> dict[str, Any]:
    """What a checkpoint keeps besides the state, to resume by and to compare with."""
    model = config_to_dict(cfg.model)
    return {
        "format": "fmeg-run-1",
        "layout": {name: model.pop(name) for name in ("tensor_model_parallel_size", "sequence_parallel", "matmul_kernel")},
        "model": model,
        "optimizer": config_to_dict(cfg.optimizer),
        "train": config_to_dict(cfg.train),
        "text": {"sha256": hashlib.sha256(text.encode()).hexdigest()},
    }


def _train(
    cfg: RunConfig,
    mesh: Mesh | None,
    state: TrainState,
    opt: optim.Optimizer,
    data: TextData,
    log: _MetricsLog,
    evaluate: Callable[..., float],
    meta: dict[str, Any],
    say: Callable[[str], None],
) -> tuple[TrainState, dict[str, float], int]:
    """The loop: batch, step, and at their intervals the log, an evaluation, a checkpoint."""
    train, root = cfg.train, random.key(cfg.train.seed)
    batches = make_batches(
        data.train, batch_size=train.global_batch_size, seq_length=train.seq_length, key=random.fold_in(root, "data")
    )
    drops = cfg.model.hidden_dropout > 0 or cfg.model.attention_dropout > 0
    step = make_train_step(
        cfg.model,
        opt,
        mesh=mesh,
        num_microbatches=train.num_microbatches(_data_parallel_size(mesh)),
        compile=cfg.compile,
        engine=cfg.engine,
        donate=True,
        key=random.fold_in(root, "dropout") if drops else None,
    )
    first, numbers, skipped = int(state.step), {}, torch.zeros((), dtype=torch.int64)
    if first >= train.train_iters:
        say(f"nothing left to train: step {first} of train_iters {train.train_iters}")
        return state, {}, 0
    if cfg.compile:
        say("compiling the step; the first time takes about a minute, later runs find it in a cache")
    bar = _Progress(first, train.train_iters, visible=_is_lead(mesh))
    for i in bar.over(range(first, train.train_iters)):
        state, metrics = step(state, batches(i))
        skipped += metrics["skipped"]
        done = i + 1
        if done % train.log_interval == 0 or done == train.train_iters:
            numbers = {name: value.item() for name, value in metrics.items()}
            speed = bar.tokens_per_second(train.global_batch_size * train.seq_length)
            log.write({"step": done, **numbers, "tokens_per_second": speed})
            bar.show(loss=f"{numbers['loss']:.3f}", tokens_per_s=f"{speed or 0:,.0f}")
        if train.eval_interval and done % train.eval_interval == 0 and done < train.train_iters:
            bits = evaluate(state.params, data.held_out, data.held_out_bytes, train.eval_iters)
            log.write({"step": done, "held_out_bits_per_byte": bits})
            bar.say(f"step {done}: held-out bits per byte about {bits:.3f}")
        if cfg.save is not None and (done == train.train_iters or (train.save_interval and done % train.save_interval == 0)):
            whole = unshard_state(state, cfg.model, mesh)
            if _is_lead(mesh):
                save_state(cfg.save, whole, meta, done)
    return state, numbers, int(skipped)


def make_evaluation(cfg: RunConfig, mesh: Mesh | None) -> Callable[[Params, Tensor, int, int | None], float]:
    """`evaluate(params, tokens, num_bytes, max_batches)`: bits per byte of a text of `num_bytes` bytes, without dropout.

    With `max_batches` it is an estimate from the text's first batches. Not compiled: a forward alone gains less from it
    than its compilation takes.
    """

    def nll(ctx: Ctx, params: Params, batch: dict[str, Tensor]) -> Tensor:
        _, token_count, metrics = gpt_forward_step(params, take_batch(batch, ctx), cfg.model, ctx)
        sums = torch.stack((metrics["nll"].double(), token_count.double()))
        return sums if ctx is None else all_reduce(sums, ctx.mesh.names, ctx)

    nll_step = on_mesh(nll, mesh, shared=(1,))
    batch_size = cfg.train.micro_batch_size * _data_parallel_size(mesh)

    def evaluate(params: Params, tokens: Tensor, num_bytes: int, max_batches: int | None) -> float:
        batches = evaluation_batches(tokens, batch_size=batch_size, seq_length=cfg.train.seq_length)
        nats, count = torch.stack([nll_step(params, batch) for batch in batches[:max_batches]]).sum(0).tolist()
        return nats / count * (len(tokens) - 1) / num_bytes / math.log(2)

    return evaluate


def _is_lead(mesh: Mesh | None) -> bool:
    """Whether this process talks and writes."""
    return mesh is None or mesh.lead


def _data_parallel_size(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.size(mesh.axes_of("batch"))


def _sample_text(cfg: RunConfig, alone: TransformerConfig, params: Params, data: TextData, tokenizer: Any) -> str:
    """What the model makes of the beginning of the held-out text."""
    prompt = data.held_out[: min(32, cfg.train.seq_length)]
    key = random.fold_in(random.key(cfg.train.seed), "sample")
    tokens = sample(params, prompt, alone, num_tokens=96, temperature=0.8, key=key)
    start, continuation = (tokenizer.decode(part.tolist()) for part in (tokens[: len(prompt)], tokens[len(prompt) :]))
    return f"{start}\n  >>> {continuation}"


class _MetricsLog:
    """metrics.jsonl, one object a line. A resumed run first drops the lines after the step that it resumes from."""

    def __init__(self, directory: Path | None, step: int) -> None:
        self.path = None if directory is None else directory / "metrics.jsonl"
        if self.path is not None and self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if json.loads(line)["step"] <= step]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(f"{line}\n" for line in kept))
            partial.rename(self.path)

    def write(self, values: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                # JSON has no NaN and no infinity
                bad = {name for name, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
                file.write(json.dumps(values | dict.fromkeys(bad)) + "\n")


class _Progress:
    """A progress bar that knows the speed without the first step, which compiles."""

    def __init__(self, first: int, total: int, *, visible: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=first, unit="step", dynamic_ncols=True, disable=not visible)
        self._steps, self._start = 0, 0.0

    def over(self, steps: Iterable[int]) -> Iterator[int]:
        with self._bar:
            for i in steps:
                yield i
                self._bar.update(1)
                self._steps += 1
                if self._steps == 1:
                    self._start = time.perf_counter()

    def tokens_per_second(self, tokens_per_step: int) -> float | None:
        """Tokens per second since the end of the first step; None while there is nothing to measure."""
        seconds = time.perf_counter() - self._start
        return tokens_per_step * self._steps / seconds if self._steps else None

    def show(self, **values: str) -> None:
        self._bar.set_postfix(values)

    def say(self, line: str) -> None:
        if not self._bar.disable:
            self._bar.write(line)


def plot_loss(metrics: Path, picture: Path) -> None:
    """Draw the training loss and the held-out bits per byte of a metrics.jsonl as a PNG."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.subplots()
    for axis, name, color in ((left, "loss", "C0"), (left.twinx(), "held_out_bits_per_byte", "C1")):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        axis.plot(
            [step for step, _ in points], [value for _, value in points], color=color, marker="." if name != "loss" else None
        )
        axis.set_ylabel({"loss": "training loss (nats per token)"}.get(name, "held-out bits per byte"), color=color)
    left.set_xlabel("update")
    left.grid(alpha=0.3)
    partial = picture.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.rename(picture)

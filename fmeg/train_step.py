"""The train step: forward, backward, accumulation over microbatches, clipping and update, as one pure function.

A researcher writes `forward_step(params, batch, cfg, ctx, *, key=None) -> (loss_sum, token_count, metrics)`; everything
else is here. Sums and counts are added up over microbatches and divided once, so that the result does not depend on
how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmeg import random, tree
from fmeg.autodiff import value_and_grad
from fmeg.backends.matmul import choose_kernels
from fmeg.config import TransformerConfig
from fmeg.jit import Engine, Traced, jit
from fmeg.layers.norm import at_least_fp32
from fmeg.models.gpt import check_batch, gpt_forward_step, gpt_specs, init_params
from fmeg.optim import Optimizer, apply_updates, global_norm
from fmeg.params import (
    ZEROS,
    Params,
    ParamSpec,
    Specs,
    cast_to_compute,
    check_params,
    reduce_grads,
    shard_tree,
    unshard_tree,
)
from fmeg.sharding.collectives import all_reduce
from fmeg.sharding.mesh import Ctx, Mesh, check_mesh
from fmeg.sharding.reshard import on_mesh, take_batch
from fmeg.sharding.spec import P

Batch = dict[str, Tensor]
Metrics = dict[str, Tensor]
ForwardStep = Callable[..., tuple[Tensor, Tensor, Metrics]]


class TrainState(NamedTuple):
    """Everything a run needs to go on: batches consumed (int64), parameters, optimizer state."""

    step: Tensor
    params: Params
    opt_state: Any


class Parts(NamedTuple):
    """What a step is made of, each a function for one rank; the carry is a TrainState or parameters.

    `inputs(carry, key) -> (params, key)`; `gradient(ctx, params, batch, key) -> (grads, Sums)` of one microbatch;
    `finish(ctx, carry, grads, [Sums]) -> (carry, metrics)`.
    """

    inputs: Callable[..., tuple[Params, Tensor | None]]
    gradient: Callable[..., tuple[Params, Sums]]
    finish: Callable[..., tuple[Any, Metrics]]


class Sums(NamedTuple):
    """What is added up over microbatches besides gradients."""

    loss: Tensor
    tokens: Tensor
    metrics: Metrics


def init_state(
    cfg: TransformerConfig,
    opt: Optimizer,
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    specs: Specs | None = None,
    device: torch.device | str = "cpu",
) -> TrainState:
    """A fresh TrainState: `init_params` and `opt.init`. `specs`: those of another model than the config's GPT.

    >>> from fmeg.optim import sgd
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> init_state(cfg, sgd(0.1)).step
    tensor(0)
    """
    params = init_params(cfg, seed=seed, mesh=mesh, specs=specs, device=device)

    def init(ctx: Ctx, params: Params) -> TrainState:
        return TrainState(torch.zeros((), dtype=torch.int64, device=device), params, opt.init(params))

    return on_mesh(init, mesh)(params)


def shard_state(state: TrainState, cfg: TransformerConfig, mesh: Mesh | None, *, specs: Specs | None = None) -> TrainState:
    """The parts that the ranks of `mesh` hold of the state that a single device would hold.

    >>> from fmeg.optim import adamw
    >>> from fmeg.sharding.mesh import simulated_mesh
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> state, tp = init_state(cfg, adamw(0.1)), cfg.replace(tensor_model_parallel_size=2)
    >>> shard_state(state, tp, simulated_mesh(tp)).opt_state[1].mu["layers"]["dense"]["mlp"]["up"]["weight"].shape
    torch.Size([2, 1, 8, 16])
    """
    specs = _state_specs(state, gpt_specs(cfg) if specs is None else specs)
    return on_mesh(lambda ctx, state: shard_tree(state, specs, ctx), mesh, shared=(0,))(state)


def unshard_state(state: TrainState, cfg: TransformerConfig, mesh: Mesh | None, *, specs: Specs | None = None) -> TrainState:
    """The state that a single device would hold; the inverse of `shard_state`. All ranks must call it.

    >>> from fmeg.optim import sgd
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> unshard_state(init_state(cfg, sgd(0.1)), cfg, None).step
    tensor(0)
    """
    specs = _state_specs(state, gpt_specs(cfg) if specs is None else specs)
    whole = on_mesh(lambda ctx, state: unshard_tree(state, specs, cfg, ctx), mesh)(state)
    return tree.map(lambda leaf: leaf[0], whole) if mesh is not None and mesh.simulated else whole


def _state_specs(state: TrainState, specs: Specs) -> Any:
    """A spec for every leaf of a state: an optimizer's copies of the parameters end in the parameter's path; counts are
    the same everywhere.
    """
    known = dict(tree.flatten_with_path(specs))

    def spec_of(path: str, leaf: Tensor) -> ParamSpec:
        parts = path.split("/")
        ends = ("/".join(parts[i:]) for i in range(len(parts)))
        return next((known[end] for end in ends if end in known), ParamSpec((), P(), ZEROS))

    return tree.map_with_path(spec_of, state)


def make_train_step(
    cfg: TransformerConfig,
    opt: Optimizer,
    *,
    mesh: Mesh | None = None,
    forward_step: ForwardStep = gpt_forward_step,
    specs: Specs | None = None,
    num_microbatches: int = 1,
    compile: bool = True,
    engine: Engine = "whole",
    donate: bool = False,
    key: Tensor | None = None,
    check: Callable[[Batch, TransformerConfig], None] | None = check_batch,
) -> Step:
    """`step(state, batch) -> (state, metrics)`.

    `batch`: tensors with a leading batch dimension, cut into `num_microbatches` equal parts. `key` turns dropout on; every
    step folds its number in. `donate`: the state passed in is overwritten. `specs`: the parameters of another model
    than the config's GPT, for `forward_step`. `check`: what looks at each batch's values before the graph runs. `engine`:
    how the step is compiled, all as one graph ("whole") or a layer at a time ("layerwise"), in a time that does not depend
    on the number of layers.

    metrics: loss (mean per token), grad_norm (before clipping), num_tokens, learning_rate, skipped, and the metrics of
    `forward_step` per token. A step whose gradients are not finite consumes its batch and changes nothing else;
    `skipped` is then 1.

    >>> from fmeg.optim import sgd
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> opt = sgd(0.1)
    >>> step = make_train_step(cfg, opt, compile=False)
    >>> state, metrics = step(init_state(cfg, opt), {"tokens": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, 3]])})
    >>> sorted(metrics), state.step.item()
    (['grad_norm', 'learning_rate', 'loss', 'nll', 'num_tokens', 'skipped'], 1)
    """
    check_mesh(cfg, mesh)
    cfg = choose_kernels(cfg, mesh)
    specs = gpt_specs(cfg) if specs is None else specs

    def finish(ctx: Ctx, state: TrainState, grad_sums: Params, sums: list[Sums]) -> tuple[TrainState, Metrics]:
        grads, metrics = _mean(ctx, grad_sums, sums, specs, cfg)
        updates, opt_state = opt.update(grads, state.opt_state, state.params, specs, ctx)
        finite = torch.isfinite(metrics["grad_norm"])
        new = TrainState(state.step, apply_updates(state.params, updates), opt_state)
        new = tree.map(lambda a, b: torch.where(finite, a, b), new, state)
        metrics |= opt.report(state.opt_state) | {"skipped": (~finite).int()}
        return new._replace(step=state.step + 1), metrics

    def inputs(state: TrainState, key: Tensor | None) -> tuple[Params, Tensor | None]:
        return state.params, None if key is None else random.fold_in(key, state.step)

    parts = Parts(inputs, _make_gradient(cfg, forward_step), finish)
    return Step(cfg, mesh, specs, parts, num_microbatches, engine if compile else None, donate, key, check)


def make_grad_step(
    cfg: TransformerConfig,
    *,
    mesh: Mesh | None = None,
    forward_step: ForwardStep = gpt_forward_step,
    specs: Specs | None = None,
    num_microbatches: int = 1,
    compile: bool = True,
    engine: Engine = "whole",
    key: Tensor | None = None,
    check: Callable[[Batch, TransformerConfig], None] | None = check_batch,
) -> Step:
    """`grad_step(params, batch) -> (grads, metrics)`: the gradients of the mean loss per token, before clipping.

    Arguments are those of `make_train_step`; `key` is used as it is. Gradients are in fp32 (fp64 for fp64 parameters).

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> batch = {"tokens": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, 3]])}
    >>> grads, metrics = make_grad_step(cfg, compile=False)(init_params(cfg), batch)
    >>> grads["final_norm"]["scale"].shape, metrics["num_tokens"].item()
    (torch.Size([8]), 2.0)
    """
    check_mesh(cfg, mesh)
    cfg = choose_kernels(cfg, mesh)
    specs = gpt_specs(cfg) if specs is None else specs

    def finish(ctx: Ctx, params: Params, grad_sums: Params, sums: list[Sums]) -> tuple[Params, Metrics]:
        return _mean(ctx, grad_sums, sums, specs, cfg)

    def inputs(params: Params, key: Tensor | None) -> tuple[Params, Tensor | None]:
        return params, key

    parts = Parts(inputs, _make_gradient(cfg, forward_step), finish)
    return Step(cfg, mesh, specs, parts, num_microbatches, engine if compile else None, False, key, check)


def _make_gradient(cfg: TransformerConfig, forward_step: ForwardStep) -> Callable[..., tuple[Params, Sums]]:
    """`gradient(ctx, compute_params, batch, key)`: gradients of the loss sum, in at least fp32, and the sums, of the global
    batch's part on this rank.
    """

    def loss(params: Params, batch: Batch, ctx: Ctx, key: Tensor | None) -> tuple[Tensor, tuple[Tensor, Metrics]]:
        loss_sum, token_count, metrics = forward_step(params, batch, cfg, ctx, key=key)
        return loss_sum, (token_count, metrics)

    def gradient(ctx: Ctx, params: Params, batch: Batch, key: Tensor | None) -> tuple[Params, Sums]:
        local = take_batch(batch, ctx)
        (loss_sum, (token_count, metrics)), grads = value_and_grad(loss, has_aux=True)(params, local, ctx, key)
        return tree.map(at_least_fp32, grads), Sums(loss_sum, token_count, metrics)

    return gradient


def _mean(ctx: Ctx, grad_sums: Params, sums: list[Sums], specs: Specs, cfg: TransformerConfig) -> tuple[Params, Metrics]:
    """Add up over ranks and divide once by the number of tokens; without any token, loss and gradients are zero."""
    total = tree.map(lambda *parts: torch.stack(parts).sum(0), *sums) if len(sums) > 1 else sums[0]
    if ctx is not None and ctx.mesh.names:
        numbers, treedef = tree.flatten(total)
        widest = max((n.dtype for n in numbers), key=lambda dtype: dtype.itemsize)
        reduced = all_reduce(torch.stack([n.to(widest) for n in numbers]), ctx.mesh.names, ctx)
        total = tree.unflatten(treedef, [r.to(n.dtype) for r, n in zip(reduced.unbind(0), numbers, strict=True)])
    count = torch.where(total.tokens > 0, total.tokens, 1.0)
    grads = reduce_grads(grad_sums, specs, ctx, bucket_size=cfg.ddp_bucket_size)
    grads = tree.map(lambda g: g / count.to(g.dtype), grads)
    metrics = {name: value / count for name, value in total.metrics.items()}
    metrics |= {"loss": total.loss / count, "num_tokens": total.tokens, "grad_norm": global_norm(grads, specs, ctx)}
    return grads, metrics


class Step:
    """A step that `make_train_step` or `make_grad_step` has made: `step(carry, batch) -> (carry, metrics)`.

    One graph for one microbatch; else one graph that is run for each microbatch, adding to donated gradients, between a
    graph that casts the parameters and a graph that finishes.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        mesh: Mesh | None,
        specs: Specs,
        parts: Parts,
        num_microbatches: int,
        engine: Engine | None,
        donate: bool,
        key: Tensor | None,
        check: Callable[[Batch, TransformerConfig], None] | None,
    ) -> None:
        self._cfg, self._mesh, self._specs, self._parts = cfg, mesh, specs, parts
        self._num_microbatches, self._key, self._check = num_microbatches, key, check

        def compiled(fn: Callable[..., Any], donate: tuple[int, ...] = ()) -> Any:
            return fn if engine is None else jit(fn, donate=donate, engine=engine)

        donated = (0,) if donate else ()

        def begin(ctx: Ctx, carry: Any, key: Tensor | None) -> tuple[Params, Tensor | None]:
            params, key = parts.inputs(carry, key)
            return cast_to_compute(params, specs, cfg), key

        def whole(ctx: Ctx, carry: Any, batch: Batch, key: Tensor | None) -> tuple[Any, Metrics]:
            params, key = begin(ctx, carry, key)
            grads, sums = parts.gradient(ctx, params, batch, key)
            return parts.finish(ctx, carry, grads, [sums])

        def accumulate(ctx: Ctx, total: Params, params: Params, batch: Batch, key: Tensor | None) -> tuple[Params, Sums]:
            grads, sums = parts.gradient(ctx, params, batch, key)
            return tree.map(torch.add, total, grads), sums

        self._whole = compiled(on_mesh(whole, mesh, shared=(1, 2)), donate=donated)
        self._begin = compiled(on_mesh(begin, mesh, shared=(1,)))
        self._accumulate = compiled(on_mesh(accumulate, mesh, shared=(2,)), donate=(0,))
        self._finish = compiled(on_mesh(parts.finish, mesh), donate=donated)

    def __call__(self, carry: Any, batch: Batch) -> tuple[Any, Metrics]:
        microbatches = self._microbatches(carry, batch)
        if len(microbatches) == 1:
            carry, metrics = self._whole(carry, microbatches[0], self._key)
        else:
            params, key = self._begin(carry, self._key)
            grads = self._zero_grads(carry)
            sums = []
            for microbatch in microbatches:
                grads, one = self._accumulate(grads, params, microbatch, key)
                sums.append(one)
            carry, metrics = self._finish(carry, grads, sums)
        # Metrics are equal on all ranks: of simulated ones the first's are shown.
        return carry, tree.map(lambda m: m[0], metrics) if self._mesh is not None and self._mesh.simulated else metrics

    def trace(self, carry: Any, batch: Batch) -> tuple[Traced, Traced]:
        """The graphs of one microbatch's gradient, `(grads, Sums)`, and of what follows the last one, `(carry, metrics)`.

        Of a compiled step, on real ranks or planned ones; tensors without storage (fake ones) do.
        """
        microbatches = self._microbatches(carry, batch)
        params, key = self._begin(carry, self._key)
        gradient = self._accumulate.trace(self._zero_grads(carry), params, microbatches[0], key)
        grads, sums = tree.map(lambda node: node.meta["val"], gradient.outputs)
        return gradient, self._finish.trace(carry, grads, [sums] * len(microbatches))

    def _microbatches(self, carry: Any, batch: Batch) -> list[Batch]:
        params, _ = self._parts.inputs(carry, None)
        check_params(params, self._specs, self._mesh)
        if self._check is not None:
            self._check(batch, self._cfg)
        if self._key is not None and "rows" not in batch:
            batch = batch | {"rows": torch.arange(_batch_size(batch), device=self._key.device)}
        return _cut(batch, self._num_microbatches, self._mesh)

    def _zero_grads(self, carry: Any) -> Params:
        params, _ = self._parts.inputs(carry, None)
        return tree.map(lambda p: torch.zeros_like(p, dtype=at_least_fp32(p[:0]).dtype), params)


def _batch_size(batch: Batch) -> int:
    sizes = {name: len(leaf) for name, leaf in batch.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"the parts of a batch have different numbers of sequences: {sizes}")
    return next(iter(sizes.values()))


def _cut(batch: Batch, num_microbatches: int, mesh: Mesh | None) -> list[Batch]:
    size = _batch_size(batch)
    ranks = 1 if mesh is None else mesh.size(mesh.axes_of("batch"))
    if size % (num_microbatches * ranks) and size % num_microbatches == 0:
        raise ValueError(
            f"a microbatch of {size // num_microbatches} sequences is not divisible over {ranks} data-parallel ranks: "
            f"use batches of a multiple of {num_microbatches * ranks} sequences"
        )
    if num_microbatches < 1 or size % num_microbatches:
        raise ValueError(
            f"a batch of {size} sequences cannot be cut into num_microbatches {num_microbatches}: use a divisor of {size}"
        )
    parts = {name: leaf.chunk(num_microbatches) for name, leaf in batch.items()}
    return [{name: leaf[i] for name, leaf in parts.items()} for i in range(num_microbatches)]

"""GPT: embedding, stacks of layers, a final norm and the output projection, as pure functions of a parameter tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fmeg import tree
from fmeg.autodiff import is_concrete
from fmeg.backends.matmul import choose_kernels
from fmeg.config import TransformerConfig
from fmeg.fusion import layer_boundary
from fmeg.layers.attention import RESIDUAL
from fmeg.layers.dropout import DropoutKey
from fmeg.layers.embedding import embed, embedding_specs, output_specs, unembed
from fmeg.layers.loss import TokenLoss, cross_entropy, same_tokens
from fmeg.layers.norm import norm, norm_specs
from fmeg.layers.rotary import Rotary, rotary_table
from fmeg.layers.transformer import (
    LayerKeys,
    LayerSpec,
    get_gpt_decoder_block_spec,
    group_layers,
    layer_specs,
    transformer_layer,
)
from fmeg.params import Params, Specs, cast_to_compute, check_params, init_from_specs, shard_tree, stack, unshard_tree
from fmeg.remat import remat
from fmeg.sharding.mesh import Ctx, Mesh, check_mesh
from fmeg.sharding.reshard import on_mesh, reshard, take_batch
from fmeg.sharding.spec import P

Layers = LayerSpec | Sequence[LayerSpec] | None


def gpt_specs(cfg: TransformerConfig, *, layers: Layers = None) -> Specs:
    """The parameters of a GPT: embedding, layers (stacked, by the name of their LayerSpec), final_norm, output.

    `layers`: one LayerSpec for all layers, or one for each; None: those that the config asks for.

    >>> cfg = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> gpt_specs(cfg)["layers"]["dense"]["mlp"]["up"]["weight"].shape
    (2, 8, 32)
    """
    specs = {"embedding": embedding_specs(cfg), "layers": {}, "final_norm": norm_specs(cfg, cfg.hidden_size)}
    for group in group_layers(_layer_list(cfg, layers)):
        for name, layer in zip(group.names, group.unit, strict=True):
            specs["layers"][name] = stack(layer_specs(cfg, layer), group.repeats)
    if not cfg.share_embeddings_and_output_weights:
        specs["output"] = output_specs(cfg)
    return specs


def init_params(
    cfg: TransformerConfig,
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    specs: Specs | None = None,
    device: torch.device | str = "cpu",
) -> Params:
    """Initial parameters, a nested dict: normal(0, init_method_std), the output projection of each sublayer smaller by
    sqrt(2 num_layers) (Megatron-LM, Shoeybi et al. 2019). The same (config, seed) gives the same bits.

    >>> cfg = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> params = init_params(cfg, seed=0)
    >>> params["embedding"]["tokens"].shape  # stored padded to a multiple of 128 rows
    torch.Size([128, 8])
    """
    check_mesh(cfg, mesh)
    specs = gpt_specs(cfg) if specs is None else specs

    def init(ctx: Ctx) -> Params:
        return init_from_specs(specs, seed=seed, dtype=cfg.params_dtype, device=device, ctx=ctx)

    return on_mesh(init, mesh)()


def shard_params(params: Params, cfg: TransformerConfig, mesh: Mesh | None, *, specs: Specs | None = None) -> Params:
    """The parts that the ranks of `mesh` hold of the tree that a single device would hold. Gradients shard alike.

    >>> from fmeg.sharding.mesh import simulated_mesh
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96,
    ...     tensor_model_parallel_size=2)
    >>> whole = init_params(cfg.replace(tensor_model_parallel_size=1))
    >>> parts = shard_params(whole, cfg, simulated_mesh(cfg))
    >>> parts["layers"]["dense"]["mlp"]["up"]["weight"].shape  # [ranks, layers, embed, mlp of one rank]
    torch.Size([2, 1, 8, 16])
    """
    check_mesh(cfg, mesh)
    specs = gpt_specs(cfg) if specs is None else specs
    check_params(params, tree.map(lambda spec: spec.on_one_device(cfg), specs))
    return on_mesh(lambda ctx, params: shard_tree(params, specs, ctx), mesh, shared=(0,))(params)


def unshard_params(params: Params, cfg: TransformerConfig, mesh: Mesh | None, *, specs: Specs | None = None) -> Params:
    """The tree that a single device would hold; the inverse of `shard_params`.

    >>> from fmeg.sharding.mesh import simulated_mesh
    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96,
    ...     tensor_model_parallel_size=2)
    >>> mesh = simulated_mesh(cfg)
    >>> unshard_params(init_params(cfg, mesh=mesh), cfg, mesh)["layers"]["dense"]["mlp"]["up"]["weight"].shape
    torch.Size([1, 8, 32])
    """
    check_mesh(cfg, mesh)
    specs = gpt_specs(cfg) if specs is None else specs
    check_params(params, specs, mesh)
    whole = on_mesh(lambda ctx, params: unshard_tree(params, specs, cfg, ctx), mesh)(params)
    return whole if mesh is None or not mesh.simulated else tree.map(lambda leaf: leaf[0], whole)


def gpt_forward(
    params: Params,
    tokens: Tensor,
    cfg: TransformerConfig,
    *,
    mesh: Mesh | None = None,
    layers: Layers = None,
) -> Tensor:
    """tokens [B, T] -> logits [B, T, V] over the true vocabulary, in at least fp32, without dropout.

    Errors: ValueError for parameters of other shapes, ids outside the vocabulary, or T above max_position_embeddings.

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> gpt_forward(init_params(cfg), torch.tensor([[1, 2, 3]]), cfg).shape
    torch.Size([1, 3, 96])
    """
    check_mesh(cfg, mesh)
    cfg = choose_kernels(cfg, mesh)
    check_params(params, gpt_specs(cfg, layers=layers), mesh)
    check_batch({"tokens": tokens}, cfg)

    def forward(ctx: Ctx, params: Params, tokens_BT: Tensor) -> Tensor:
        params = cast_to_compute(params, gpt_specs(cfg, layers=layers), cfg)
        x_BTD = gpt_hidden(params, take_batch(tokens_BT, ctx), cfg, ctx, layers=layers)
        x_BTD = reshard(x_BTD, RESIDUAL, P("batch", "seq", "embed"), ctx)
        logits_BTV = unembed(_output_weight(params, cfg), x_BTD, cfg, ctx)
        return reshard(logits_BTV, P("batch", "seq", "vocab"), P(None, None, None), ctx)[..., : cfg.vocab_size]

    logits = on_mesh(forward, mesh, shared=(1,))(params, tokens)
    return logits if mesh is None or not mesh.simulated else logits[0]


def gpt_forward_step(
    params: Params,
    batch: dict[str, Tensor],
    cfg: TransformerConfig,
    ctx: Ctx,
    *,
    key: Tensor | None = None,
    layers: Layers = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of a batch as a sum and a count: `(loss_sum, token_count, metrics)`, each metric a sum over tokens too.

    `batch`: tokens and labels [B, T], integers; loss_mask [B, T], the weight of each position, all ones if absent; rows
    [B], the sequences' places in the global batch, which choose their dropout masks, 0 .. B-1 if absent. A label at a
    position of weight 0 may be anything. `key` turns dropout on. On a mesh the batch is this rank's part of the global one,
    and all results are this rank's shares: their sums over all ranks are the global sums.

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> batch = {"tokens": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, 3, 4]])}
    >>> loss_sum, token_count, metrics = gpt_forward_step(init_params(cfg), batch, cfg, None)
    >>> round((loss_sum / token_count).item(), 1), token_count.item()  # ln 96 = 4.56
    (4.6, 3.0)
    """
    unknown = sorted(batch.keys() - {"tokens", "labels", "loss_mask", "rows"})
    if unknown or "labels" not in batch:
        raise ValueError(f"batch has the keys {sorted(batch)}: must be tokens, labels and, if wanted, loss_mask and rows")
    check_batch(batch, cfg)
    tokens_BT, labels_BT = batch["tokens"], batch["labels"]
    mask_BT = batch.get("loss_mask")
    mask_BT = torch.ones(tokens_BT.shape, device=tokens_BT.device) if mask_BT is None else mask_BT.float()
    dropout_key = None
    if key is not None:
        rows_B = batch.get("rows", torch.arange(len(tokens_BT), device=tokens_BT.device))
        dropout_key = DropoutKey(key, rows_B)
    params = cast_to_compute(params, gpt_specs(cfg, layers=layers), cfg)
    x_BTD = gpt_hidden(params, tokens_BT, cfg, ctx, layers=layers, key=dropout_key)
    sums = _loss_sums(_output_weight(params, cfg), x_BTD, labels_BT, mask_BT, cfg, ctx)
    metrics = {"nll": sums.nll_BT} | ({"z_loss": sums.z_loss_BT} if cfg.z_loss_coeff else {})
    return sums.loss_BT, mask_BT.sum() / same_tokens(ctx), metrics


def _loss_sums(
    weight_VD: Tensor, x_BTD: Tensor, labels_BT: Tensor, mask_BT: Tensor, cfg: TransformerConfig, ctx: Ctx
) -> TokenLoss:
    """The loss and its parts, summed over tokens by their weights.

    Tokens go through the projection and the loss in chunks. A chunk's gradient needs nothing of the other chunks, so that a
    compiled step keeps the logits of one chunk at a time.
    """
    x_BTD = reshard(x_BTD, RESIDUAL, P("batch", "seq", "embed"), ctx)
    chunks = max(1, math.ceil(labels_BT.numel() / cfg.loss_chunk_tokens))

    def chunk_sums(x_CD: Tensor, labels_C: Tensor, mask_C: Tensor) -> TokenLoss:
        logits_BTV = unembed(weight_VD, x_CD[None], cfg, ctx)
        terms = cross_entropy(logits_BTV, torch.where(mask_C != 0, labels_C, 0)[None], cfg, ctx)
        return tree.map(lambda term_BT: torch.where(mask_C != 0, term_BT * mask_C, 0.0).sum(), terms)

    flat = (x_BTD.flatten(0, 1), labels_BT.flatten(), mask_BT.flatten())
    parts = [chunk_sums(*chunk) for chunk in zip(*(t.tensor_split(chunks) for t in flat), strict=True)]
    return tree.map(lambda *sums: sum(sums), *parts)


def gpt_hidden(
    params: Params,
    tokens_BT: Tensor,
    cfg: TransformerConfig,
    ctx: Ctx,
    *,
    layers: Layers = None,
    key: DropoutKey | None = None,
) -> Tensor:
    """tokens[B,T] -> x[B,T,D] after the final norm; `params` are in the compute dtype (`cast_to_compute`), and so is x."""
    positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    keys = _split_keys(key, cfg.num_layers)
    x_BTD = embed(params["embedding"], tokens_BT, positions_T, cfg, ctx, key=next(keys))
    rotary = rotary_table(cfg, positions_T)
    todo = [(layer, p, next(keys)) for layer, p in _unstack(params["layers"], _layer_list(cfg, layers))]
    for size, recomputed in cfg.recompute_units:
        unit = zip(*(todo.pop(0) for _ in range(size)), strict=True)
        run = remat(_layers_in_turn) if recomputed else _layers_in_turn
        x_BTD = run(layer_boundary(x_BTD), cfg, ctx, *unit, rotary=rotary)
    return norm(params["final_norm"], layer_boundary(x_BTD), cfg)


def _layers_in_turn(
    x_BTD: Tensor,
    cfg: TransformerConfig,
    ctx: Ctx,
    layers: Sequence[LayerSpec],
    params: Sequence[Params],
    keys: Sequence[LayerKeys | None],
    *,
    rotary: Rotary | None,
) -> Tensor:
    for layer, layer_params, layer_keys in zip(layers, params, keys, strict=True):
        x_BTD = transformer_layer(layer_params, x_BTD, cfg, ctx, layer, rotary=rotary, keys=layer_keys)
    return x_BTD


def check_batch(batch: dict[str, Tensor], cfg: TransformerConfig) -> None:
    """Refuse a batch that the model cannot take: ValueError or TypeError in one line.

    Shapes and dtypes are always checked; the values of ids only where they are known, that is not while tracing.
    """
    if "tokens" not in batch:
        raise ValueError(
            f"batch has the keys {sorted(batch)}, but no tokens: give tokens, or check=None for another model's batch"
        )
    tokens = batch["tokens"]
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}: must be [batch, sequence]")
    if tokens.shape[1] > cfg.max_position_embeddings:
        raise ValueError(
            f"sequence length {tokens.shape[1]} is above max_position_embeddings {cfg.max_position_embeddings}: "
            "shorten the sequences or raise max_position_embeddings"
        )
    if cfg.sequence_parallel and tokens.shape[1] % cfg.tensor_model_parallel_size:
        raise ValueError(
            f"sequence length {tokens.shape[1]} is not divisible by tensor_model_parallel_size "
            f"{cfg.tensor_model_parallel_size}, over which sequence_parallel shards it: use a multiple"
        )
    for name in ("labels", "loss_mask"):
        if name in batch and batch[name].shape != tokens.shape:
            raise ValueError(f"{name} have shape {tuple(batch[name].shape)}: must be that of tokens, {tuple(tokens.shape)}")
    mask = batch.get("loss_mask")
    for name in ("tokens", "labels"):
        if name in batch:
            used = None if name == "tokens" or mask is None else mask != 0
            _check_ids(name, batch[name], used, cfg.vocab_size)


def _check_ids(name: str, ids: Tensor, used: Tensor | None, vocab_size: int) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} have dtype {ids.dtype}: must be torch.int64 or torch.int32")
    # A traced, mapped or fake tensor has no values to look at; the step checks them before it enters the graph.
    if ids.numel() == 0 or not is_concrete(ids):
        return
    low, high = (ids if used is None else torch.where(used, ids, 0)).aminmax()
    bad = low if low < 0 else high
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} hold id {bad.item()}, outside the vocabulary: must be in [0, {vocab_size})")


def _layer_list(cfg: TransformerConfig, layers: Layers) -> Sequence[LayerSpec]:
    """One LayerSpec per layer."""
    if layers is None:
        return get_gpt_decoder_block_spec(cfg)
    if isinstance(layers, LayerSpec):
        return (layers,) * cfg.num_layers
    if len(layers) != cfg.num_layers:
        raise ValueError(f"layers holds {len(layers)} LayerSpecs for num_layers {cfg.num_layers}: give one, or one per layer")
    return layers


def _unstack(stacks: Params, layers: Sequence[LayerSpec]) -> Iterator[tuple[LayerSpec, Params]]:
    """Each layer's spec and parameters, in the model's order."""
    for group in group_layers(layers):
        # unbind, not indexing: its backward is one stack, where n selects would each fill and add a whole array.
        units = []
        for name in group.names:
            flat, treedef = tree.flatten(stacks[name])
            units.append([tree.unflatten(treedef, list(one)) for one in zip(*(p.unbind(0) for p in flat), strict=True)])
        for i in range(group.repeats):
            for layer, per_repeat in zip(group.unit, units, strict=True):
                yield layer, per_repeat[i]


def _split_keys(key: DropoutKey | None, num_layers: int) -> Iterator[Any]:
    """The key of the embedding, then the keys of each layer, from one split."""
    if key is None:
        yield from [None] * (1 + num_layers)
        return
    first, *rest = key.split(1 + 4 * num_layers)
    yield first
    for i in range(num_layers):
        yield LayerKeys(*rest[4 * i : 4 * i + 4])


def _output_weight(params: Params, cfg: TransformerConfig) -> Tensor:
    return params["embedding"]["tokens"] if cfg.share_embeddings_and_output_weights else params["output"]["weight"]

"""What a model, an optimizer and a training run are: frozen dataclasses with Megatron-LM's field names and defaults.

A field is here when something reads it. `docs/coming-from-megatron.md` says where the others went. `None` means
"derive it": the properties give the derived value, so `replace` never leaves a stale one behind.

>>> cfg = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=96)
>>> cfg.head_dim, cfg.ffn_size, cfg.padded_vocab_size
(16, 256, 128)
>>> cfg.replace(num_attention_heads=5)
Traceback (most recent call last):
ValueError: hidden_size 64 is not divisible by num_attention_heads 5: use 1, 2, 4, 8, 16, 32 or 64 heads, or set kv_channels
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from fmeg.validation import Replaceable, check_literals, check_types, divisors, either, positive_int, require

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling: low frequencies divided by `factor`, high ones kept, a ramp between.

    Lengths in tokens. Source: the Llama 3.1 release, `rope_type: llama3`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_types(self)
        require(self.factor >= 1, "rope_scaling.factor", self.factor, "at least 1")
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            "rope_scaling.low_freq_factor",
            self.low_freq_factor,
            f"above 0 and below high_freq_factor {self.high_freq_factor}",
        )
        positive_int("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (Peng et al. 2023): frequencies interpolated by wavelength, and attention scaled by a concentration factor.

    The factor is `mscale(factor, mscale) / mscale(factor, mscale_all_dim)` with `mscale(s, m) = 0.1 m ln s + 1`, or
    `attention_factor` when given. `truncate` rounds the ramp's ends to whole dimensions, as the paper's code does.
    """

    factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        require(self.factor >= 1, "rope_scaling.factor", self.factor, "at least 1")
        for name in ("mscale", "mscale_all_dim"):
            require(getattr(self, name) >= 0, f"rope_scaling.{name}", getattr(self, name), "at least 0")
        given = self.attention_factor
        require(given is None or given > 0, "rope_scaling.attention_factor", given, "above 0, or None")
        require(
            self.beta_fast > self.beta_slow > 0,
            "rope_scaling.beta_fast",
            self.beta_fast,
            f"above beta_slow {self.beta_slow}, which is above 0",
        )
        positive_int("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)


RopeScaling = Llama3RopeScaling | YarnRopeScaling
ROPE_SCALINGS: dict[str, type] = {"llama3": Llama3RopeScaling, "yarn": YarnRopeScaling}


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig(Replaceable):
    """Layout, and number formats of parameters and of compute."""

    tensor_model_parallel_size: int = 1
    """Ranks over which heads, the MLP and the vocabulary are sharded."""
    sequence_parallel: bool = False
    """Shard the residual stream, norms and dropout over the tensor-parallel ranks by position."""
    ddp_bucket_size: int = 40_000_000
    """Elements of gradients that are summed over ranks together, while the backward goes on."""
    params_dtype: torch.dtype = torch.float32
    """The dtype in which parameters are held."""
    bf16: bool = False
    """Hold fp32 parameters, cast them once per step and compute in bf16; norms, softmax, loss, gradients and optimizer stay
    in fp32."""

    def __post_init__(self) -> None:
        check_types(self)
        check_literals(self)
        _check_dtypes(self)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations and matrix products."""
        return torch.bfloat16 if self.bf16 else self.params_dtype


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelParallelConfig):
    """A decoder-only transformer."""

    # architecture
    num_layers: int
    """Number of transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads of each layer."""
    vocab_size: int
    """Number of token ids."""
    num_query_groups: int | None = None
    """Key/value heads. None: one per query head; 1: multi-query attention."""
    kv_channels: int | None = None
    """Head dimension. None: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. None: 4 * hidden_size."""
    max_position_embeddings: int = 2048
    """The longest sequence, in tokens."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """The norm before each sublayer and at the end."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance or the mean square."""
    layernorm_zero_centered_gamma: bool = False
    """Store a norm's weight as its distance from 1 (Megatron's apply_layernorm_1p)."""
    activation: Literal["gelu", "gelu_tanh", "silu", "squared_relu"] = "gelu"
    """Of the MLP."""
    gated_linear_unit: bool = False
    """Multiply the activation by a second projection: silu makes SwiGLU of it, gelu GeGLU."""
    add_bias_linear: bool = True
    """A bias in every linear layer but the output layer."""
    add_qkv_bias: bool = False
    """A bias in the query, key and value projections, also without add_bias_linear."""

    # attention
    softmax_scale: float | None = None
    """What scores are multiplied by. None: 1 / sqrt(head dimension)."""
    qk_layernorm: bool = False
    """Normalize each head's query and key before the rotary embedding."""
    window_size: tuple[int, int] | None = None
    """(left, right): position t attends to t - left .. t + right. Causal, so right is 0. None: no window."""
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    """Which layers use the window: n skips it in every n-th layer; a tuple of 0/1 says for each layer whether it is used."""
    attention_backend: Literal["auto", "fused", "unfused"] = "auto"
    """fused: torch's flash kernel. unfused: plain products, differentiable in every mode. auto: fused unless dropout is on."""
    matmul_kernel: Literal["auto", "torch", "onednn", "fp32"] = "auto"
    """How a CPU multiplies matrices. torch: its own choice. onednn: fp32 through oneDNN. fp32: bf16 by way of fp32, for CPUs
    without bf16 instructions. auto: the fastest, measured when a step is made."""

    # positions
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """learned_absolute: a table of max_position_embeddings rows. rope: rotary."""
    rotary_base: float = 10000.0
    """Base of the rotary wavelengths."""
    rotary_percent: float = 1.0
    """Share of the head dimension that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighbouring pairs instead of the two halves."""
    rope_scaling: RopeScaling | None = None
    """Frequency scaling for longer contexts than the model was trained on, with all numbers of its kind."""

    # embedding and output
    share_embeddings_and_output_weights: bool = False
    """Use the token embedding as the output projection too."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is stored padded to a multiple of this. The padding never shows in a result or a file."""

    # regularization
    hidden_dropout: float = 0.1
    """On the embedding and on what each sublayer adds, in training."""
    attention_dropout: float = 0.1
    """On attention probabilities, in training."""
    label_smoothing: float = 0.0
    """Share of the target's mass that is spread evenly over the vocabulary."""
    z_loss_coeff: float = 0.0
    """Coefficient of logsumexp(logits)^2 per token (PaLM, Chowdhery et al. 2022, section 5)."""
    loss_chunk_tokens: int = 512
    """Tokens whose logits a compiled step holds at a time."""

    # memory
    recompute_granularity: Literal["full", "selective"] | None = None
    """What the backward computes again instead of keeping it. full: layers. selective: recompute_modules of every layer."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Of full. uniform: all layers, of which every recompute_num_layers-th input is kept. block: the first
    recompute_num_layers layers, each by itself."""
    recompute_num_layers: int | None = None
    """Of full: see recompute_method."""
    recompute_modules: tuple[str, ...] | None = None
    """Of selective: any of core_attn (scores, softmax, dropout, values), layernorm, mlp. None: core_attn."""

    # initial values
    init_method_std: float = 0.02
    """Standard deviation of initial weights; smaller by sqrt(2 num_layers) where a sublayer ends."""
    embedding_init_method_std: float | None = None
    """None: init_method_std."""

    def __post_init__(self) -> None:
        # What says most about a wrong value comes first, the types of the rest before their numbers are compared.
        for check in (
            _check_sizes,
            _check_window,
            check_types,
            check_literals,
            _check_dtypes,
            _check_heads,
            _check_tensor_parallel,
            _check_rotary,
            _check_rates,
            _check_attention_backend,
            _check_matmul_kernel,
            _check_recompute,
        ):
            check(self)

    def on_one_device(self) -> Self:
        """The same model without a mesh: what a layout must not change is computed from this."""
        return self.replace(tensor_model_parallel_size=1, sequence_parallel=False)

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def padded_vocab_size(self) -> int:
        """Rows in which the vocabulary is stored."""
        unit = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return math.ceil(self.vocab_size / unit) * unit

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules of a layer that the backward computes again."""
        return (self.recompute_modules or ("core_attn",)) if self.recompute_granularity == "selective" else ()

    @property
    def recompute_units(self) -> tuple[tuple[int, bool], ...]:
        """The layers in units that are computed, and if True recomputed, as one: pairs of a number of layers and that."""
        n, size = self.num_layers, self.recompute_num_layers
        if self.recompute_granularity != "full" or size is None:
            return ((1, False),) * n
        if self.recompute_method == "block":
            return ((1, True),) * min(size, n) + ((1, False),) * max(0, n - size)
        return tuple((min(size, n - start), True) for start in range(0, n, size))

    def layer_window(self, layer: int) -> tuple[int, int] | None:
        """The attention window of layer `layer`, counted from 0."""
        skip = self.window_attn_skip_freq
        if self.window_size is None or skip is None:
            return self.window_size
        used = skip[layer] if isinstance(skip, tuple) else (layer + 1) % skip != 0
        return self.window_size if used else None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Replaceable):
    """The optimizer and its learning rate schedule. The step count of the schedule is the count of applied updates."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam: AdamW, decay decoupled (Loshchilov and Hutter 2019). sgd: with momentum."""
    lr: float = 1e-3
    """Largest learning rate."""
    min_lr: float = 0.0
    """Where the decay ends."""
    weight_decay: float = 0.01
    """Not applied to biases and norm weights."""
    adam_beta1: float = 0.9
    """Decay per update of the mean gradient."""
    adam_beta2: float = 0.95
    """Decay per update of the mean squared gradient. Megatron-LM's default is 0.999."""
    adam_eps: float = 1e-8
    """Added to the root of the mean square."""
    sgd_momentum: float = 0.9
    """Of sgd."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD", "inverse-square-root"] = "cosine"
    """How the learning rate falls from lr to min_lr after the warm-up."""
    lr_warmup_iters: int = 0
    """Linear warm-up; the first update then has learning rate lr_warmup_init."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    lr_decay_iters: int | None = None
    """Updates after which the learning rate is min_lr. None: train_iters."""
    lr_wsd_decay_iters: int | None = None
    """WSD only: length of the final decay."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """WSD only: the shape of the final decay."""

    def __post_init__(self) -> None:
        check_types(self)
        check_literals(self)
        for name in ("lr_decay_iters", "lr_wsd_decay_iters"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad", "lr_warmup_iters", "lr_warmup_init"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        require(math.isfinite(self.lr), "lr", self.lr, "finite")
        for name in ("min_lr", "lr_warmup_init"):
            require(getattr(self, name) <= self.lr, name, getattr(self, name), f"at most lr {self.lr}")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            raise ValueError("lr_decay_style WSD needs lr_wsd_decay_iters, the length of the final decay; it is None")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Replaceable):
    """A training run: batches, length, what is written and when. Sizes in sequences, lengths in tokens or updates."""

    seq_length: int = 256
    """Tokens per sequence."""
    micro_batch_size: int = 8
    """Sequences that a data-parallel rank computes at a time."""
    global_batch_size: int = 8
    """Sequences per update; a multiple of micro_batch_size."""
    train_iters: int = 500
    """Updates."""
    seed: int = 1234
    """Of initial weights, data order and dropout."""
    log_interval: int = 10
    """Updates between lines of metrics.jsonl."""
    eval_interval: int = 100
    """Updates between evaluations on held-out text; 0: only at the end."""
    eval_iters: int = 10
    """Batches per evaluation on the way; the last one reads all held-out text."""
    save_interval: int = 0
    """Updates between checkpoints; 0: only at the end."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            "seq_length",
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "log_interval",
            "eval_iters",
        ):
            positive_int(name, getattr(self, name))
        for name in ("eval_interval", "save_interval", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not divisible by micro_batch_size "
                f"{self.micro_batch_size}: use micro_batch_size {either(divisors(self.global_batch_size))}"
            )

    def num_microbatches(self, data_parallel_size: int = 1) -> int:
        """Microbatches per update: each has micro_batch_size sequences on each data-parallel rank."""
        together = self.micro_batch_size * data_parallel_size
        if self.global_batch_size % together:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not divisible by micro_batch_size {self.micro_batch_size} "
                f"times {data_parallel_size} data-parallel ranks: use a multiple of {together}"
            )
        return self.global_batch_size // together


def _check_sizes(cfg: TransformerConfig) -> None:
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
        "loss_chunk_tokens",
        "ddp_bucket_size",
        "tensor_model_parallel_size",
    ):
        positive_int(name, getattr(cfg, name))
    for name in ("num_query_groups", "kv_channels", "ffn_hidden_size"):
        if getattr(cfg, name) is not None:
            positive_int(name, getattr(cfg, name))


def _check_heads(cfg: TransformerConfig) -> None:
    if cfg.kv_channels is None and cfg.hidden_size % cfg.num_attention_heads:
        raise ValueError(
            f"hidden_size {cfg.hidden_size} is not divisible by num_attention_heads {cfg.num_attention_heads}: "
            f"use {either(divisors(cfg.hidden_size))} heads, or set kv_channels"
        )
    if cfg.num_attention_heads % cfg.query_groups:
        raise ValueError(
            f"num_attention_heads {cfg.num_attention_heads} is not divisible by num_query_groups {cfg.query_groups}: "
            f"use num_query_groups {either(divisors(cfg.num_attention_heads))}"
        )


def _check_tensor_parallel(cfg: TransformerConfig) -> None:
    tp, heads, groups = cfg.tensor_model_parallel_size, cfg.num_attention_heads, cfg.query_groups
    works = [n for n in divisors(heads) if cfg.ffn_size % n == 0 and (groups % n == 0 or n % groups == 0)]
    for name, size in (("num_attention_heads", heads), ("ffn_hidden_size", cfg.ffn_size)):
        if size % tp:
            raise ValueError(
                f"{name} {size} is not divisible by tensor_model_parallel_size {tp}: "
                f"use tensor_model_parallel_size {either(works)}, or another {name}"
            )
    if groups % tp and tp % groups:
        raise ValueError(
            f"num_query_groups {groups} neither divides nor is divided by tensor_model_parallel_size {tp}: "
            f"use tensor_model_parallel_size {either(works)}, or another num_query_groups"
        )


def _check_window(cfg: TransformerConfig) -> None:
    window, skip = cfg.window_size, cfg.window_attn_skip_freq
    left_only = isinstance(window, tuple) and len(window) == 2 and isinstance(window[0], int) and window[0] >= 0 == window[1]
    if window is not None and not left_only:
        raise ValueError(f"window_size is {window}: must be (left, 0) with left >= 0, since attention is causal, or None")
    if skip is None:
        return
    if window is None:
        raise ValueError(f"window_attn_skip_freq is {skip} but window_size is None: set window_size=(left, 0) too")
    if isinstance(skip, tuple) and (len(skip) != cfg.num_layers or set(skip) - {0, 1}):
        raise ValueError(f"window_attn_skip_freq {skip} must hold one 0 or 1 for each of the {cfg.num_layers} layers")
    if not isinstance(skip, tuple):
        positive_int("window_attn_skip_freq", skip)


def _check_rotary(cfg: TransformerConfig) -> None:
    if cfg.position_embedding_type != "rope":
        if cfg.rope_scaling is not None:
            raise ValueError(
                f"rope_scaling is set but position_embedding_type is {cfg.position_embedding_type!r}: "
                "use position_embedding_type='rope' or rope_scaling=None"
            )
        return
    require(cfg.rotary_base > 1, "rotary_base", cfg.rotary_base, "above 1")
    require(0 < cfg.rotary_percent <= 1, "rotary_percent", cfg.rotary_percent, "in (0, 1]")
    if cfg.rotary_dim % 2 or cfg.rotary_dim == 0:
        raise ValueError(
            f"rotary_percent {cfg.rotary_percent} of head dimension {cfg.head_dim} rotates {cfg.rotary_dim} dimensions: "
            "the number must be even and above 0; change rotary_percent or kv_channels"
        )


def _check_rates(cfg: TransformerConfig) -> None:
    for name in ("hidden_dropout", "attention_dropout", "label_smoothing"):
        require(0 <= getattr(cfg, name) < 1, name, getattr(cfg, name), "in [0, 1)")
    for name in ("init_method_std", "z_loss_coeff"):
        require(getattr(cfg, name) >= 0, name, getattr(cfg, name), "at least 0")
    require(cfg.layernorm_epsilon > 0, "layernorm_epsilon", cfg.layernorm_epsilon, "above 0")
    for name in ("softmax_scale", "embedding_init_method_std"):
        if getattr(cfg, name) is not None:
            require(getattr(cfg, name) > 0, name, getattr(cfg, name), "above 0, or None")


def _check_dtypes(cfg: ModelParallelConfig) -> None:
    if cfg.params_dtype not in DTYPES.values():
        raise ValueError(f"params_dtype is {cfg.params_dtype}: must be {either(f'torch.{name}' for name in DTYPES)}")
    if cfg.bf16 and cfg.params_dtype != torch.float32:
        raise ValueError(f"bf16=True keeps fp32 parameters, but params_dtype is {cfg.params_dtype}: leave it torch.float32")


def _check_attention_backend(cfg: TransformerConfig) -> None:
    if cfg.attention_backend == "fused" and cfg.attention_dropout > 0:
        raise ValueError(
            f"attention_backend 'fused' has no keyed dropout, but attention_dropout is {cfg.attention_dropout}: "
            "use attention_dropout=0, or attention_backend 'auto' or 'unfused'"
        )


def _check_matmul_kernel(cfg: TransformerConfig) -> None:
    wanted = {"onednn": torch.float32, "fp32": torch.bfloat16}.get(cfg.matmul_kernel, cfg.compute_dtype)
    if cfg.compute_dtype != wanted:
        raise ValueError(
            f"matmul_kernel {cfg.matmul_kernel!r} is for {wanted}, but the model computes in {cfg.compute_dtype}: "
            "use 'auto' or 'torch'"
        )


RECOMPUTED_MODULES = ("core_attn", "layernorm", "mlp")


def _check_recompute(cfg: TransformerConfig) -> None:
    granularity, layers = cfg.recompute_granularity, cfg.recompute_num_layers
    for name in ("recompute_method", "recompute_num_layers"):
        given = getattr(cfg, name)
        if granularity == "full" and given is None:
            raise ValueError(
                f"recompute_granularity 'full' needs {name}: recompute_method='uniform', recompute_num_layers=1 recomputes all"
            )
        if granularity != "full" and given is not None:
            raise ValueError(
                f"{name} is {given!r} but recompute_granularity is {granularity!r}: use recompute_granularity='full', "
                f"or leave {name} out"
            )
    if layers is not None:
        positive_int("recompute_num_layers", layers)
        if layers > cfg.num_layers:
            raise ValueError(f"recompute_num_layers is {layers}, of {cfg.num_layers} layers: use at most {cfg.num_layers}")
    modules = cfg.recompute_modules
    if modules is None:
        return
    if granularity != "selective":
        raise ValueError(f"recompute_modules is {modules} but recompute_granularity is {granularity!r}: make that 'selective'")
    if not modules or set(modules) - set(RECOMPUTED_MODULES):
        raise ValueError(f"recompute_modules is {modules}: must be one or more of {', '.join(RECOMPUTED_MODULES)}")


def config_to_dict(cfg: Any) -> dict[str, Any]:
    """A config as plain values, for JSON.

    >>> config_to_dict(Llama3RopeScaling())["kind"]
    'llama3'
    """
    out: dict[str, Any] = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, tuple):
            value = list(value)
        elif dataclasses.is_dataclass(value):
            value = config_to_dict(value)
        out[field.name] = value
    kinds = {cls: kind for kind, cls in ROPE_SCALINGS.items()}
    return {"kind": kinds[type(cfg)], **out} if type(cfg) in kinds else out


def config_from_dict(cls: type[Any], values: dict[str, Any]) -> Any:
    """The inverse of `config_to_dict`.

    >>> cfg = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=96, window_size=(8, 0),
    ...     position_embedding_type="rope", rope_scaling=YarnRopeScaling(factor=4.0))
    >>> config_from_dict(TransformerConfig, config_to_dict(cfg)) == cfg
    True
    """
    out: dict[str, Any] = {}
    for name, value in values.items():
        if name == "params_dtype":
            value = DTYPES[value]
        elif name == "rope_scaling" and value is not None:
            value = dict(value)
            value = ROPE_SCALINGS[value.pop("kind")](**value)
        elif isinstance(value, list):
            value = tuple(value)
        out[name] = value
    return cls(**out)

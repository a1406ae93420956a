"""fmeg: Megatron-LM's core as pure functions on torch.func. The names here are the public ones."""

from fmeg.checkpoint.huggingface import from_hf, to_hf
from fmeg.checkpoint.megatron import from_megatron, to_megatron
from fmeg.config import (
    Llama3RopeScaling,
    ModelParallelConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
    YarnRopeScaling,
)
from fmeg.explain import Collective, Explanation, explain
from fmeg.jit import jit
from fmeg.layers.transformer import (
    LayerSpec,
    Sublayer,
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from fmeg.models.gpt import gpt_forward, gpt_forward_step, gpt_specs, init_params, shard_params, unshard_params
from fmeg.optim import (
    Optimizer,
    adamw,
    apply_updates,
    chain,
    clip_by_global_norm,
    constant_schedule,
    cosine_schedule,
    global_norm,
    inverse_square_root_schedule,
    linear_schedule,
    sgd,
    wsd_schedule,
)
from fmeg.params import ParamSpec, count_params
from fmeg.sharding.mesh import Mesh, make_mesh, simulated_mesh
from fmeg.sharding.reshard import on_mesh, reshard
from fmeg.sharding.spec import P
from fmeg.train_step import (
    TrainState,
    init_state,
    make_grad_step,
    make_train_step,
    shard_state,
    unshard_state,
)

__version__ = "0.1.0"

__all__ = [
    "Collective",
    "Explanation",
    "LayerSpec",
    "Llama3RopeScaling",
    "Mesh",
    "ModelParallelConfig",
    "Optimizer",
    "OptimizerConfig",
    "P",
    "ParamSpec",
    "Sublayer",
    "TrainConfig",
    "TrainState",
    "TransformerConfig",
    "YarnRopeScaling",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_schedule",
    "count_params",
    "explain",
    "from_hf",
    "from_megatron",
    "get_gpt_decoder_block_spec",
    "get_gpt_layer_local_spec",
    "global_norm",
    "gpt_forward",
    "gpt_forward_step",
    "gpt_specs",
    "init_params",
    "init_state",
    "inverse_square_root_schedule",
    "jit",
    "linear_schedule",
    "make_grad_step",
    "make_mesh",
    "make_train_step",
    "on_mesh",
    "reshard",
    "sgd",
    "shard_params",
    "shard_state",
    "simulated_mesh",
    "to_hf",
    "to_megatron",
    "unshard_params",
    "unshard_state",
    "wsd_schedule",
]

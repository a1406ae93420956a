"""Run by torchrun: gradients on real ranks against those of one device and of simulated ranks. Prints one line on rank 0."""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from helpers import assert_trees_close, random_batch, small_config

import fmeg


def main(tp: int, sequence_parallel: bool, engine: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    alone = small_config(num_attention_heads=4, num_query_groups=2, add_bias_linear=True)
    cfg = alone.replace(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel, ddp_bucket_size=4000)
    mesh = fmeg.make_mesh(cfg)
    assert mesh is not None
    batch = random_batch(alone)
    whole = fmeg.init_params(alone)
    want, metrics = fmeg.make_grad_step(alone, compile=False)(whole, batch)

    params = fmeg.init_params(cfg, mesh=mesh)
    assert_trees_close(fmeg.unshard_params(params, cfg, mesh), whole, rtol=0)
    assert_trees_close(params, fmeg.shard_params(whole, cfg, mesh), rtol=0)
    how: Any = {"compile": False} if engine == "eager" else {"engine": engine}
    grads, on_mesh = fmeg.make_grad_step(cfg, mesh=mesh, **how)(params, batch)
    assert_trees_close(fmeg.unshard_params(grads, cfg, mesh), want, rtol=1e-5)
    assert_trees_close(on_mesh, metrics, rtol=1e-5)

    simulated = fmeg.simulated_mesh(cfg, data_parallel_size=dist.get_world_size() // tp)
    parts, _ = fmeg.make_grad_step(cfg, mesh=simulated, compile=False)(fmeg.init_params(cfg, mesh=simulated), batch)
    mine = fmeg.tree.map(lambda leaf: leaf[dist.get_rank()], parts)
    assert_trees_close(grads, mine, rtol=1e-5)
    logits = fmeg.gpt_forward(params, batch["tokens"], cfg, mesh=mesh)
    torch.testing.assert_close(logits, fmeg.gpt_forward(whole, batch["tokens"], alone), rtol=0, atol=1e-5)
    if dist.get_rank() == 0:
        sys.stdout.write(f"equal on {mesh.axes}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "sp", sys.argv[3])

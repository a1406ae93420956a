"""One rank of a fake process group: compares the order of collectives and products in generated code with the graph's."""

import re
import sys

import torch
import torch.distributed as dist
from helpers import random_batch, small_config
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

import fmeg
from fmeg.overlap import WAIT, is_start, overlap


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    cfg = small_config(matmul_kernel="torch", tensor_model_parallel_size=2, sequence_parallel=True, ddp_bucket_size=3000)
    mesh = fmeg.make_mesh(cfg)
    step = fmeg.make_grad_step(cfg, mesh=mesh)
    params, batch = fmeg.init_params(cfg, mesh=mesh), random_batch(cfg)
    graph = overlap(step._whole.trace(params, batch, None).graph)  # type: ignore[attr-defined]
    planned = []
    for node in graph.graph.nodes:
        if is_start(node) or node.target is WAIT:
            planned.append(str(node.target).split(".")[1])
        elif node.target is torch.ops.aten.mm.default:
            planned.append("mm")
    _, (code,) = run_and_get_code(step, params, batch)
    found = re.findall(r"^    .*?(?:_c10d_functional\.(\w+?)_?\.default|extern_kernels\.(mm|addmm))\(", code, re.MULTILINE)
    generated = [collective or "mm" for collective, _ in found]
    sys.stdout.write("in order\n" if generated == planned else f"planned   {planned}\ngenerated {generated}\n")


if __name__ == "__main__":
    main()

"""Matrix products: a table of the kernels that a CPU may have, and the measurement that chooses one of them.

Which kernel is fastest depends on the machine by large factors and cannot be told from its name: bf16 products are an order
of magnitude slower than fp32 ones where the CPU has no instructions for them, and fp32 products differ between the math
libraries that torch brings along.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fmeg.autodiff import apply_function
from fmeg.config import TransformerConfig
from fmeg.sharding.mesh import Mesh

MEASURED_SHAPE = (512, 512, 1024)
"""Rows, inner size and columns of the product that is timed; its two gradients are timed with it."""
WORTH_IT = 0.9
"""Another kernel than torch's own is taken when it needs less than this share of the time."""


class Kernel(NamedTuple):
    """`product(a[M,I], b[I,O]) -> [M,O]` in the dtype of `a`, differentiable; the dtypes for which it says something new."""

    product: Callable[[Tensor, Tensor], Tensor]
    dtypes: tuple[torch.dtype, ...]


def matmul_kernel(a: Tensor, cfg: TransformerConfig) -> Kernel:
    """The kernel that a config names, for arrays like `a`; torch's own where "auto" has not been resolved, and off the CPU."""
    return KERNELS["torch" if cfg.matmul_kernel == "auto" or a.device.type != "cpu" else cfg.matmul_kernel]


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Products of bf16 numbers are exact in fp32, and are added up in fp32 by every kernel: only the order differs."""
    return (a.float() @ b.float()).to(a.dtype)


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    return apply_function(_OneDNN, a, b)


@torch.library.custom_op("fmeg::onednn_matmul", mutates_args=())
def onednn_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a[M,I] . b[I,O] by oneDNN. An operation of its own, which inductor calls as it is: it takes the raw one for an
    inference with packed weights.
    """
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


@onednn_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


class _OneDNN(torch.autograd.Function):
    """oneDNN's product; torch itself uses it for fp32 only on some CPUs."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return onednn_matmul(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _onednn(g, b.t()), _onednn(a.t(), g)

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        parts = [
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip((a, b), in_dims, strict=True)
        ]
        return torch.stack([_onednn(*pair) for pair in zip(*parts, strict=True)]), 0


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "torch": Kernel(torch.matmul, (torch.float64, torch.float32, torch.bfloat16)),
        "onednn": Kernel(_onednn, (torch.float32,)),
        "fp32": Kernel(_in_fp32, (torch.bfloat16,)),
    }
)
"""torch: what `@` does. onednn: fp32 through oneDNN. fp32: bf16 by way of fp32."""


def choose_kernels(cfg: TransformerConfig, mesh: Mesh | None = None) -> TransformerConfig:
    """`cfg` with "auto" replaced by the name of the kernel that is fastest here; on real ranks, by the first one's choice.

    Measured once in a process, in some milliseconds, and never guessed from the machine's name. All kernels give the same
    numbers but for rounding; a run that must repeat another bit for bit names the kernel.

    >>> cfg = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=96)
    >>> choose_kernels(cfg).matmul_kernel in KERNELS, choose_kernels(cfg.replace(matmul_kernel="torch")).matmul_kernel
    (True, 'torch')
    """
    if cfg.matmul_kernel != "auto":
        return cfg
    names = [name for name, kernel in KERNELS.items() if cfg.compute_dtype in kernel.dtypes]
    if len(names) == 1:
        return cfg.replace(matmul_kernel="torch")
    real = mesh is not None and not mesh.simulated and dist.is_initialized()
    if real and dist.get_backend() != "gloo":
        return cfg.replace(matmul_kernel="torch")  # the arrays are not on the CPU
    choice: list[Any] = [None]
    if not real or dist.get_rank() == 0:
        seconds = {name: _seconds(name, cfg.compute_dtype, torch.get_num_threads()) for name in names}
        best = min(seconds, key=lambda name: seconds[name])
        choice = [best if seconds[best] < WORTH_IT * seconds["torch"] else "torch"]
    if real:
        dist.broadcast_object_list(choice, src=0)
    return cfg.replace(matmul_kernel=choice[0])


@functools.cache
def _seconds(name: str, dtype: torch.dtype, threads: int) -> float:
    """The time of a product and its two gradients: the least of a few, fewer where one takes long.

    Kept for the process, as a property of the machine: a step that is made twice is then the same step.
    """
    product, (rows, inner, columns) = KERNELS[name].product, MEASURED_SHAPE
    shapes = ((rows, inner), (inner, columns), (rows, columns))
    a, b, g = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        product(a, b), product(g, b.t()), product(a.t(), g)
        seconds = time.perf_counter() - start
        best = min(best, seconds)
        if seconds > 0.1:
            break
    return best

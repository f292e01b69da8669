"""The kernels in Triton, on CUDA: each pass touches a chunk's logits once.

Triton is no requirement: it is imported when the first kernel runs; `available` says if it can be.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures (one or two).
"""

import functools
import importlib.util
from typing import Any

import torch

from megatron_kd.losses.kernels import eager

READ_BLOCK, WRITE_BLOCK = 4096, 2048
WARPS = 8


@functools.cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


def _arguments(z: torch.Tensor, inverse_taus: tuple[float, ...]) -> tuple[Any, ...]:
    other = inverse_taus[1] if len(inverse_taus) == 2 else inverse_taus[0]
    return z, z.stride(0), inverse_taus[0], other


def max_and_sums(
    z: torch.Tensor, inverse_taus: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    if z.dtype == torch.float64:
        return eager.max_and_sums(z, inverse_taus)
    from megatron_kd.losses.kernels.triton_source import read_rows

    n, temperatures = z.shape[0], len(inverse_taus)
    m = z.new_empty(n, dtype=torch.float32)
    sums = z.new_empty(temperatures, n, dtype=torch.float32)
    read_rows[(n,)](
        *_arguments(z, inverse_taus),
        m,
        sums,
        COLUMNS=z.shape[1],
        TEMPERATURES=temperatures,
        BLOCK=READ_BLOCK,
        num_warps=WARPS,
    )
    return m, sums


def to_gradient_(
    z: torch.Tensor, m: torch.Tensor, scales: torch.Tensor, inverse_taus: tuple[float, ...]
) -> torch.Tensor:
    if z.dtype == torch.float64:
        return eager.to_gradient_(z, m, scales, inverse_taus)
    from megatron_kd.losses.kernels.triton_source import write_rows

    n, blocks = z.shape[0], -(-z.shape[1] // WRITE_BLOCK)
    write_rows[(n, blocks)](
        *_arguments(z, inverse_taus),
        m.contiguous(),
        scales.contiguous(),
        n,
        COLUMNS=z.shape[1],
        TEMPERATURES=len(inverse_taus),
        BLOCK=WRITE_BLOCK,
        num_warps=WARPS,
    )
    return z

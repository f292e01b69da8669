"""Numbers that lie on the device for good.

`torch.where(condition, x, 0.0)` makes a tensor of its number first, one launch more each time; a
chunk's small work is bound by launches. These are made once per dtype and device.

n rows of a chunk.
"""

import functools
import math

import torch

NAN = math.nan  # one object: what is kept is found by it, and NaN equals nothing


def where(condition: torch.Tensor, x: torch.Tensor, value: float) -> torch.Tensor:
    """x where the condition holds, value elsewhere; the dtype is that of x."""
    return torch.where(condition, x, _constant(value, x.dtype, x.device))


def row_numbers(x: torch.Tensor) -> torch.Tensor:
    """[n, 1] int64 that counts the rows of x [n, ...]."""
    rows = x.shape[0]
    return _numbers(1 << max(0, rows - 1).bit_length(), x.device)[:rows]


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it may first be asked for where no gradient is wanted
        return torch.full((), value, dtype=dtype, device=device)


@functools.cache
def _numbers(rows: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(rows, device=device).unsqueeze(-1)

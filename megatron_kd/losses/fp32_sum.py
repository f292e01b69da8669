"""Sums of 16-bit products in fp32: total [vp, h] += dz^T h, by the best product a device has.

Which of them a build of PyTorch takes does not show in its operators' names: builds of autumn 2025
have addmm(out_dtype=) and refuse an fp32 sum beside 16-bit factors. So each is tried once per
device, on matrices of 16 × 16, in the order of `PRODUCTS`.

vp = v/tp this rank's vocabulary, n rows of a chunk, h hidden.
"""

import functools
from collections.abc import Callable, Iterator

import torch

# A product that cannot be summed within itself is formed in slices of the vocabulary and added.
# On a CPU a slice should still be in the cache when it is added; on a GPU it should fill the
# device, and be read back at the memory's full rate.
CPU_SLICE_BYTES = 8 << 20
GPU_SLICE_BYTES = 64 << 20
PROBED = 16

# (total [vp, h] fp32, dz [n, vp], h [n, h], beta 0.0 or 1.0): total = beta * total + dz^T h
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]


def summed_within(total: torch.Tensor, dz: torch.Tensor, h: torch.Tensor, beta: float) -> None:
    """One product that adds to an fp32 sum; nothing beside it is allocated."""
    torch.addmm(total, dz.T, h, out_dtype=total.dtype, beta=beta, out=total)


def fp32_slices(total: torch.Tensor, dz: torch.Tensor, h: torch.Tensor, beta: float) -> None:
    """Products of 16-bit factors that come out in fp32, a slice of the vocabulary at a time."""
    for rows in _slices(total, h):
        part = torch.mm(dz[:, rows].T, h, out_dtype=total.dtype)
        _add_(total[rows], part, beta)


def rounded_slices(total: torch.Tensor, dz: torch.Tensor, h: torch.Tensor, beta: float) -> None:
    """Products rounded to their factors' dtype, each then added in fp32; every device has them."""
    for rows in _slices(total, h):
        _add_(total[rows], dz[:, rows].T @ h, beta)


PRODUCTS: dict[str, Product] = {
    "summed within": summed_within,
    "slices in fp32": fp32_slices,
    "rounded slices": rounded_slices,
}


def add_product_(total: torch.Tensor, dz: torch.Tensor, h: torch.Tensor, beta: float) -> None:
    """total [vp, h] = beta * total + dz^T h; with beta 0 what total held is never read.

    Args:
        total: fp32, or the dtype of the factors.
        dz, h: [n, vp] and [n, h], of one dtype.
    """
    if dz.dtype == total.dtype:
        total.addmm_(dz.T, h, beta=beta)
    else:
        PRODUCTS[_first_that_works(dz.device, dz.dtype)](total, dz, h, beta)


@functools.cache
def _first_that_works(device: torch.device, dtype: torch.dtype) -> str:
    return first_that_works(device, dtype, PRODUCTS)


def first_that_works(device: torch.device, dtype: torch.dtype, products: dict[str, Product]) -> str:
    """The name of the first product that this device takes for factors of dtype and gets right.

    Raises:
        RuntimeError: None does; says what each raised.
    """
    refusals = []
    for name, product in products.items():
        factor = torch.ones(PROBED, PROBED, device=device, dtype=dtype)
        total = torch.ones(PROBED, PROBED, device=device, dtype=torch.float32)
        try:
            product(total, factor, factor, 1.0)
        except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
            refusals.append(f"{name}: {error}")
            continue
        if device.type == "meta" or bool((total == PROBED + 1).all()):
            return name
        refusals.append(f"{name}: {total[0, 0].item()} in place of {PROBED + 1}")
    raise RuntimeError(
        f"no product of {dtype} factors can be summed in fp32 on {device}: " + "; ".join(refusals)
    )


def _slices(total: torch.Tensor, h: torch.Tensor) -> Iterator[slice]:
    most = CPU_SLICE_BYTES if total.device.type == "cpu" else GPU_SLICE_BYTES
    # Some libraries widen the factors first: [n, slice] of dz counts as the slice itself does.
    rows = max(1, most // (total.dtype.itemsize * max(1, *h.shape)))
    return (slice(i, i + rows) for i in range(0, total.shape[0], rows))


def _add_(total: torch.Tensor, part: torch.Tensor, beta: float) -> None:
    if beta:
        total += part
    else:
        total.copy_(part)

"""The Triton kernels of `triton_kernels`; importing this module imports Triton.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures (one or two).
"""

import triton
import triton.language as tl


@triton.jit
def read_rows(
    z,  # [n, vp]
    row_stride,
    inverse_tau,
    other_inverse_tau,
    m,  # [n]
    sums,  # [t, n]
    COLUMNS: tl.constexpr,  # vp, one per model
    TEMPERATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: maximum and sums in one reading, rescaled as the maximum grows."""
    row = tl.program_id(0).to(tl.int64)
    start = z + row * row_stride
    offsets = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    other = tl.full((), 0.0, tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        here = first + offsets
        x = tl.load(start + here, mask=here < COLUMNS, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        # -inf - -inf is NaN: a row of which nothing is left yet is shifted by 0
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        grown = top - shift
        total = total * tl.exp(grown * inverse_tau) + tl.sum(tl.exp((x - shift) * inverse_tau), 0)
        if TEMPERATURES == 2:
            block = tl.sum(tl.exp((x - shift) * other_inverse_tau), 0)
            other = other * tl.exp(grown * other_inverse_tau) + block
        top = new_top
    tl.store(m + row, top)
    tl.store(sums + row, total)
    if TEMPERATURES == 2:
        tl.store(sums + tl.num_programs(0) + row, other)


@triton.jit
def write_rows(
    z,  # [n, vp], overwritten
    row_stride,
    inverse_tau,
    other_inverse_tau,
    m,  # [n]
    scales,  # [t, n]
    rows,  # n
    COLUMNS: tl.constexpr,  # vp, one per model
    TEMPERATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row: scale * exp((z - m) / tau), summed over the temperatures."""
    row = tl.program_id(0).to(tl.int64)
    here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = here < COLUMNS
    place = z + row * row_stride + here
    shifted = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32) - tl.load(m + row)
    total = tl.load(scales + row) * tl.exp(shifted * inverse_tau)
    if TEMPERATURES == 2:
        total += tl.load(scales + rows + row) * tl.exp(shifted * other_inverse_tau)
    tl.store(place, total.to(z.dtype.element_ty), mask=inside)

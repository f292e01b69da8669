"""The Triton kernels of `kernels.triton`; importing this module imports Triton.

Blocks that lie inside a row are read and written without a mask, so that they move 16 bytes at a
time whatever the vocabulary; a mask would split the last block alone into single elements.

TRANSFORM says what makes logits of the x that a row holds: IDENTITY, SCALED (by `factor`) or CAPPED
(softcap * tanh(factor * x)), see `losses.logit_transform`.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures (one or two).
"""

import triton
import triton.language as tl

IDENTITY, SCALED, CAPPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# tanh is a quotient of 1 - exp(-2y), which has no digits left near 0; there its series has them all
SERIES_BELOW = tl.constexpr(0.2)


@triton.jit
def _logits(x, factor, softcap, TRANSFORM: tl.constexpr):
    """[BLOCK] fp32 of x; -inf, which was cut out, stays -inf."""
    z = x
    if TRANSFORM == SCALED:
        z = x * factor
    if TRANSFORM == CAPPED:
        y = tl.abs(x * factor)
        tail = tl.exp(-2 * y)
        square = y * y
        series = y * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
        size = softcap * tl.where(y < SERIES_BELOW, series, (1 - tail) / (1 + tail))
        z = tl.where(x == float("-inf"), x, tl.where(x < 0, -size, size))
    return z


@triton.jit
def _times_slope(dz, x, factor, softcap, TRANSFORM: tl.constexpr):
    """dz [BLOCK] times the derivative of `_logits` at x."""
    if TRANSFORM == SCALED:
        dz = dz * factor
    if TRANSFORM == CAPPED:
        tail = tl.exp(-2 * tl.abs(x * factor))
        dz = dz * (softcap * factor * 4 * tail / ((1 + tail) * (1 + tail)))
    return dz


@triton.jit
def _summed(
    z,  # [BLOCK] fp32, the next logits of the row
    top,
    total,
    other,
    inverse_tau,
    other_inverse_tau,
    TEMPERATURES: tl.constexpr,
):
    """Maximum and sums so far, with z; the sums are rescaled where the maximum grows."""
    new_top = tl.maximum(top, tl.max(z, 0))
    # -inf - -inf is NaN: a row of which nothing is left yet is shifted by 0
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    grown = top - shift
    total = total * tl.exp(grown * inverse_tau) + tl.sum(tl.exp((z - shift) * inverse_tau), 0)
    if TEMPERATURES == 2:
        block = tl.sum(tl.exp((z - shift) * other_inverse_tau), 0)
        other = other * tl.exp(grown * other_inverse_tau) + block
    return new_top, total, other


@triton.jit(do_not_specialize=["rows"])
def read_rows(
    z,  # [n, vp]
    row_stride,
    inverse_tau,
    other_inverse_tau,
    m,  # [n]
    sums,  # [t, n]
    rows,  # n
    factor,
    softcap,
    COLUMNS: tl.constexpr,  # vp, one per model
    TEMPERATURES: tl.constexpr,
    TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: maximum and sums in one reading, rescaled as the maximum grows."""
    row = tl.program_id(0).to(tl.int64)
    start = z + row * row_stride
    offsets = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    other = tl.full((), 0.0, tl.float32)
    INSIDE: tl.constexpr = COLUMNS // BLOCK * BLOCK
    for first in range(0, INSIDE, BLOCK):
        x = tl.load(start + first + offsets).to(tl.float32)
        x = _logits(x, factor, softcap, TRANSFORM)
        top, total, other = _summed(
            x, top, total, other, inverse_tau, other_inverse_tau, TEMPERATURES
        )
    if INSIDE < COLUMNS:
        last = INSIDE + offsets
        x = tl.load(start + last, mask=last < COLUMNS, other=float("-inf")).to(tl.float32)
        x = _logits(x, factor, softcap, TRANSFORM)
        top, total, other = _summed(
            x, top, total, other, inverse_tau, other_inverse_tau, TEMPERATURES
        )
    tl.store(m + row, top)
    tl.store(sums + row, total)
    if TEMPERATURES == 2:
        tl.store(sums + rows + row, other)


@triton.jit
def _gradient(
    x,  # [BLOCK] fp32, what one row holds
    m,
    scale,
    other_scale,
    inverse_tau,
    other_inverse_tau,
    factor,
    softcap,
    TEMPERATURES: tl.constexpr,
    TRANSFORM: tl.constexpr,
):
    z = _logits(x, factor, softcap, TRANSFORM)
    total = scale * tl.exp((z - m) * inverse_tau)
    if TEMPERATURES == 2:
        total += other_scale * tl.exp((z - m) * other_inverse_tau)
    return _times_slope(total, x, factor, softcap, TRANSFORM)


@triton.jit(do_not_specialize=["rows"])
def write_rows(
    z,  # [n, vp], overwritten
    row_stride,
    inverse_tau,
    other_inverse_tau,
    m,  # [n]
    scales,  # [t, n]
    rows,  # n
    factor,
    softcap,
    COLUMNS: tl.constexpr,  # vp, one per model
    TEMPERATURES: tl.constexpr,
    TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row: scale * exp((z - m) / tau), summed over the temperatures."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    here = first + tl.arange(0, BLOCK)
    place = z + row * row_stride + here
    top = tl.load(m + row)
    scale = tl.load(scales + row)
    other = scale
    if TEMPERATURES == 2:
        other = tl.load(scales + rows + row)
    if first + BLOCK <= COLUMNS:
        x = tl.load(place).to(tl.float32)
        dz = _gradient(
            x,
            top,
            scale,
            other,
            inverse_tau,
            other_inverse_tau,
            factor,
            softcap,
            TEMPERATURES,
            TRANSFORM,
        )
        tl.store(place, dz.to(z.dtype.element_ty))
    else:
        inside = here < COLUMNS
        x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
        dz = _gradient(
            x,
            top,
            scale,
            other,
            inverse_tau,
            other_inverse_tau,
            factor,
            softcap,
            TEMPERATURES,
            TRANSFORM,
        )
        tl.store(place, dz.to(z.dtype.element_ty), mask=inside)

"""`elementwise` in plain PyTorch: blocks of rows small enough for the cache, one block of scratch.

Letters: n rows, Vp this rank's vocabulary, T temperatures.
"""

import torch

from megatron_kd.losses.full_formulas import gradient, log_probability, row_sums

NEG_INF = float("-inf")
# A block of this size stays in the cache between the few operations on it, so that together they
# cost about one pass over memory.
CPU_BLOCK_BYTES = 2 << 20
# On an accelerator launches cost more than cache misses.
DEVICE_BLOCK_BYTES = 128 << 20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(z):
    """Slices of rows, and scratch [rows, Vp] for one of them."""
    dtype = accumulation_dtype(z.dtype)
    limit = CPU_BLOCK_BYTES if z.device.type == "cpu" else DEVICE_BLOCK_BYTES
    rows = max(1, min(z.shape[0], limit // (dtype.itemsize * z.shape[1])))
    blocks = [slice(i, min(i + rows, z.shape[0])) for i in range(0, z.shape[0], rows)]
    return blocks, z.new_empty(rows, z.shape[1], dtype=dtype)


def max_and_sums(z, inverse_taus):
    dtype = accumulation_dtype(z.dtype)
    m = z.new_full((z.shape[0],), NEG_INF, dtype=dtype)
    sums = z.new_zeros((len(inverse_taus), z.shape[0]), dtype=dtype)
    if z.numel() == 0:
        return m, sums
    blocks, scratch = _blocks(z)
    for rows in blocks:
        block, work = z[rows], scratch[: rows.stop - rows.start]
        m[rows] = block.amax(-1)
        shift = torch.where(m[rows] == NEG_INF, 0.0, m[rows]).unsqueeze(-1)
        for t, inverse_tau in enumerate(inverse_taus):
            _exponential(block, shift, inverse_tau, work)
            torch.sum(work, -1, out=sums[t, rows])
    return m, sums


def to_gradient_(z, m, scales, inverse_taus):
    if z.numel() == 0:
        return z
    blocks, scratch = _blocks(z)
    for rows in blocks:
        block, shift = z[rows], m[rows].unsqueeze(-1)
        work = scratch[: rows.stop - rows.start]
        _exponential(block, shift, inverse_taus[0], work)
        work.mul_(scales[0, rows].unsqueeze(-1))
        for t, inverse_tau in enumerate(inverse_taus[1:], start=1):
            more = _exponential(block, shift, inverse_tau, torch.empty_like(work))
            work.addcmul_(more, scales[t, rows].unsqueeze(-1))
        block.copy_(work)
    return z


def _exponential(block, shift, inverse_tau, out):
    """exp((block - shift) * inverse_tau)"""
    torch.sub(block, shift, out=out)
    if inverse_tau != 1:
        out.mul_(inverse_tau)
    return out.exp_()


def full_sums(z, y, student, teacher, inverse_tau, options):
    out = student[0].new_zeros(2, z.shape[0])
    for rows in _blocks(z)[0] if z.numel() else ():
        log_q = log_probability(z[rows], student[0][rows], student[1][rows], inverse_tau)
        log_p = log_probability(y[rows], teacher[0][rows], teacher[1][rows], inverse_tau)
        out[0, rows], out[1, rows] = row_sums(log_q, log_p, options.objective, options.beta)
    return out


def full_gradient_(z, y, student, teacher, sums, weights, inverse_tau, options):
    kd, ce = weights
    for rows in _blocks(z)[0] if z.numel() else ():
        log_q = log_probability(z[rows], student[0][rows], student[1][rows], inverse_tau)
        log_p = log_probability(y[rows], teacher[0][rows], teacher[1][rows], inverse_tau)
        total = gradient(
            log_q, log_p, sums[0, rows], sums[1, rows], options.objective, options.beta
        ).mul_(kd[rows].unsqueeze(-1))
        if ce is not None:
            log_q = log_probability(z[rows], student[0][rows], student[2][rows], 1.0)
            total.addcmul_(log_q.exp_(), ce[rows].unsqueeze(-1))
        z[rows] = total.to(z.dtype)
    return z

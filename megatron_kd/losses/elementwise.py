"""The work between the matrix products: two passes over a chunk's logits, in place and without copies of it.

- `max_and_sums` reads: the row maximum m and, per temperature, sum_v exp((z_v - m) / tau).
- `to_gradient_` writes z_v <- sum_t scale_t * exp((z_v - m) / tau_t) where z stood.

Entries cut out beforehand (-inf) count for nothing in the first and become 0 in the second.

Letters: n rows, Vp this rank's vocabulary, T temperatures.
"""

import torch

NEG_INF = float("-inf")
# Rows are taken in blocks whose fp32 copy stays in a core's share of the cache, so that several eager
# operations cost about one pass over memory and every temporary is small.
CPU_BLOCK_BYTES = 1 << 20
# On an accelerator launches cost more than cache misses: larger blocks.
DEVICE_BLOCK_BYTES = 1 << 27


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_blocks(z):
    limit = CPU_BLOCK_BYTES if z.device.type == "cpu" else DEVICE_BLOCK_BYTES
    rows = max(1, limit // (4 * max(1, z.shape[-1])))
    return (slice(i, i + rows) for i in range(0, z.shape[0], rows))


def max_and_sums(z, inverse_taus):
    """z [n, Vp] -> m [n], sums [T, n], fp32 (fp64 for fp64); m is -inf and sums 0 where nothing is left."""
    dtype = accumulation_dtype(z.dtype)
    m = torch.full((z.shape[0],), NEG_INF, dtype=dtype, device=z.device)
    sums = torch.zeros((len(inverse_taus), z.shape[0]), dtype=dtype, device=z.device)
    if z.shape[-1] == 0:
        return m, sums
    for rows in _row_blocks(z):
        block = z[rows]
        top = block.amax(-1).to(dtype)
        m[rows] = top
        shift = torch.where(top == NEG_INF, 0.0, top).unsqueeze(-1)
        for t, inverse_tau in enumerate(inverse_taus):
            scaled = block - shift if inverse_tau == 1 else (block - shift).mul_(inverse_tau)
            torch.sum(scaled.exp_(), -1, out=sums[t, rows])
    return m, sums


def to_gradient_(z, m, scales, inverse_taus):
    """z [n, Vp] in place; m [n] finite, scales [T, n]."""
    if z.shape[-1] == 0:
        return z
    for rows in _row_blocks(z):
        block, shift = z[rows], m[rows].unsqueeze(-1)
        total = None
        for t, inverse_tau in enumerate(inverse_taus):
            scaled = block - shift if inverse_tau == 1 else (block - shift).mul_(inverse_tau)
            scaled.exp_().mul_(scales[t, rows].unsqueeze(-1))
            total = scaled if total is None else total.add_(scaled)
        block.copy_(total)
    return z

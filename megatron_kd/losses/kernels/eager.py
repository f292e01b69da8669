"""The kernels in plain PyTorch: blocks of rows small enough for the cache, one block of scratch.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures.
"""

import torch

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.losses.objectives import Objective

NEG_INF = float("-inf")
# Stands for a logit that is infinitely far down: finite, so that 0 * log q is 0.
FARTHEST_NATS = -1e30
# A block of this size stays in the cache between the few operations on it, so that together they
# cost about one pass over memory.
CPU_BLOCK_BYTES = 1 << 20
# On an accelerator launches cost more than cache misses.
DEVICE_BLOCK_BYTES = 128 << 20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_probability(
    logits: torch.Tensor, m: torch.Tensor, log_sum: torch.Tensor, inverse_tau: torch.Tensor | float
) -> torch.Tensor:
    """log softmax of logits [n, vp] / tau, from m [n] and log_sum [n], in the dtype of m."""
    shifted = (logits.to(m.dtype) - m.unsqueeze(-1)) * inverse_tau
    return (shifted - log_sum.unsqueeze(-1)).clamp(min=FARTHEST_NATS)


def _row_blocks(z: torch.Tensor) -> list[slice]:
    if z.numel() == 0:
        return []
    limit = CPU_BLOCK_BYTES if z.device.type == "cpu" else DEVICE_BLOCK_BYTES
    row_bytes = accumulation_dtype(z.dtype).itemsize * z.shape[1]
    rows = max(1, min(z.shape[0], limit // row_bytes))
    return [slice(i, min(i + rows, z.shape[0])) for i in range(0, z.shape[0], rows)]


def _scratch(z: torch.Tensor, blocks: list[slice]) -> torch.Tensor:
    """[rows, vp] for the largest block, which is the first."""
    rows = blocks[0].stop if blocks else 0
    return z.new_empty(rows, z.shape[1], dtype=accumulation_dtype(z.dtype))


def max_and_sums(
    z: torch.Tensor, inverse_taus: tuple[float, ...], transform: LogitTransform | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = accumulation_dtype(z.dtype)
    m = z.new_full((z.shape[0],), NEG_INF, dtype=dtype)
    sums = z.new_zeros((len(inverse_taus), z.shape[0]), dtype=dtype)
    blocks = _row_blocks(z)
    scratch = _scratch(z, blocks)
    for rows in blocks:
        block, work = z[rows], scratch[: rows.stop - rows.start]
        if transform is not None:
            block = transform.logits(block.to(dtype))
        m[rows] = block.amax(-1)
        shift = torch.where(m[rows] == NEG_INF, 0.0, m[rows]).unsqueeze(-1)
        for t, inverse_tau in enumerate(inverse_taus):
            _exponential(block, shift, inverse_tau, work)
            torch.sum(work, -1, out=sums[t, rows])
    return m, sums


def exponentials_(z: torch.Tensor, inverse_tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    m, sums = z.new_full((z.shape[0],), NEG_INF), z.new_zeros(1, z.shape[0])
    for rows in _row_blocks(z):
        block = z[rows]
        torch.amax(block, -1, out=m[rows])
        shift = torch.where(m[rows] == NEG_INF, 0.0, m[rows]).unsqueeze(-1)
        torch.sum(_exponential(block, shift, inverse_tau, block), -1, out=sums[0, rows])
    return m, sums


def to_gradient_(
    z: torch.Tensor,
    m: torch.Tensor,
    scales: torch.Tensor,
    inverse_taus: tuple[float, ...],
    transform: LogitTransform | None,
) -> torch.Tensor:
    blocks = _row_blocks(z)
    in_place = len(inverse_taus) == 1 and z.dtype == m.dtype and transform is None
    scratch = z if in_place else _scratch(z, blocks)
    for rows in blocks:
        block, shift = z[rows], m[rows].unsqueeze(-1)
        work = block if in_place else scratch[: rows.stop - rows.start]
        logits = block if transform is None else transform.logits(block.to(m.dtype))
        _exponential(logits, shift, inverse_taus[0], work)
        work.mul_(scales[0, rows].unsqueeze(-1))
        for t, inverse_tau in enumerate(inverse_taus[1:], start=1):
            more = _exponential(logits, shift, inverse_tau, torch.empty_like(work))
            work.addcmul_(more, scales[t, rows].unsqueeze(-1))
        if transform is not None:
            work.mul_(transform.slopes(block.to(m.dtype)))
        if not in_place:
            block.copy_(work)
    return z


def _exponential(
    block: torch.Tensor, shift: torch.Tensor, inverse_tau: float, out: torch.Tensor
) -> torch.Tensor:
    """exp((block - shift) * inverse_tau)"""
    torch.sub(block, shift, out=out)
    if inverse_tau != 1:
        out.mul_(inverse_tau)
    return out.exp_()


def full_sums(
    z: torch.Tensor,
    y: torch.Tensor,
    student: tuple[torch.Tensor, torch.Tensor],
    teacher: tuple[torch.Tensor, ...],
    inverse_tau: float,
    objective: Objective,
    divergence: Divergence,
    transforms: tuple[LogitTransform | None, LogitTransform | None],
) -> torch.Tensor:
    out = student[0].new_zeros(objective.sums, z.shape[0])
    for rows in _row_blocks(z):
        logits, teacher_logits = _logit_pair(z[rows], y[rows], student[0].dtype, transforms)
        log_q = log_probability(logits, student[0][rows], student[1][rows], inverse_tau)
        log_p = log_probability(teacher_logits, teacher[0][rows], teacher[1][rows], inverse_tau)
        sums = objective.row_sums(log_q, log_p, divergence)
        for total, part in zip(out, sums, strict=True):
            total[rows] = part
    return out


def full_gradient_(
    z: torch.Tensor,
    y: torch.Tensor,
    student: tuple[torch.Tensor, ...],
    teacher: tuple[torch.Tensor, ...],
    sums: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    inverse_tau: float,
    objective: Objective,
    divergence: Divergence,
    transforms: tuple[LogitTransform | None, LogitTransform | None],
) -> torch.Tensor:
    kd, ce = weights
    for rows in _row_blocks(z):
        logits, teacher_logits = _logit_pair(z[rows], y[rows], student[0].dtype, transforms)
        log_q = log_probability(logits, student[0][rows], student[1][rows], inverse_tau)
        log_p = log_probability(teacher_logits, teacher[0][rows], teacher[1][rows], inverse_tau)
        total = objective.gradient(log_q, log_p, tuple(sums[:, rows]), divergence)
        total = total.mul_(kd[rows].unsqueeze(-1))
        if ce is not None:
            log_q = log_probability(logits, student[0][rows], student[2][rows], 1.0)
            total.addcmul_(log_q.exp_(), ce[rows].unsqueeze(-1))
        if transforms[0] is not None:
            total.mul_(transforms[0].slopes(z[rows].to(total.dtype)))
        z[rows] = total.to(z.dtype)
    return z


def _logit_pair(
    z: torch.Tensor,
    y: torch.Tensor,
    dtype: torch.dtype,
    transforms: tuple[LogitTransform | None, LogitTransform | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [n, vp] of both models, each of dtype where it has a transform."""
    student, teacher = transforms
    return (
        z if student is None else student.logits(z.to(dtype)),
        y if teacher is None else teacher.logits(y.to(dtype)),
    )

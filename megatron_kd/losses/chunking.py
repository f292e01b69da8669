"""How many positions a fused loss takes at a time.

A chunk's logits are its transient memory. Each chunk also reads and writes the whole fp32
weight gradient once, so a larger chunk buys less of that traffic for more memory. Logits of 16 bits
take half the bytes of fp32 ones: two chunks of them are projected and their gradients gathered for
one product.

s sequence, b micro-batch, vp = v/tp this rank's vocabulary.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # whoever plans a run reads the sizes here and needs no PyTorch
    import torch

ChunkSize: TypeAlias = int | Literal["auto"]

logger = logging.getLogger(__name__)
_logged: set[tuple] = set()

# Bytes per logit that a chunk may take; narrower logits come in more rows.
BYTES_PER_LOGIT = 4
# What "auto" lets a chunk's logits take where the caller names no budget, by kind of device; on an
# accelerator with little memory it is no more than this share of it.
DEFAULT_BUDGET_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}
DEVICE_SHARE = 1 / 64
# Sequence positions that `sparse_chunked_kd_loss` takes where the caller names no number.
SPARSE_CHUNK = 1024
# With fewer rows the products themselves lose efficiency; with more than the second nothing is won.
LEAST_ROWS, MOST_ROWS = 128, 16384


def chunk_rows(
    chunk_size: ChunkSize,
    *,
    rows: int,
    batch: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    budget_bytes: int | None = None,
) -> int:
    """Rows of the flattened [s * b] positions per chunk.

    Args:
        chunk_size: Sequence positions of b rows each, or "auto".
        rows: All rows there are.
        batch: b, the rows per position of the sequence.
        width: Logits per row, padding included: ranks whose shards differ in padding must agree.
        dtype: Of the logits.
        device: Of the logits.
        budget_bytes: For "auto": what a chunk's logits may take; None for a default.

    Raises:
        ValueError: chunk_size or budget_bytes is not positive.
    """
    size = dtype.itemsize
    if chunk_size != "auto":
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(
                f'chunk_size must be a positive number of positions or "auto"; got {chunk_size!r}'
            )
        return chunk_size * batch * max(1, BYTES_PER_LOGIT // size)
    if budget_bytes is not None and budget_bytes <= 0:
        raise ValueError(f"memory_budget_bytes must be positive; got {budget_bytes}")
    budget = budget_bytes or default_budget_bytes(device)
    picked = pick_rows(rows, max(1, width) * size, budget, strict=budget_bytes is not None)
    key = (width, dtype, device.type, budget)  # the supervised rows differ from batch to batch
    if key not in _logged:
        _logged.add(key)
        logger.info(
            "chunk_size auto: %d of %d rows at a time, %.1f MiB of %s logits (budget %.1f MiB)",
            picked,
            rows,
            picked * width * size / 2**20,
            str(dtype).removeprefix("torch."),
            budget / 2**20,
        )
    return picked


def default_budget_bytes(device: torch.device) -> int:
    """What a chunk's logits may take on this device where the caller does not say."""
    budget = DEFAULT_BUDGET_BYTES.get(device.type, DEFAULT_BUDGET_BYTES["cuda"])
    if device.type == "cuda":
        import torch

        whole = torch.cuda.get_device_properties(device).total_memory
        budget = min(budget, int(whole * DEVICE_SHARE))
    return budget


def pick_rows(rows: int, bytes_per_row: int, budget_bytes: int, *, strict: bool) -> int:
    """The fewest equal chunks within the budget.

    A default budget gives way to LEAST_ROWS, a strict one only to a single row.
    """
    most = max(1, min(budget_bytes // bytes_per_row, MOST_ROWS))
    if not strict:
        most = max(most, LEAST_ROWS)
    if rows <= most:
        return max(1, rows)
    chunks = -(-rows // most)
    even = -(-rows // chunks)
    rounded = -(-even // LEAST_ROWS) * LEAST_ROWS
    return rounded if rounded <= most else even

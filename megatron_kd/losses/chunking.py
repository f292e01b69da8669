"""How many positions a fused head takes at a time.

A chunk's logits are the head's transient memory; each chunk also reads and writes the whole fp32
weight gradient once. A larger chunk buys less of that traffic for more memory.

Letters: B micro-batch, D hidden, Vp this rank's vocabulary.
"""

import logging

import torch

logger = logging.getLogger(__name__)
_said: set[tuple] = set()

# What "auto" lets a chunk's logits take where the caller names no budget.
DEFAULT_BUDGET_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
# Below this many rows the products themselves lose efficiency; above the other, nothing is won.
LEAST_ROWS, MOST_ROWS = 128, 8192


def chunk_rows(chunk_size, *, rows, batch, width, dtype, device, budget_bytes=None) -> int:
    """Rows of the flattened [S * B] positions per chunk; chunk_size in sequence positions, or "auto"."""
    if chunk_size != "auto":
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(
                f'chunk_size must be a positive number of positions or "auto"; got {chunk_size!r}'
            )
        return chunk_size * batch
    budget = budget_bytes or DEFAULT_BUDGET_BYTES.get(device.type, 1 << 30)
    size = torch.finfo(dtype).bits // 8
    fitting = max(1, budget // (max(1, width) * size))
    picked = min(max(fitting, LEAST_ROWS) if budget_bytes is None else fitting, MOST_ROWS)
    if picked >= 2 * LEAST_ROWS:
        picked -= picked % LEAST_ROWS
    picked = max(1, min(picked, rows))
    key = (rows, width, dtype, device.type, budget)
    if key not in _said:
        _said.add(key)
        logger.info(
            "chunk_size auto: %d rows of %d positions per chunk (%.0f MiB of %s logits, budget %.0f MiB)",
            picked,
            rows,
            picked * width * size / 2**20,
            str(dtype).removeprefix("torch."),
            budget / 2**20,
        )
    return picked

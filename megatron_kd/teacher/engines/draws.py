"""The random numbers that rows are drawn with."""

import numpy as np
import xxhash

from megatron_kd.teacher.engines.base import RowRequest


def draws_of(tokens: np.ndarray, rows: np.ndarray, request: RowRequest) -> np.ndarray | None:
    """Random numbers to draw a document's rows with: [r, k] float64 in [0, 1), the same for the
    same document and seed; None where nothing is drawn."""
    if request.sampling != "random":
        return None
    key = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, "<i4").tobytes())
    generator = np.random.Generator(np.random.Philox(key=[key, request.seed]))
    # One line of numbers per token, so that a row's draws do not depend on which other rows are
    # asked.
    return generator.random((int(rows[-1]) + 1, request.topk))[rows]

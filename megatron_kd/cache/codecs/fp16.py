"""Candidates as they are: ids of 16 or 20 bits and half-precision log-probabilities. Quick to read.

Letters: R rows, K slots of a row, E the candidates of all rows of a sample. The layout is described
in docs/cache-format.md.
"""

from collections.abc import Mapping

import numpy as np

from megatron_kd.cache.codecs.base import (
    ID_BITS,
    LARGEST_HALF,
    Codec,
    RowEntries,
    RowSpec,
    wide_ids,
)
from megatron_kd.files import TensorLayout

# The value of every half, by its bits: a look-up is faster than a cast.
HALF_TO_FLOAT = np.arange(1 << 16, dtype=np.uint16).view("<f2").astype(np.float32)


class Half(Codec):
    """Half-precision log-probabilities beside plain ids."""

    groups = {"mass": "mass", "ids": "ids", "ids_high": "ids", "logprobs": "log-probabilities"}
    pointers = {"entry_offsets": "E"}

    def tensors(self, spec: RowSpec) -> dict[str, TensorLayout]:
        tensors: dict[str, TensorLayout] = {
            "mass": ("F32", ("R",)),
            "ids": ("U16", ("E",)),
            "logprobs": ("F16", ("E",)),
        }
        if wide_ids(spec.vocab_size):
            tensors["ids_high"] = ("U8", ("high_bytes",))
        return tensors

    def encode(self, rows: RowEntries, spec: RowSpec) -> dict[str, np.ndarray]:
        halves = np.maximum(rows.logprobs, -LARGEST_HALF).astype("<f2")
        row = np.repeat(np.arange(rows.counts.size), rows.counts)
        size = halves.view("<u2").astype(np.int64) & 0x7FFF  # rises as the probability falls
        key = (row << 15 | size) << ID_BITS | rows.ids
        key.sort()
        ids, size = key & ((1 << ID_BITS) - 1), key >> ID_BITS & 0x7FFF
        parts = {
            "mass": rows.mass.astype("<f4"),
            "ids": (ids & 0xFFFF).astype("<u2"),
            "logprobs": np.where(size, size | 0x8000, 0).astype("<u2").view("<f2"),
        }
        if wide_ids(spec.vocab_size):
            high = np.zeros((ids.size + 1) & ~1, np.uint8)
            high[: ids.size] = ids >> 16
            parts["ids_high"] = high[0::2] | high[1::2] << 4
        return parts

    def decode(
        self, parts: Mapping[str, np.ndarray], counts: np.ndarray | None, spec: RowSpec
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mass = parts["mass"].astype(np.float32)
        rows, topk = mass.size, spec.topk
        ids = parts["ids"].astype(np.int32)
        if ids.size != (rows * topk if counts is None else int(counts.sum())):
            raise ValueError("its entries do not fit its rows")
        if wide_ids(spec.vocab_size):
            pairs = parts["ids_high"]
            high = np.empty((pairs.size, 2), np.int32)
            np.bitwise_and(pairs, 15, out=high[:, 0], casting="unsafe")
            np.right_shift(pairs, 4, out=high[:, 1], casting="unsafe")
            high <<= 16
            ids |= high.reshape(-1)[: ids.size]
        halves = parts["logprobs"].view("<u2")
        # Zero, or negative and finite: 0 and 0x8000 to 0xFBFF. Less one, that is 0x7FFF and above.
        if halves.size and (
            int(halves.max()) > 0xFBFF or int((halves - np.uint16(1)).min()) < 0x7FFF
        ):
            raise ValueError("a log-probability is positive or no number")
        logprobs = np.take(HALF_TO_FLOAT, halves)
        if ids.size and int(ids.max()) >= spec.vocab_size:
            raise ValueError("an id is out of range")
        if counts is None:
            return ids.reshape(rows, topk), logprobs.reshape(rows, topk), mass
        slots = np.arange(topk) < counts[:, None]
        full_ids = np.full((rows, topk), -1, np.int32)
        full_logprobs = np.full((rows, topk), -np.inf, np.float32)
        full_ids[slots], full_logprobs[slots] = ids, logprobs
        return full_ids, full_logprobs, mass

    def bounds(self, offsets: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`ids_high` keeps two candidates in a byte, and each sample starts on a byte."""
        pairs = (np.diff(offsets["E"]) + 1) >> 1
        return {"high_bytes": np.concatenate([[0], np.cumsum(pairs)])}

    def bytes_per_position(self, vocab_size: int, topk: int) -> float:
        """Exact for rows of K candidates, up to the last half-filled byte of a sample."""
        return topk * (4.5 if wide_ids(vocab_size) else 4) + 4

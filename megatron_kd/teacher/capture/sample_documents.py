"""The samples of prepared data as documents for a teacher, and their rows put together again.

Letters: r supervised rows of a sample, k candidates, h hidden size.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_kd.data.sequence_format import SPLITS
from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherDocument, TeacherRows


def find_splits(data: str | os.PathLike) -> dict[str, Path]:
    """The splits of a prepared data folder by name.

    Raises:
        EngineError: there are none.
    """
    folder = Path(data)
    splits = {name: folder / name for name in SPLITS if (folder / name).is_dir()}
    if not splits:
        raise EngineError(
            f"{data} holds no prepared data (none of the folders {', '.join(SPLITS)}); make it "
            "with megatron-kd prepare"
        )
    return splits


@dataclass(frozen=True)
class PlacedDocument:
    """A document's place in its sample: row i of the document is row offset + i of the sample."""

    sample: int
    offset: int
    document: TeacherDocument


def placed_documents(samples, first: int, last: int, packing: str) -> list[PlacedDocument]:
    """The documents of samples first to last (half-open), each with its asked rows.

    With block packing each document of a sample stands alone, from position 0; otherwise a sample
    is one text, however many documents were packed into it (naive packing lets them see each other,
    in training as here).
    """
    found = []
    for index in range(first, last):
        sample = samples[index]
        tokens = np.asarray(sample.tokens, np.int32)
        mask = np.asarray(sample.loss_mask, bool)
        bounds = np.asarray(sample.cu_seqlens) if packing == "block" else np.array([0, len(tokens)])
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            rows = np.flatnonzero(mask[start:end])
            if len(rows):
                document = TeacherDocument(tokens[start:end], rows.astype(np.int64))
                found.append(PlacedDocument(index, int(start), document))
    return found


class SampleRows:
    """A sample's asked rows, filled document by document."""

    def __init__(
        self, loss_mask: np.ndarray, request: RowRequest, hidden_size: int, hidden_dtype: str
    ):
        self._place = np.cumsum(loss_mask) - 1  # position in the sample → row
        count = int(np.sum(loss_mask))
        self.topk_ids = np.full((count, request.topk), -1, np.int32)  # [r, k]
        self.topk_logprobs = np.full((count, request.topk), -np.inf, np.float32)  # [r, k]
        self.log_z = {tau: np.zeros(count, np.float32) for tau in request.temperatures}  # τ: [r]
        self.label_logprobs = np.zeros(count, np.float32) if request.labels else None  # [r]
        kept = np.float16 if hidden_dtype == "float16" else np.float32  # numpy has no bfloat16
        self.hidden = np.zeros((count, hidden_size), kept) if request.hidden else None  # [r, h]

    def put(self, placed: PlacedDocument, rows: TeacherRows) -> None:
        """Puts a document's rows where they belong."""
        lines = self._place[placed.offset + placed.document.rows]
        self.topk_ids[lines] = rows.topk_ids
        self.topk_logprobs[lines] = rows.topk_logprobs
        for tau, values in self.log_z.items():
            values[lines] = rows.log_z[tau]
        if self.label_logprobs is not None:
            self.label_logprobs[lines] = rows.label_logprobs
        if self.hidden is not None:
            self.hidden[lines] = rows.hidden

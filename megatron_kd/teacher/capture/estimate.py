"""What a capture will take on disk, and whether the teacher knows its texts: judged by the first
rows."""

import numpy as np

from megatron_kd.cache.format import CacheSpec
from megatron_kd.cache.sample import ShardBuffer, check_sample
from megatron_kd.cache.shard import ShardHead, serialize
from megatron_kd.teacher.engines.base import TeacherDocument, TeacherRows

_ENOUGH_POSITIONS = 4096


class CaptureEstimate:
    """Collects the first few thousand rows and packs them as a shard's rows are packed. Nothing is
    written, and their shard does it again."""

    def __init__(self, spec: CacheSpec):
        self._spec = spec
        self._buffer = ShardBuffer(spec)
        self._labels = self._hits = 0

    def add(self, document: TeacherDocument, rows: TeacherRows) -> None:
        """Adds a document's rows, up to the first few thousand positions."""
        if self._buffer.positions >= _ENOUGH_POSITIONS:
            return
        labelled = document.rows[document.rows + 1 < len(document.tokens)]
        labels = document.tokens[labelled + 1, None]
        self._labels += len(labelled)
        self._hits += int((rows.topk_ids[: len(labelled)] == labels).any(axis=1).sum())
        # A sample's last position is never a row, a document's may be.
        tokens = np.append(document.tokens, np.int32(0))
        mask = np.zeros(len(tokens), bool)
        mask[document.rows] = True
        self._buffer.add(
            check_sample(
                self._spec,
                "a captured document",
                tokens,
                mask,
                rows.topk_ids,
                rows.topk_logprobs,
                log_z=rows.log_z,
                hidden=rows.hidden,
                label_logprob=rows.label_logprobs,
            )
        )

    def label_share(self) -> float | None:
        """Share of the positions whose next token is among the candidates; None without any."""
        return self._hits / self._labels if self._labels else None

    def bytes_per_position(self) -> float:
        """Bytes that a shard of such rows takes, tokens and masks included, over its rows."""
        head = ShardHead(0, 0, self._buffer.samples, self._spec.fingerprint)
        payload = serialize(self._spec, head, self._buffer.tensors())
        return len(payload) / self._buffer.positions

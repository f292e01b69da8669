"""One memory-mapped shard of a cache, from which samples are decoded.

Letters: n tokens of a sample, R supervised rows, K candidates, D hidden size.
"""

import mmap
import os
from pathlib import Path

import numpy as np

from megatron_kd.cache.codecs import CODECS
from megatron_kd.cache.format import (
    MAX_SAMPLE_SLOTS,
    CacheError,
    CacheSpec,
    ShardEntry,
    token_hash,
)
from megatron_kd.cache.shard import from_bfloat16, layout, parse_header, unpack_tokens
from megatron_kd.files import MAX_HEADER_BYTES, file_checksum, map_tensors


def check_shard_bytes(path: Path, entry: ShardEntry) -> None:
    """Raises CacheError when a shard's bytes are not those the manifest binds."""
    if file_checksum(path) != entry.xxh3_128:
        raise CacheError(
            f"{path} is damaged (samples {entry.first_sample} to "
            f"{entry.first_sample + entry.samples - 1}): its checksum does not match the manifest; "
            "`megatron-kd verify --repair` captures it again"
        )


class MappedShard:
    """One mapped shard. Headers, bounds and offsets are checked when it is opened."""

    def __init__(self, path: Path, entry: ShardEntry, spec: CacheSpec):
        self.path, self.entry, self.spec = path, entry, spec
        try:
            with open(path, "rb") as file:
                file_bytes = os.fstat(file.fileno()).st_size
                if file_bytes != entry.bytes:
                    raise CacheError(
                        f"{path} has {file_bytes} bytes, the manifest says {entry.bytes}: "
                        "truncated or replaced; `megatron-kd verify --repair` captures it again"
                    )
                start = file.read(8 + MAX_HEADER_BYTES)
                head, places = parse_header(path, start, file_bytes, spec)
                self._tensors, self._map = map_tensors(file, places)
        except FileNotFoundError as error:
            raise CacheError(
                f"{path} is missing; `megatron-kd verify --repair` captures it again"
            ) from error
        if (head.shard, head.first_sample, head.samples) != (
            entry.shard,
            entry.first_sample,
            entry.samples,
        ):
            raise CacheError(
                f"{path} is shard {head.shard} with samples from {head.first_sample}, in place of "
                f"shard {entry.shard} with samples from {entry.first_sample}"
            )
        self._layout = layout(spec)
        self._codec_tensors = list(CODECS[spec.codec].tensors(spec))
        self._bounds = self._checked_bounds()

    def _checked_bounds(self) -> dict[str, np.ndarray]:
        """Length: [S + 1] int64, where each sample's part of the tensors of that length begins and
        ends; rising from 0 to the whole length."""
        codec, tensors = CODECS[self.spec.codec], self._tensors
        ends = {self._layout[name][1][0]: tensor.shape[0] for name, tensor in tensors.items()}
        pointers = {"token_offsets": "T", "row_offsets": "R", "document_offsets": "documents"}
        bounds = {}
        for name, length in (pointers | dict(codec.pointers)).items():
            values = tensors[name].astype(np.int64)
            if values[0] != 0 or values[-1] != ends[length] or (np.diff(values) < 0).any():
                raise CacheError(f"{self.path}: {name} does not rise from 0 to {ends[length]}")
            bounds[length] = values
        lengths = np.diff(bounds["T"])
        most = max(int(lengths.max()), int(np.diff(bounds["R"]).max()))
        if most * self.spec.topk > MAX_SAMPLE_SLOTS:  # a few bytes per row would claim K slots each
            raise CacheError(
                f"{self.path}: a sample has {most} positions of {self.spec.topk} candidates; at "
                f"most {MAX_SAMPLE_SLOTS} slots of one sample are read"
            )
        bounds["S"] = np.arange(ends["S"] + 1)
        derived = {"mask_bytes": np.concatenate([[0], np.cumsum((lengths + 7) >> 3)])}
        derived |= codec.bounds(bounds)
        for length, values in derived.items():
            if values[-1] != ends.get(length, values[-1]):
                names = [name for name, (_, shape) in self._layout.items() if shape[0] == length]
                raise CacheError(f"{self.path}: {', '.join(names)} does not fit its samples")
        return bounds | derived

    def _part(self, tensor: str, local: int) -> np.ndarray:
        """A sample's part of a tensor."""
        bounds = self._bounds[self._layout[tensor][1][0]]
        return self._tensors[tensor][bounds[local] : bounds[local + 1]]

    def tokens(self, local: int) -> np.ndarray:
        tokens = unpack_tokens(self._part("tokens", local))
        if (
            token_hash(tokens.astype("<i4", copy=False).tobytes())
            != self._tensors["token_hash"][local]
        ):
            raise CacheError(
                f"{self.path}: the tokens of sample {self.entry.first_sample + local} do not match "
                "their hash; `megatron-kd verify` says what is damaged"
            )
        return tokens

    def loss_mask(self, local: int) -> np.ndarray:
        bounds = self._bounds["T"]
        bits = np.unpackbits(self._part("loss_mask", local), bitorder="little")
        mask = bits[: bounds[local + 1] - bounds[local]].view(bool)
        if mask.size and mask[-1]:
            raise self._damaged(local, "its last position is supervised")
        return mask

    def cu_seqlens(self, local: int) -> np.ndarray:
        bounds = self._part("cu_seqlens", local).astype(np.int32)
        first, end = self._bounds["T"][local : local + 2]
        ends_ok = bounds.size >= 2 and bounds[0] == 0 and bounds[-1] == end - first
        if not ends_ok or (np.diff(bounds) < 1).any():  # an attention kernel would read beyond
            raise self._damaged(local, "its document bounds do not rise from 0 to its end")
        return bounds

    def rows(self, local: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """([R, K] int32, [R, K] fp32, [R] fp32)"""
        counts = None
        if "counts" in self._tensors:
            counts = self._part("counts", local).astype(np.int64)
            if counts.size and not 1 <= counts.min() <= counts.max() <= self.spec.topk:
                raise self._damaged(local, f"counts beyond 1 to {self.spec.topk}")
        parts = {name: self._part(name, local) for name in self._codec_tensors}
        try:
            ids, logprobs, mass = CODECS[self.spec.codec].decode(parts, counts, self.spec)
        except (ValueError, IndexError) as error:
            raise self._damaged(local, str(error)) from error
        if mass.size and not (mass.min() >= 0 and mass.max() <= 1):  # NaN is neither
            raise self._damaged(local, "a mass is not between 0 and 1")
        return ids, logprobs, mass

    def _damaged(self, local: int, why: str) -> CacheError:
        return CacheError(
            f"{self.path}: sample {self.entry.first_sample + local} cannot be decoded ({why}); "
            "`megatron-kd verify` says what is damaged"
        )

    def log_z(self, local: int) -> dict[float, np.ndarray]:
        columns = {
            tau: self._part(f"log_z.{index}", local).astype(np.float32)
            for index, tau in enumerate(self.spec.temperatures)
        }
        if not all(np.isfinite(column).all() for column in columns.values()):
            raise self._damaged(local, "a normalizer is no finite number")
        return columns

    def row_counts(self) -> np.ndarray:
        """[S] int64."""
        return np.diff(self._bounds["R"])

    def mean_rows(self) -> dict[str, np.ndarray]:
        """Means over each sample's rows, [S] fp64, without decoding any: of the mass, and of the
        next token's log-probability where the cache keeps it. NaN for a sample without a row."""
        columns = {"mass": CODECS[self.spec.codec].mass(self._tensors)}
        if self.spec.label_logprob:
            columns["label_logprob"] = self._tensors["label_logprob"]
        bounds, counts, means = self._bounds["R"], self.row_counts(), {}
        for name, column in columns.items():
            total = np.concatenate([[0.0], np.cumsum(column, dtype=np.float64)])
            with np.errstate(invalid="ignore"):
                means[name] = np.diff(total[bounds]) / counts
        return means

    def label_logprob(self, local: int) -> np.ndarray | None:
        if not self.spec.label_logprob:
            return None
        column = self._part("label_logprob", local).astype(np.float32)
        if column.size and not column.max() <= 0:  # NaN is not
            raise self._damaged(local, "a label's log-probability is positive or no number")
        return column

    def hidden(self, local: int) -> np.ndarray | None:
        if not self.spec.hidden_size:
            return None
        stored = self._part("hidden", local)
        return from_bfloat16(stored) if self.spec.hidden_dtype == "bfloat16" else stored.copy()

    def sample_bytes(self, local: int) -> int:
        """About what reading a sample touches."""
        bounds = self._bounds["R"]
        share = (bounds[local + 1] - bounds[local]) / max(int(bounds[-1]), 1)
        return int(self.entry.bytes * share)

    def release_pages(self) -> None:
        """Gives touched pages back; they stay in the system's page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

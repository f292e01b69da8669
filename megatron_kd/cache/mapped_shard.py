"""One memory-mapped shard of a cache, from which samples are decoded.

Letters: n tokens of a sample, R supervised rows, K candidates, D hidden size.
"""

import mmap
import os
from pathlib import Path

import numpy as np

from megatron_kd.cache import codec
from megatron_kd.cache.format import (
    MAX_SAMPLE_SLOTS,
    CacheError,
    CacheSpec,
    ShardEntry,
    token_hash,
)
from megatron_kd.cache.shard import from_bfloat16, parse_header, unpack_tokens
from megatron_kd.files import MAX_HEADER_BYTES, file_checksum, map_tensors

# a look-up is faster than a cast
HALF_TO_FLOAT = np.arange(1 << 16, dtype=np.uint16).view("<f2").astype(np.float32)


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
        self._offsets = self._checked_offsets()

    def _checked_offsets(self) -> dict[str, np.ndarray]:
        """Offsets into tensors, as int64, rising from 0 to the tensor's length."""
        tensors = self._tensors
        ends = {
            "token_offsets": tensors["tokens"].shape[0],
            "row_offsets": tensors["mass"].shape[0],
            "document_offsets": tensors["cu_seqlens"].shape[0],
        }
        if self.spec.codec == "compact":
            ends["stream_offsets"] = tensors["stream"].shape[0]
        else:
            ends["entry_offsets"] = tensors["ids"].shape[0]
        offsets = {}
        for name, end in ends.items():
            values = tensors[name].astype(np.int64)
            if values[0] != 0 or values[-1] != end or (np.diff(values) < 0).any():
                raise CacheError(f"{self.path}: {name} does not rise from 0 to {end}")
            offsets[name] = values
        lengths = np.diff(offsets["token_offsets"])
        most = max(int(lengths.max()), int(np.diff(offsets["row_offsets"]).max()))
        if most * self.spec.topk > MAX_SAMPLE_SLOTS:  # a few bytes per row would claim K slots each
            raise CacheError(
                f"{self.path}: a sample has {most} positions of {self.spec.topk} candidates; at "
                f"most {MAX_SAMPLE_SLOTS} slots of one sample are read"
            )
        offsets["mask_offsets"] = np.concatenate([[0], np.cumsum((lengths + 7) >> 3)])
        if offsets["mask_offsets"][-1] != tensors["loss_mask"].shape[0]:
            raise CacheError(f"{self.path}: loss_mask does not fit the tokens")
        if "ids_high" in tensors:
            pairs = (np.diff(offsets["entry_offsets"]) + 1) >> 1
            offsets["high_offsets"] = np.concatenate([[0], np.cumsum(pairs)])
            if offsets["high_offsets"][-1] != tensors["ids_high"].shape[0]:
                raise CacheError(f"{self.path}: ids_high does not fit ids")
        return offsets

    def _part(self, tensor: str, offsets: str, local: int) -> np.ndarray:
        bounds = self._offsets[offsets]
        return self._tensors[tensor][bounds[local] : bounds[local + 1]]

    def tokens(self, local: int) -> np.ndarray:
        tokens = unpack_tokens(self._part("tokens", "token_offsets", local))
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
        bounds = self._offsets["token_offsets"]
        bits = np.unpackbits(self._part("loss_mask", "mask_offsets", local), bitorder="little")
        mask = bits[: bounds[local + 1] - bounds[local]].view(bool)
        if mask.size and mask[-1]:
            raise self._damaged(local, "its last position is supervised")
        return mask

    def cu_seqlens(self, local: int) -> np.ndarray:
        bounds = self._part("cu_seqlens", "document_offsets", local).astype(np.int32)
        first, end = self._offsets["token_offsets"][local : local + 2]
        ends_ok = bounds.size >= 2 and bounds[0] == 0 and bounds[-1] == end - first
        if not ends_ok or (np.diff(bounds) < 1).any():  # an attention kernel would read beyond
            raise self._damaged(local, "its document bounds do not rise from 0 to its end")
        return bounds

    def _row_part(self, tensor: str, local: int) -> np.ndarray:
        return self._part(tensor, "row_offsets", local)

    def rows(self, local: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """([R, K] int32, [R, K] fp32, [R] fp32)"""
        counts = None
        if "counts" in self._tensors:
            counts = self._row_part("counts", local).astype(np.int64)
            if counts.size and not 1 <= counts.min() <= counts.max() <= self.spec.topk:
                raise self._damaged(local, f"counts beyond 1 to {self.spec.topk}")
        try:
            if self.spec.codec == "fp16":
                return self._plain_rows(local, counts)
            mass = self._checked_mass(codec.decode_mass(self._row_part("mass", local)))
            ids, logprobs = codec.decode(
                self._part("stream", "stream_offsets", local),
                int(self._tensors["high_bytes"][local]),
                self._row_part("bottom", local),
                self._row_part("layout", local),
                counts,
                mass,
                self.spec.vocab_size,
                self.spec.topk,
            )
            return ids, logprobs, mass
        except CacheError:
            raise
        except (ValueError, IndexError) as error:
            raise self._damaged(local, str(error)) from error

    @staticmethod
    def _checked_mass(mass: np.ndarray) -> np.ndarray:
        if mass.size and not (mass.min() >= 0 and mass.max() <= 1):  # NaN is neither
            raise ValueError("a mass is not between 0 and 1")
        return mass

    def _damaged(self, local: int, why: str) -> CacheError:
        return CacheError(
            f"{self.path}: sample {self.entry.first_sample + local} cannot be decoded ({why}); "
            "`megatron-kd verify` says what is damaged"
        )

    def _plain_rows(self, local: int, counts: np.ndarray | None):
        mass = self._checked_mass(self._row_part("mass", local).astype(np.float32))
        low = self._part("ids", "entry_offsets", local)
        rows, topk = mass.size, self.spec.topk
        if low.size != (rows * topk if counts is None else int(counts.sum())):
            raise self._damaged(local, "its entries do not fit its rows")
        ids = low.astype(np.int32)
        if "ids_high" in self._tensors:
            pairs = self._part("ids_high", "high_offsets", local)
            high = np.empty((pairs.size, 2), np.int32)
            np.bitwise_and(pairs, 15, out=high[:, 0], casting="unsafe")
            np.right_shift(pairs, 4, out=high[:, 1], casting="unsafe")
            high <<= 16
            ids |= high.reshape(-1)[: ids.size]
        halves = self._part("logprobs", "entry_offsets", local).view("<u2")
        # Zero, or negative and finite: 0 and 0x8000 to 0xFBFF. Less one, that is 0x7FFF and above.
        if halves.size and (
            int(halves.max()) > 0xFBFF or int((halves - np.uint16(1)).min()) < 0x7FFF
        ):
            raise ValueError("a log-probability is positive or no number")
        logprobs = np.take(HALF_TO_FLOAT, halves)
        if ids.size and int(ids.max()) >= self.spec.vocab_size:
            raise self._damaged(local, "an id is out of range")
        if counts is None:
            return ids.reshape(rows, topk), logprobs.reshape(rows, topk), mass
        slots = np.arange(topk) < counts[:, None]
        full_ids = np.full((rows, topk), -1, np.int32)
        full_logprobs = np.full((rows, topk), -np.inf, np.float32)
        full_ids[slots], full_logprobs[slots] = ids, logprobs
        return full_ids, full_logprobs, mass

    def log_z(self, local: int) -> dict[float, np.ndarray]:
        columns = {
            tau: self._row_part(f"log_z.{index}", local).astype(np.float32)
            for index, tau in enumerate(self.spec.temperatures)
        }
        if not all(np.isfinite(column).all() for column in columns.values()):
            raise self._damaged(local, "a normaliser is no finite number")
        return columns

    def hidden(self, local: int) -> np.ndarray | None:
        if not self.spec.hidden_size:
            return None
        stored = self._row_part("hidden", local)
        return from_bfloat16(stored) if self.spec.hidden_dtype == "bfloat16" else stored.copy()

    def sample_bytes(self, local: int) -> int:
        """About what reading a sample touches."""
        bounds = self._offsets["row_offsets"]
        share = (bounds[local + 1] - bounds[local]) / max(int(bounds[-1]), 1)
        return int(self.entry.bytes * share)

    def release_pages(self) -> None:
        """Gives touched pages back; they stay in the system's page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

"""Reading a cache: any sample by number, from memory-mapped shards, in any process.

Letters: n tokens of a sample, R supervised rows, K candidates, D hidden size.
"""

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_kd.cache import codec
from megatron_kd.cache.format import (
    MANIFEST_NAME,
    CacheError,
    CacheSpec,
    ShardEntry,
    file_checksum,
    parse_manifest,
    token_hash,
)
from megatron_kd.cache.shard import (
    MAX_HEADER_BYTES,
    from_bfloat16,
    parse_header,
    unpack_tokens,
)
from megatron_kd.cache.storage import open_storage

DEFAULT_OPEN_SHARDS = 128
RESIDENT_BYTES = 64 << 20  # mapped pages touched before they are handed back to the page cache
HALF_TO_FLOAT = (
    np.arange(1 << 16, dtype=np.uint16).view("<f2").astype(np.float32)
)  # faster than a cast


@dataclass(frozen=True)
class CachedRows:
    """The stored rows of a sample, without the gaps between them."""

    positions: np.ndarray  # [R] int64, ascending
    topk_ids: np.ndarray  # [R, K] int32; falling probability, ties by rising id; -1 unused, last
    topk_logprobs: np.ndarray  # [R, K] fp32, nats; -inf unused
    mass: np.ndarray  # [R] fp32
    log_z: dict[float, np.ndarray] = field(default_factory=dict)  # τ: [R] fp32
    hidden: np.ndarray | None = None  # [R, D] fp16 or fp32


@dataclass(frozen=True)
class CachedSample:
    """A sample at full length. Row t is the teacher's distribution of tokens[t + 1]."""

    tokens: np.ndarray  # [n] int32
    loss_mask: np.ndarray  # [n] bool
    cu_seqlens: np.ndarray  # [documents + 1] int32
    topk_ids: np.ndarray  # [n, K] int32; -1 where nothing is stored
    topk_logprobs: np.ndarray  # [n, K] fp32; -inf where nothing is stored
    mass: np.ndarray  # [n] fp32; 0 where nothing is stored
    log_z: dict[float, np.ndarray] = field(
        default_factory=dict
    )  # τ: [n] fp32; 0 where nothing is stored
    hidden: np.ndarray | None = None  # [n, D] fp16 or fp32; 0 where nothing is stored


class CacheReader:
    """A complete cache. Pickles to its path: forked and spawned workers map shards of their own.

    Args:
        path: A directory, or an fsspec URL (`s3://…`); shards of a URL are copied here when first
            used.
        check_checksums: Check each shard's checksum when it is first used (each process once).
            Token hashes of samples are checked always.
        max_open_shards: Shards kept mapped at a time.
        local_folder: Where copies of a URL's shards go; None: a temporary folder per process.
        max_local_bytes: What those copies may take together.

    Raises:
        CacheError: Not a complete cache of a known version, or it was changed.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        check_checksums: bool = True,
        *,
        max_open_shards: int = DEFAULT_OPEN_SHARDS,
        local_folder: str | os.PathLike | None = None,
        max_local_bytes: int = 16 << 30,
    ):
        if max_open_shards < 1:
            raise CacheError(f"max_open_shards must be at least 1, got {max_open_shards}")
        self.path = os.fspath(path)
        self.check_checksums, self.max_open_shards = check_checksums, max_open_shards
        self._storage = open_storage(self.path, local_folder, max_local_bytes)
        text = self._storage.read_text(MANIFEST_NAME)
        if text is None:
            raise CacheError(
                f"{self.path} has no {MANIFEST_NAME}: not a cache, or an unfinished one; "
                "run the same capture command again to finish it"
            )
        self.manifest, self.spec, self._entries = parse_manifest(
            text, f"{self.path}/{MANIFEST_NAME}"
        )
        self._first_sample = np.array(
            [entry.first_sample for entry in self._entries], dtype=np.int64
        )
        self._forget()

    def _forget(self) -> None:
        self._owner = os.getpid()
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._checked: set[int] = set()
        self._touched_bytes = 0

    def __getstate__(self) -> dict:
        own = ("_open", "_checked", "_owner", "_touched_bytes")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return self.manifest["samples"]

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def topk(self) -> int:
        return self.spec.topk

    @property
    def tokenizer(self):
        return self.manifest["tokenizer"]

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 that binds every byte of the cache, through the shards' checksums."""
        return self.manifest["fingerprint"]

    @property
    def shards(self) -> list[ShardEntry]:
        return list(self._entries)

    def shard_path(self, entry: ShardEntry) -> Path:
        """A local file with a shard's bytes, copied here if need be."""
        return self._storage.local_path(entry.file, entry.bytes)

    def __getitem__(self, index: int) -> CachedSample:
        shard, local = self._locate(index)
        tokens, mask, cu_seqlens = (
            shard.tokens(local),
            shard.loss_mask(local),
            shard.cu_seqlens(local),
        )
        ids, logprobs, mass = shard.rows(local)
        log_z, hidden = shard.log_z(local), shard.hidden(local)
        self._account(shard.sample_bytes(local))
        full = _expander(mask, index, ids.shape[0])
        return CachedSample(
            tokens=tokens,
            loss_mask=mask,
            cu_seqlens=cu_seqlens,
            topk_ids=full(ids, -1),
            topk_logprobs=full(logprobs, -np.inf),
            mass=full(mass, 0),
            log_z={tau: full(column, 0) for tau, column in log_z.items()},
            hidden=None if hidden is None else full(hidden, 0),
        )

    def rows(self, index: int) -> CachedRows:
        """The stored rows of a sample alone, for those who need no full length."""
        shard, local = self._locate(index)
        positions = np.flatnonzero(shard.loss_mask(local))
        ids, logprobs, mass = shard.rows(local)
        log_z, hidden = shard.log_z(local), shard.hidden(local)
        self._account(shard.sample_bytes(local))
        if positions.size != ids.shape[0]:
            raise CacheError(
                f"sample {index}: {positions.size} supervised, {ids.shape[0]} rows stored"
            )
        return CachedRows(positions, ids, logprobs, mass, log_z, hidden)

    def tokens(self, index: int) -> np.ndarray:
        """[n] int32, hash checked, without decoding rows."""
        shard, local = self._locate(index)
        return shard.tokens(local)

    def close(self) -> None:
        """Unmaps all shards; the reader opens them again when used."""
        self._forget()

    def _locate(self, index: int) -> "tuple[Shard, int]":
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"sample {index} of a cache with {size}")
        index = int(index) % size
        number = int(np.searchsorted(self._first_sample, index, side="right")) - 1
        return self._shard(number), index - self._entries[number].first_sample

    def _shard(self, number: int) -> "Shard":
        if self._owner != os.getpid():  # forked: the parent's bookkeeping is not ours
            self._forget()
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        entry = self._entries[number]
        path = self.shard_path(entry)
        shard = Shard(path, entry, self.spec)
        if self.check_checksums and number not in self._checked:
            check_shard_bytes(path, entry)
            self._checked.add(number)
        self._open[number] = shard
        while len(self._open) > self.max_open_shards:
            self._open.popitem(last=False)
        return shard

    def _account(self, sample_bytes: int) -> None:
        self._touched_bytes += sample_bytes
        if self._touched_bytes > RESIDENT_BYTES:
            self._touched_bytes = 0
            for shard in self._open.values():
                shard.release_pages()


def check_shard_bytes(path: Path, entry: ShardEntry) -> None:
    """Raises CacheError when a shard's bytes are not those the manifest binds."""
    if file_checksum(path) != entry.xxh3_128:
        raise CacheError(
            f"{path} is damaged (samples {entry.first_sample} to "
            f"{entry.first_sample + entry.samples - 1}): its checksum does not match the manifest; "
            "`megatron-kd verify --repair` captures it again"
        )


def _expander(mask: np.ndarray, index: int, rows: int):
    length, stored = mask.size, int(np.count_nonzero(mask))
    if stored != rows:
        raise CacheError(f"sample {index}: {stored} supervised positions, {rows} rows stored")
    first = int(mask.argmax()) if stored else 0
    run = bool(mask[first : first + stored].all())  # one run of rows is a plain copy

    def full(values: np.ndarray, filler) -> np.ndarray:
        out = np.empty((length, *values.shape[1:]), values.dtype)
        if run:
            out[:first], out[first : first + stored], out[first + stored :] = filler, values, filler
        else:
            out[~mask] = filler
            out[mask] = values
        return out

    return full


class Shard:
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
                head, placed = parse_header(path, start, file_bytes, spec)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
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
        self._tensors = {
            name: np.ndarray(shape, dtype, self._map, offset)
            for name, (dtype, shape, offset) in placed.items()
        }
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
        return bits[: bounds[local + 1] - bounds[local]].view(bool)

    def cu_seqlens(self, local: int) -> np.ndarray:
        return self._part("cu_seqlens", "document_offsets", local).astype(np.int32)

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
            mass = codec.decode_mass(self._row_part("mass", local))
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

    def _damaged(self, local: int, why: str) -> CacheError:
        return CacheError(
            f"{self.path}: sample {self.entry.first_sample + local} cannot be decoded ({why}); "
            "`megatron-kd verify` says what is damaged"
        )

    def _plain_rows(self, local: int, counts: np.ndarray | None):
        mass = self._row_part("mass", local).astype(np.float32)
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
        logprobs = np.take(
            HALF_TO_FLOAT, self._part("logprobs", "entry_offsets", local).view("<u2")
        )
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
        return {
            tau: self._row_part(f"log_z.{index}", local).astype(np.float32)
            for index, tau in enumerate(self.spec.temperatures)
        }

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

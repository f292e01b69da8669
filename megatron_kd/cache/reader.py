"""Reading a cache: any sample by number, from memory-mapped shards, in any process.

Letters: n tokens of a sample, R supervised rows, K candidates, D hidden size.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_kd.cache.format import (
    MANIFEST_NAME,
    CacheError,
    ShardEntry,
    parse_manifest,
)
from megatron_kd.cache.mapped_shard import MappedShard, check_shard_bytes
from megatron_kd.cache.storage import DEFAULT_LOCAL_BYTES, open_storage

DEFAULT_OPEN_SHARDS = 128
RESIDENT_BYTES = 16 << 20  # of samples read before mapped pages are handed back to the page cache


@dataclass(frozen=True)
class CachedRows:
    """The stored rows of a sample, without the gaps between them."""

    positions: np.ndarray  # [R] int64, ascending
    topk_ids: np.ndarray  # [R, K] int32; falling probability, ties by rising id; -1 unused, last
    topk_logprobs: np.ndarray  # [R, K] fp32, nats; -inf unused
    mass: np.ndarray  # [R] fp32
    log_z: dict[float, np.ndarray] = field(default_factory=dict)  # τ: [R] fp32
    hidden: np.ndarray | None = None  # [R, D] fp16 or fp32
    label_logprob: np.ndarray | None = None  # [R] fp32, nats; None where the cache keeps none


@dataclass(frozen=True)
class CachedSample:
    """A sample. Row t is the teacher's distribution of tokens[t + 1].

    The rows are held as they are stored; the attributes at full length ([n, …], with a filler where
    nothing is stored) are made when they are first asked for.
    """

    tokens: np.ndarray
    """[n] int32."""
    loss_mask: np.ndarray
    """[n] bool."""
    cu_seqlens: np.ndarray
    """[documents + 1] int32."""
    rows: CachedRows

    @cached_property
    def topk_ids(self) -> np.ndarray:
        """[n, K] int32; -1 where nothing is stored."""
        return self._full(self.rows.topk_ids, -1)

    @cached_property
    def topk_logprobs(self) -> np.ndarray:
        """[n, K] fp32, nats; -inf where nothing is stored."""
        return self._full(self.rows.topk_logprobs, -np.inf)

    @cached_property
    def mass(self) -> np.ndarray:
        """[n] fp32; 0 where nothing is stored."""
        return self._full(self.rows.mass, 0)

    @cached_property
    def log_z(self) -> dict[float, np.ndarray]:
        """τ: [n] fp32; 0 where nothing is stored."""
        return {tau: self._full(column, 0) for tau, column in self.rows.log_z.items()}

    @cached_property
    def hidden(self) -> np.ndarray | None:
        """[n, D] fp16 or fp32; 0 where nothing is stored. None where the cache keeps none."""
        return None if self.rows.hidden is None else self._full(self.rows.hidden, 0)

    @cached_property
    def label_logprob(self) -> np.ndarray | None:
        """[n] fp32, nats, of tokens[t + 1]; 0 where nothing is stored. None where the cache keeps
        none."""
        label = self.rows.label_logprob
        return None if label is None else self._full(label, 0)

    def _full(self, values: np.ndarray, filler) -> np.ndarray:
        positions, length = self.rows.positions, self.tokens.size
        out = np.empty((length, *values.shape[1:]), values.dtype)
        first = int(positions[0]) if positions.size else 0
        end = first + positions.size
        if not positions.size or positions[-1] == end - 1:  # one run of rows is a plain copy
            out[:first], out[first:end], out[end:] = filler, values, filler
        else:
            out[~self.loss_mask] = filler
            out[positions] = values
        return out


class CacheReader:
    """A complete cache. Forked workers share its maps; pickled, it is little more than its path.

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
        max_local_bytes: int = DEFAULT_LOCAL_BYTES,
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
        self._storage.name_space = f"{self.fingerprint[:16]}-"
        self._first_sample = np.array(
            [entry.first_sample for entry in self._entries], dtype=np.int64
        )
        self._forget()

    def _forget(self) -> None:
        self._open: OrderedDict[int, MappedShard] = OrderedDict()
        self._checked: set[int] = set()
        self._touched_bytes = 0

    def __getstate__(self) -> dict:
        own = ("_open", "_checked", "_touched_bytes")
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
    def sampling_method(self) -> str:
        """How the entries were chosen: topk or random."""
        return self.spec.sampling_method

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
        return CachedSample(
            tokens=shard.tokens(local),
            loss_mask=shard.loss_mask(local),
            cu_seqlens=shard.cu_seqlens(local),
            rows=self.rows(index),
        )

    def rows(self, index: int) -> CachedRows:
        """The stored rows of a sample alone, without its tokens."""
        shard, local = self._locate(index)
        positions = np.flatnonzero(shard.loss_mask(local))
        ids, logprobs, mass = shard.rows(local)
        log_z, hidden, label = shard.log_z(local), shard.hidden(local), shard.label_logprob(local)
        self._account(shard.sample_bytes(local))
        if positions.size != ids.shape[0]:
            raise CacheError(
                f"sample {index}: {positions.size} supervised positions, {ids.shape[0]} rows stored"
            )
        return CachedRows(positions, ids, logprobs, mass, log_z, hidden, label)

    def mean_rows(self) -> dict[str, np.ndarray]:
        """What `MappedShard.mean_rows` gives, of all samples."""
        parts: dict[str, list] = {}
        for number in range(len(self._entries)):
            for name, values in self._shard(number).mean_rows().items():
                parts.setdefault(name, []).append(values)
        return {name: np.concatenate(values) for name, values in parts.items()}

    def tokens(self, index: int) -> np.ndarray:
        """[n] int32, hash checked, without decoding rows."""
        shard, local = self._locate(index)
        return shard.tokens(local)

    def row_counts(self) -> np.ndarray:
        """[samples] int64: how many rows each sample has."""
        return np.concatenate([self._shard(i).row_counts() for i in range(len(self._entries))])

    def cu_seqlens(self, index: int) -> np.ndarray:
        """[documents + 1] int32, without decoding rows."""
        shard, local = self._locate(index)
        return shard.cu_seqlens(local)

    def close(self) -> None:
        """Unmaps all shards; the reader opens them again when used."""
        self._forget()

    def _locate(self, index: int) -> tuple[MappedShard, int]:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"sample {index} of a cache with {size}")
        index = int(index) % size
        number = int(np.searchsorted(self._first_sample, index, side="right")) - 1
        return self._shard(number), index - self._entries[number].first_sample

    def _shard(self, number: int) -> MappedShard:
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        entry = self._entries[number]
        try:
            shard = self._mapped(number, entry)
        except CacheError:
            if not self._storage.discard(entry.file):
                raise
            shard = self._mapped(number, entry)  # a copy was damaged here, perhaps not the original
        self._open[number] = shard
        while len(self._open) > self.max_open_shards:
            self._open.popitem(last=False)
        return shard

    def _mapped(self, number: int, entry: ShardEntry) -> MappedShard:
        path = self.shard_path(entry)
        shard = MappedShard(path, entry, self.spec)
        if self.check_checksums and number not in self._checked:
            check_shard_bytes(path, entry)
            self._checked.add(number)
        return shard

    def _account(self, sample_bytes: int) -> None:
        self._touched_bytes += sample_bytes
        if self._touched_bytes > RESIDENT_BYTES:
            self._touched_bytes = 0
            for shard in self._open.values():
                shard.release_pages()

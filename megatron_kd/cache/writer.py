"""Writing a cache: samples in, whole shards on disk, the manifest last.

`CacheWriter` is the plain form: one process, samples in order. A parallel capture uses the parts:
`CacheDirectory.begin` once per worker, `plan_shards` for the cuts (the same everywhere),
`CacheDirectory.missing` for what is left to do, a `ShardWriter` per shard, and
`CacheDirectory.complete_if_whole` in the end. The bytes depend only on the samples and the spec.

Letters: n tokens of a sample, R supervised rows, K candidates, D hidden size.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.format import CacheError, CacheSpec, ShardEntry
from megatron_kd.cache.sample import Sample, ShardBuffer, check_sample
from megatron_kd.cache.shard import ShardHead, serialize
from megatron_kd.files import publish

DEFAULT_SHARD_POSITIONS = 1 << 17  # about 35 MB compact


def plan_shards(
    supervised: Sequence[int], shard_positions: int = DEFAULT_SHARD_POSITIONS
) -> np.ndarray:
    """Where shards are cut: after the sample that brings one to `shard_positions` rows or more.

    Args:
        supervised: [samples] supervised positions of each sample.

    Returns:
        [shards + 1] int64: shard i holds the samples from plan[i] up to plan[i + 1].
    """
    if shard_positions < 1:
        raise CacheError(f"shard_positions must be at least 1, got {shard_positions}")
    total = np.cumsum(np.asarray(supervised, dtype=np.int64))
    cuts, before = [0], 0
    while cuts[-1] < total.size:
        cut = min(int(np.searchsorted(total, before + shard_positions)) + 1, total.size)
        cuts.append(cut)
        before = int(total[cut - 1])
    return np.array(cuts, dtype=np.int64)


class SampleWriter(ABC):
    """Checks samples and takes them, one after the other."""

    spec: CacheSpec

    def append(
        self,
        tokens,
        loss_mask,
        topk_ids,
        topk_logprobs,
        *,
        cu_seqlens=None,
        log_z=None,
        hidden=None,
        label_logprob=None,
    ) -> None:
        """Adds one sample. Arrays are numpy or torch.

        Row t is the teacher's distribution of tokens[t + 1] given tokens[.. t]. Rows come for all n
        positions (those the mask drops are ignored) or for the R supervised ones alone.

        Args:
            tokens: [n] integer.
            loss_mask: [n] bool or 0/1; the last one is 0, as nothing follows the last token.
            topk_ids: [n or R, K] integer, distinct along K; -1 marks an unused slot.
            topk_logprobs: [n or R, K] floating, nats, full-vocabulary normalizer; -inf in unused
                slots.
            cu_seqlens: [documents + 1] integer document bounds, from 0 to n; None: one document.
            log_z: {τ: [n or R] floating} for exactly the spec's temperatures.
            hidden: [n or R, D] floating, where the spec keeps hidden states.
            label_logprob: [n or R] floating, nats, of tokens[t + 1], where the spec keeps it.

        Raises:
            CacheError: A row is not a truncated distribution, or shapes and dtypes are not these.
        """
        where = f"sample {self.next_sample}"
        self._take(
            check_sample(
                self.spec,
                where,
                tokens,
                loss_mask,
                topk_ids,
                topk_logprobs,
                cu_seqlens=cu_seqlens,
                log_z=log_z,
                hidden=hidden,
                label_logprob=label_logprob,
            )
        )

    @property
    @abstractmethod
    def next_sample(self) -> int:
        """The number that the next sample gets in the cache."""

    @abstractmethod
    def _take(self, sample: Sample) -> None:
        """Adds a sample that was found good."""


class ShardWriter(SampleWriter):
    """Collects the samples of one shard in memory and puts the shard on disk in one step.

    Args:
        path: The cache's directory, begun by `CacheDirectory.begin`.
        shard: Its number. Two workers on the same shard do no harm: both write the same bytes.
        first_sample: The number of the first sample appended.
    """

    def __init__(self, path: str | os.PathLike, spec: CacheSpec, shard: int, first_sample: int):
        self.directory, self.spec = CacheDirectory(path), spec
        self.shard, self.first_sample = shard, first_sample
        self._buffer = ShardBuffer(spec)

    @property
    def samples(self) -> int:
        return self._buffer.samples

    @property
    def positions(self) -> int:
        return self._buffer.positions

    @property
    def next_sample(self) -> int:
        return self.first_sample + self.samples

    def _take(self, sample: Sample) -> None:
        self._buffer.add(sample)

    def publish(self) -> ShardEntry:
        """Writes the shard, then its entry file, which makes it count as finished."""
        if not self.samples:
            raise CacheError(f"shard {self.shard} has no samples")
        head = ShardHead(self.shard, self.first_sample, self.samples, self.spec.fingerprint)
        payload = serialize(self.spec, head, self._buffer.tensors())
        entry = ShardEntry(
            shard=self.shard,
            first_sample=self.first_sample,
            samples=self.samples,
            positions=self.positions,
            bytes=len(payload),
            xxh3_128=xxhash.xxh3_128_hexdigest(payload),
        )
        publish(self.directory.folder / entry.file, payload)
        self.directory.publish_entry(entry)
        return entry


class CacheWriter(SampleWriter):
    """Writes a cache from one process, sample after sample.

    Leaving the `with` block without an exception publishes the manifest; an exception or a kill
    leaves the finished shards and no manifest. With `resume=True` such a directory is continued:
    append the samples from `next_sample` on.

    Args:
        path: An empty or new directory.
        spec: What the cache holds and whose it is.
        shard_positions: Supervised positions after which a shard is closed.
        origin: Where the cache comes from; carried in the manifest, bound by nothing.

    Raises:
        CacheError: The directory holds something else.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        spec: CacheSpec,
        *,
        shard_positions: int = DEFAULT_SHARD_POSITIONS,
        resume: bool = False,
        origin: Mapping | None = None,
    ):
        if shard_positions < 1:
            raise CacheError(f"shard_positions must be at least 1, got {shard_positions}")
        directory = CacheDirectory(path)
        if directory.is_complete:
            raise CacheError(f"{directory.folder} holds a complete cache; choose another directory")
        if not resume and directory.is_begun:
            raise CacheError(
                f"{directory.folder} holds an unfinished cache; continue it with resume=True or "
                "choose another directory"
            )
        self.directory, self.spec = CacheDirectory.begin(path, spec), spec
        self.shard_positions, self.origin = shard_positions, origin
        finished = self.directory.finished()
        shard = next_sample = 0
        while shard in finished and finished[shard].first_sample == next_sample:
            next_sample += finished[shard].samples
            shard += 1
        self._shard = ShardWriter(self.directory, spec, shard, next_sample)

    @property
    def next_sample(self) -> int:
        return self._shard.next_sample

    def _take(self, sample: Sample) -> None:
        self._shard._take(sample)
        if self._shard.positions >= self.shard_positions:
            self._flush()

    def _flush(self) -> None:
        self._shard.publish()
        self._shard = ShardWriter(
            self.directory, self.spec, self._shard.shard + 1, self.next_sample
        )

    def close(self) -> dict:
        """Publishes what is left and the manifest, and returns it."""
        if self._shard.samples:
            self._flush()
        if not self.next_sample:
            raise CacheError(
                f"{self.directory.folder}: no sample was appended, so there is no cache to complete"
            )
        return self.directory.publish_manifest(samples=self.next_sample, origin=self.origin)

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        if exception_type is None:
            self.close()

"""Several caches as one: each gives its share of the samples, in a fixed order."""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_kd.cache.format import CacheError
from megatron_kd.cache.reader import CachedSample, CacheReader
from megatron_kd.cache.selection import SelectedReader
from megatron_kd.files import canonical_json, sha256_json

SHARED_KEYS = ("tokenizer", "vocab_size", "packing")


class MixedReader:
    """Reads like a `CacheReader`. Pickles as its readers do.

    Sample i of the mixture is the same whenever the caches and weights are. A cache that runs out
    starts again from its first sample; shuffling is the dataset's business. A sample has the
    candidates, normalizers and hidden states that all caches have, so that samples of several fit
    into one batch.

    Args:
        sources: (path, `CacheReader` or `SelectedReader`, weight > 0), …; weights need not sum to
            one.
        share_by: What the weights are shares of: "samples", or the supervised "tokens" in them, on
            the average of each cache.
        each_alone: Samples are never put into one batch: each has all the normalizers of its cache.
        samples: Length of the mixture. None: as long as no sample comes twice.
        check_checksums: For sources given as paths.

    Raises:
        CacheError: The caches cannot be trained on together.
    """

    def __init__(
        self,
        sources: Sequence[tuple[CacheReader | SelectedReader | str | os.PathLike, float]],
        samples: int | None = None,
        check_checksums: bool = True,
        *,
        share_by: str = "samples",
        each_alone: bool = False,
    ):
        if not sources:
            raise CacheError("a mixture needs at least one cache")
        self.readers = [
            CacheReader(source, check_checksums)
            if isinstance(source, str | os.PathLike)
            else source
            for source, _ in sources
        ]
        weights = np.array([weight for _, weight in sources], dtype=np.float64)
        if not (np.isfinite(weights).all() and (weights > 0).all()):
            raise CacheError(
                f"weights of a mixture must be positive numbers, got {weights.tolist()}"
            )
        if share_by == "tokens":
            weights /= [reader.manifest["positions"] / len(reader) for reader in self.readers]
        elif share_by != "samples":
            raise CacheError(f"shares must be by samples or tokens, got {share_by!r}")
        self.weights = weights / weights.sum()
        _check_together(self.readers)
        lengths = np.array([len(reader) for reader in self.readers])
        if samples is None:
            samples = max(int(np.floor(lengths / self.weights + 1e-9).min()), 1)
        if samples < 1:
            raise CacheError(f"a mixture must have at least 1 sample, got {samples}")
        self._source, self._local = _interleave(self.weights, samples)
        self._local %= lengths[self._source]
        self.topk = max(reader.topk for reader in self.readers)
        self._each_alone = each_alone
        self._temperatures = set.intersection(
            *(set(reader.spec.temperatures) for reader in self.readers)
        )
        sizes = {(reader.spec.hidden_size, reader.spec.hidden_dtype) for reader in self.readers}
        self._hidden = len(sizes) == 1
        methods = {reader.sampling_method for reader in self.readers}
        self.sampling_method = methods.pop() if len(methods) == 1 else None
        self.manifest = self._manifest(samples)

    def _manifest(self, samples: int) -> dict:
        first = self.readers[0].manifest
        same = {
            key: value
            for key, value in first.items()
            if all(reader.manifest.get(key) == value for reader in self.readers)
        }
        mixture = [
            {"fingerprint": reader.fingerprint, "weight": float(weight)}
            for reader, weight in zip(self.readers, self.weights, strict=True)
        ]
        own = {"samples": samples, "topk": self.topk, "mixture": mixture}
        dropped = ("fingerprint", "checksum", "origin", "shards", "positions")
        kept = {key: value for key, value in same.items() if key not in dropped}
        return {**kept, **own, "fingerprint": sha256_json(own)}

    def __len__(self) -> int:
        return self._source.size

    @property
    def vocab_size(self) -> int:
        return self.readers[0].vocab_size

    @property
    def tokenizer(self):
        return self.readers[0].tokenizer

    @property
    def fingerprint(self) -> str:
        """Binds the caches, their weights and the length."""
        return self.manifest["fingerprint"]

    def locate(self, index: int) -> tuple[int, int]:
        """(which cache, its sample) behind a sample of the mixture."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a mixture with {len(self)}")
        return int(self._source[index]), int(self._local[index])

    def __getitem__(self, index: int) -> CachedSample:
        source, local = self.locate(index)
        sample = self.readers[source][local]
        rows = sample.rows
        widen = ((0, 0), (0, self.topk - rows.topk_ids.shape[1]))
        if widen[1][1]:
            rows = replace(
                rows,
                topk_ids=np.pad(rows.topk_ids, widen, constant_values=-1),
                topk_logprobs=np.pad(rows.topk_logprobs, widen, constant_values=-np.inf),
            )
        log_z = rows.log_z
        if not self._each_alone:
            log_z = {tau: log_z[tau] for tau in sorted(self._temperatures)}
        rows = replace(rows, log_z=log_z, hidden=rows.hidden if self._hidden else None)
        return replace(sample, rows=rows)

    def cu_seqlens(self, index: int) -> np.ndarray:
        """[documents + 1] int32, without decoding rows."""
        source, local = self.locate(index)
        return self.readers[source].cu_seqlens(local)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


def _check_together(readers: list[CacheReader]) -> None:
    first = readers[0]
    for reader in readers[1:]:
        for key in SHARED_KEYS:
            one, other = first.manifest[key], reader.manifest[key]
            if one != other:
                raise CacheError(
                    f"{first.path} and {reader.path} cannot be mixed: their {key} differs "
                    f"({canonical_json(one)} and {canonical_json(other)})"
                )


def _interleave(weights: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Spreads each cache's samples evenly: (cache [samples] int16, its sample [samples] int64)."""
    exact = weights * samples
    counts = np.floor(exact).astype(np.int64)
    rest = samples - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1  # the largest remainders
    source = np.repeat(np.arange(weights.size, dtype=np.int16), counts)
    local = np.concatenate([np.arange(count) for count in counts])
    moment = (local + 0.5) / counts[source]  # when in the mixture, from 0 to 1
    order = np.argsort(moment, kind="stable")
    return source[order], local[order]

"""What a cache holds, in numbers: mass, entropy, ranks, bytes.

Letters: R positions looked at, K candidates.
"""

import os
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_kd.cache.codecs import CODECS
from megatron_kd.cache.format import CacheError
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.shard import parse_header
from megatron_kd.files import MAX_HEADER_BYTES

# What the bytes of the format's own tensors are spent on; a codec names those of its own.
GROUPS = {
    "counts": "row headers",
    "tokens": "tokens",
    "hidden": "hidden states",
}


@dataclass(frozen=True)
class CacheStatistics:
    """Over the samples looked at, unless said otherwise."""

    samples: int
    positions: int
    mass: np.ndarray  # [R] fp32
    entropy_nats: np.ndarray  # [R] fp32; what lies off the kept candidates counts as one outcome
    top_probability: np.ndarray  # [R] fp32
    candidates: np.ndarray  # [R] int64
    label_kept: float
    """Share of positions whose next token is among the kept candidates."""
    label_first: float
    """Share of positions whose next token is the teacher's first choice."""
    label_nats: np.ndarray | None
    """[R] fp32, −log p of the next token: the teacher's cross-entropy; None where the cache has
    none."""
    rank_quantiles_nats: np.ndarray
    """[3, K] fp32: the 10, 50 and 90 % quantile of the log-probability at each rank."""
    bytes_per_position: dict[str, float]
    """What they are spent on: bytes over positions of the whole cache. Headers and offsets are "the
    rest"."""

    @property
    def total_bytes_per_position(self) -> float:
        return sum(self.bytes_per_position.values())


def cache_statistics(reader: CacheReader, max_positions: int = 50_000) -> CacheStatistics:
    """Looks at samples spread evenly over the cache, until max_positions are seen.

    Raises:
        CacheError: The cache has no supervised position.
    """
    positions = reader.manifest["positions"]
    if not positions:
        raise CacheError(f"{reader.path} has no supervised position")
    wanted = min(len(reader), max(1, int(len(reader) * max_positions / positions)))
    chosen = np.unique(np.linspace(0, len(reader) - 1, wanted).round().astype(np.int64))
    mass, entropy, top, counts, kept, first, ranks, label_nats = [], [], [], [], 0, 0, [], []
    for index in chosen:
        rows = reader.rows(int(index))
        if not rows.positions.size:
            continue
        probabilities = np.exp(rows.topk_logprobs)  # [R, K], 0 in unused slots
        used = rows.topk_ids >= 0
        tail = np.clip(1.0 - rows.mass, 0.0, 1.0)
        surprise = np.where(used, -probabilities * np.where(used, rows.topk_logprobs, 0.0), 0.0)
        entropy.append(surprise.sum(axis=1) - tail * np.log(np.maximum(tail, 1e-30)))
        mass.append(rows.mass)
        top.append(probabilities[:, 0])
        counts.append(used.sum(axis=1))
        labels = reader.tokens(int(index))[rows.positions + 1]
        kept += int((rows.topk_ids == labels[:, None]).sum())
        first += int((rows.topk_ids[:, 0] == labels).sum())
        if rows.label_logprob is not None:
            label_nats.append(-rows.label_logprob)
        ranks.append(np.where(used, rows.topk_logprobs, np.nan))
    if not mass:
        raise CacheError(f"{reader.path}: none of the samples looked at has a supervised position")
    seen = sum(part.size for part in mass)
    return CacheStatistics(
        samples=chosen.size,
        positions=seen,
        mass=np.concatenate(mass),
        entropy_nats=np.concatenate(entropy),
        top_probability=np.concatenate(top),
        candidates=np.concatenate(counts),
        label_kept=kept / seen,
        label_first=first / seen,
        label_nats=np.concatenate(label_nats) if label_nats else None,
        rank_quantiles_nats=_quantiles(np.concatenate(ranks)),
        bytes_per_position=_bytes_per_position(reader),
    )


def _quantiles(ranks: np.ndarray) -> np.ndarray:
    filled = ~np.isnan(ranks).all(axis=0)  # with few candidates per row, the last ranks are empty
    quantiles = np.full((3, ranks.shape[1]), np.nan, np.float32)
    quantiles[:, filled] = np.nanquantile(ranks[:, filled], (0.1, 0.5, 0.9), axis=0)
    return quantiles


def _bytes_per_position(reader: CacheReader) -> dict[str, float]:
    """From the headers of the shards; local files only know their own."""
    spent: dict[str, int] = defaultdict(int)
    groups = {**GROUPS, **CODECS[reader.spec.codec].groups}
    for index in range(len(reader.spec.temperatures)):
        groups[f"log_z.{index}"] = "log normalizers"
    groups["label_logprob"] = "next token's log-probability"
    for entry in reader.shards:
        path = reader.shard_path(entry)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _, places = parse_header(path, file.read(8 + MAX_HEADER_BYTES), size, reader.spec)
        rest = size
        for name, place in places.items():
            if name in groups:
                spent[groups[name]] += place.bytes
                rest -= place.bytes
        spent["the rest"] += rest
    positions = reader.manifest["positions"]
    return {group: count / positions for group, count in spent.items()}

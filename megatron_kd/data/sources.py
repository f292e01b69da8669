"""Open stored samples, and check that a cache and prepared data hold the same ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_kd.cache import CacheReader
from megatron_kd.cache.mixing import MixedReader
from megatron_kd.cache.selection import SampleChoice, SelectedReader
from megatron_kd.data.sequences import SequenceReader

SPOT_CHECKS = 64
"""Samples compared token by token; the count and the order of all samples are bound by both
manifests.
"""


def open_caches(
    sources: Sequence[tuple[str | Path, float]],
    *,
    check_checksums: bool = True,
    choice: SampleChoice | None = None,
    **mixing,
):
    """One cache, or several mixed by weight.

    Args:
        choice: Which samples of each are read; None: all.
        mixing: Further keywords of `MixedReader`.
        sources: (directory of one split, weight), …; an address like s3://… is read through a local
            copy.

    Raises:
        FileNotFoundError: Nothing is there; the message names the command that makes it.
        CacheError: A cache is incomplete or damaged, or they cannot be mixed.
    """
    for path, _ in sources:
        if not Path(path).is_dir() and "://" not in str(path):
            raise FileNotFoundError(f"no directory {path}; make it with `megatron-kd capture`")
    readers = [CacheReader(path, check_checksums=check_checksums) for path, _ in sources]
    if choice is not None:
        readers = [SelectedReader(reader, choice) for reader in readers]
    if len(readers) == 1:
        return readers[0]
    weights = [weight for _, weight in sources]
    return MixedReader(list(zip(readers, weights, strict=True)), **mixing)


def open_sequences(path: str | Path) -> SequenceReader:
    """Prepared sequences.

    Raises:
        FileNotFoundError: Nothing is there; the message names the command that makes it.
    """
    if not Path(path).is_dir():
        raise FileNotFoundError(f"no directory {path}; make it with `megatron-kd prepare`")
    return SequenceReader(path)


def check_same_tokens(cache, sequences) -> None:
    """Refuse a cache that was captured from other data.

    Raises:
        ValueError: The numbers of samples differ, or a compared sample differs.
    """
    data = cache.manifest.get("data")
    if isinstance(data, dict) and data.get("fingerprint") == sequences.fingerprint:
        return
    if len(cache) != len(sequences):
        raise ValueError(
            f"the cache holds {len(cache)} samples, the prepared data {len(sequences)}: the cache "
            "was captured from other data. Capture again, or remove data.path to train on the "
            "cache's own tokens"
        )
    for index in np.linspace(0, len(cache) - 1, min(SPOT_CHECKS, len(cache)), dtype=int):
        if not np.array_equal(cache[int(index)].tokens, sequences[int(index)].tokens):
            raise ValueError(
                f"sample {index} of the cache holds other tokens than the prepared data's: the "
                "cache was captured from other data or with another tokenizer. Capture again, or "
                "remove data.path"
            )

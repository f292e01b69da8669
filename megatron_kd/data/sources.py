"""Open stored samples, and check that a cache and prepared data hold the same ones."""

from pathlib import Path

import numpy as np

from megatron_kd.cache import CacheReader
from megatron_kd.data.sequences import SequenceReader

SPOT_CHECKS = 64
"""Samples compared token by token; the count and the order of all samples are bound by both
manifests.
"""


def open_source(path: str | Path, *, is_cache: bool, check_checksums: bool = True):
    """A reader of cached teacher rows, or of prepared sequences.

    Raises:
        FileNotFoundError: Nothing is there; the message names the command that makes it.
        CacheError: The cache is incomplete or damaged.
    """
    command = "megatron-kd capture" if is_cache else "megatron-kd prepare"
    if not Path(path).is_dir() and "://" not in str(path):
        raise FileNotFoundError(f"no directory {path}; make it with `{command}`")
    if is_cache:
        return CacheReader(path, check_checksums=check_checksums)
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
            "was captured from "
            "other data. Capture again, or remove data.path to train on the cache's own tokens"
        )
    for index in np.linspace(0, len(cache) - 1, min(SPOT_CHECKS, len(cache)), dtype=int):
        if not np.array_equal(cache[int(index)].tokens, sequences[int(index)].tokens):
            raise ValueError(
                f"sample {index} of the cache holds other tokens than the prepared data's: the "
                "cache was captured "
                "from other data or with another tokenizer. Capture again, or remove data.path"
            )

"""The codecs: how the rows of a shard are stored, by the name that a cache's description gives.

To add one: a module here with a `Codec`, its line in `CODECS`, and its tensors in
docs/cache-format.md. Writing, reading, verifying, inspecting and planning take it from there.
"""

from megatron_kd.cache.codecs.base import Codec, RowEntries, RowSpec, wide_ids
from megatron_kd.cache.codecs.compact import Compact
from megatron_kd.cache.codecs.fp16 import Half

CODECS: dict[str, Codec] = {
    "compact": Compact(),
    "fp16": Half(),
}

__all__ = ["CODECS", "Codec", "RowEntries", "RowSpec", "bytes_per_position"]


def bytes_per_position(codec: str, vocab_size: int, topk: int) -> float:
    """About what a supervised position takes in a cache, its token included.

    Raises:
        ValueError: There is no codec of that name.
    """
    if codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, not {codec}")
    token_bytes = 3 if wide_ids(vocab_size) else 2
    return CODECS[codec].bytes_per_position(vocab_size, topk) + token_bytes

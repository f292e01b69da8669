"""The teacher cache: top-K teacher distributions on disk, keyed by sample, checked, compact.

docs/cache-format.md describes the bytes. A capture by several processes uses `directory` and
`writer.ShardWriter`.
"""

from megatron_kd.cache.format import CacheError, CacheSpec
from megatron_kd.cache.mixing import MixedReader
from megatron_kd.cache.reader import CachedRows, CachedSample, CacheReader
from megatron_kd.cache.writer import CacheWriter

__all__ = [
    "CacheError",
    "CacheReader",
    "CacheSpec",
    "CacheWriter",
    "CachedRows",
    "CachedSample",
    "MixedReader",
]

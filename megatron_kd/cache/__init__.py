"""The teacher cache: top-K teacher distributions on disk, keyed by sample, checked, compact.

docs/cache-format.md describes the bytes.
"""

from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.format import CacheError, CacheSpec, ShardEntry
from megatron_kd.cache.mixing import MixedReader
from megatron_kd.cache.reader import CachedRows, CachedSample, CacheReader
from megatron_kd.cache.writer import (
    CacheWriter,
    ShardWriter,
    finished_shards,
    open_directory,
    plan_shards,
    publish_manifest,
    reopen,
)

__all__ = [
    "CacheDirectory",
    "CacheError",
    "CacheReader",
    "CacheSpec",
    "CacheWriter",
    "CachedRows",
    "CachedSample",
    "MixedReader",
    "ShardEntry",
    "ShardWriter",
    "finished_shards",
    "open_directory",
    "plan_shards",
    "publish_manifest",
    "reopen",
]

"""Local copies of a cache at a URL: which of them go when there are too many bytes."""

import os

import fsspec
import pytest

from megatron_kd.cache.storage import Remote

NAMES = [f"shard-{number:06d}.safetensors" for number in range(3)]


@pytest.fixture
def url():
    store = fsspec.filesystem("memory")
    for name in NAMES:
        store.pipe_file(f"/eviction/{name}", b"x" * 100)
    yield "memory://eviction"
    store.rm("/eviction", recursive=True)


def test_the_copy_used_longest_ago_makes_room(url, tmp_path):
    remote = Remote(url, tmp_path, max_local_bytes=250)
    for age, name in ((50, NAMES[0]), (90, NAMES[1])):  # seconds since each was copied
        copy = remote.local_path(name, 100)
        then = copy.stat().st_mtime - age
        os.utime(copy, (then, then))
    assert remote.local_path(NAMES[2], 100).exists()
    assert sorted(os.listdir(tmp_path)) == [NAMES[0], NAMES[2]]

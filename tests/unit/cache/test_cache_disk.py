"""What is on disk at each moment: whole files under their names, or nothing."""

import errno
import json
import os
from pathlib import Path

import pytest
from cache_samples import directory_bytes, make_samples, write_cache

from megatron_kd.cache import CacheError, CacheReader, CacheSpec, CacheWriter
from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.writer import ShardWriter

SETTINGS = dict(vocab_size=1000, topk=4, teacher="t", tokenizer="k")


def test_reopening_believes_no_entry_left_by_a_killed_writer(tmp_path, monkeypatch):
    """It died after its manifest and before it took the entries away."""
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)
    path = write_cache(tmp_path / "c", make_samples(count=12))
    monkeypatch.undo()
    assert list((path / "finished").glob("shard-*.json"))
    CacheDirectory(path).reopen(without=[1])
    assert 1 not in CacheDirectory(path).finished() and 0 in CacheDirectory(path).finished()


def test_a_full_disk_leaves_no_trace_of_the_shard(tmp_path, monkeypatch):
    """The entry must never be there before its shard is."""
    real = os.fsync
    open_files = []

    def full(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        open_files.append(os.path.basename(name))
        if "shard-000001.safetensors" in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_cache(tmp_path / "c", make_samples(count=12))
    assert any("shard-000000.safetensors" in name for name in open_files)
    assert sorted(CacheDirectory(tmp_path / "c").finished()) == [0]
    left = [file.name for file in (tmp_path / "c").rglob("*") if file.is_file()]
    assert sorted(left) == ["shard-000000.json", "shard-000000.safetensors", "spec.json"]


def test_files_are_on_disk_before_they_have_their_names(tmp_path, monkeypatch):
    """Content and folder are flushed around each rename, a shard's entry comes after it, and the
    manifest last: what a power cut leaves is whole."""
    acts, fsync, replace = [], os.fsync, os.replace

    def flushed(descriptor):
        acts.append(("flush", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(source, target):
        inode = os.stat(source).st_ino
        assert acts[-1] == ("flush", inode) and not os.path.exists(target)
        replace(source, target)
        acts.append(("name", os.path.relpath(target, tmp_path / "c"), os.stat(target).st_size))

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    path = write_cache(tmp_path / "c", make_samples(count=12))
    monkeypatch.undo()
    names = [act[1] for act in acts if act[0] == "name"]
    shards = [entry.file for entry in CacheReader(path).shards]
    want = ["spec.json"]
    for shard in shards:
        want += [shard, f"finished/{Path(shard).stem}.json"]
    assert names == [*want, "manifest.backup.json", "manifest.json"]
    for at, act in enumerate(acts):
        if act[0] == "name":
            folder = (path / act[1]).parent
            assert acts[at + 1] == ("flush", folder.stat().st_ino)
            if folder == path:
                assert (path / act[1]).stat().st_size == act[2]


def test_only_whole_shards_count_as_finished(tmp_path):
    path = write_cache(tmp_path / "c", make_samples(count=12))
    count = len(CacheReader(path).shards)
    CacheDirectory(path).reopen()
    assert sorted(CacheDirectory(path).finished()) == list(range(count))
    os.truncate(path / "shard-000001.safetensors", 100)
    (path / "shard-000002.safetensors").unlink()
    assert sorted(CacheDirectory(path).finished()) == [n for n in range(count) if n not in (1, 2)]


@pytest.mark.parametrize("damage", [b"", b"\x00" * 90, b"[]", "another's"])
def test_a_shard_with_a_broken_entry_is_made_again(tmp_path, damage):
    path = write_cache(tmp_path / "c", make_samples(count=12))
    whole = directory_bytes(path)
    CacheDirectory(path).reopen()
    entry = path / "finished" / "shard-000001.json"
    if damage == "another's":
        damage = entry.with_name("shard-000002.json").read_bytes()
    entry.write_bytes(damage)
    assert 1 not in CacheDirectory(path).finished()
    spec = CacheSpec.from_dict(json.loads((path / "spec.json").read_text()))
    first = CacheDirectory(path).finished()[0].samples
    writer = ShardWriter(path, spec, 1, first)
    for sample in make_samples(count=12)[first : CacheDirectory(path).finished()[2].first_sample]:
        writer.append(*sample)
    writer.publish()
    CacheDirectory(path).publish_manifest(samples=12)
    assert directory_bytes(path) == whole


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CacheError, match="other files"):
        CacheWriter(tmp_path, CacheSpec(**SETTINGS))
    assert os.listdir(tmp_path) == ["thesis.txt"]

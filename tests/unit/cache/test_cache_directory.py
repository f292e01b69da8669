"""The steps of a cache's directory from begun to complete and back, alone and beside others."""

import json

import numpy as np
import pytest
from cache_samples import directory_bytes, make_samples, write_cache

from megatron_kd.cache import CacheError, CacheReader, CacheSpec, directory
from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.writer import ShardWriter, plan_shards

SPEC = CacheSpec(vocab_size=1000, topk=8, teacher="t", tokenizer="k")
SAMPLES = make_samples(count=12)
PLAN = plan_shards([int(sample[1].sum()) for sample in SAMPLES], 60)
ORIGIN = {"data": "/somewhere", "topk": 8}


def make_shards(folder, shards):
    for shard in shards:
        writer = ShardWriter(folder, SPEC, shard, int(PLAN[shard]))
        for sample in SAMPLES[PLAN[shard] : PLAN[shard + 1]]:
            writer.append(*sample)
        writer.publish()


@pytest.fixture
def complete(tmp_path):
    started = CacheDirectory.begin(tmp_path / "c", SPEC)
    make_shards(started.folder, range(len(PLAN) - 1))
    assert started.complete_if_whole(PLAN, origin=ORIGIN)
    return started


def test_missing_shards_are_those_of_the_plan_that_are_not_whole(tmp_path):
    assert len(PLAN) > 4
    started = CacheDirectory.begin(tmp_path / "c", SPEC)
    assert started.missing(PLAN) == list(range(len(PLAN) - 1))
    make_shards(started.folder, [1, 2])
    (started.folder / "shard-000002.safetensors").write_bytes(b"cut")
    assert started.missing(PLAN) == [0, *range(2, len(PLAN) - 1)]
    assert not started.is_complete


def test_it_is_complete_with_its_last_shard_and_not_before(tmp_path):
    started = CacheDirectory.begin(tmp_path / "c", SPEC)
    last = len(PLAN) - 2
    make_shards(started.folder, range(last))
    assert not started.complete_if_whole(PLAN, origin=ORIGIN)
    assert not started.is_complete
    make_shards(started.folder, [last])
    assert started.complete_if_whole(PLAN, origin=ORIGIN) and started.is_complete
    reader = CacheReader(started)
    assert len(reader) == len(SAMPLES) and reader.manifest["origin"] == ORIGIN
    assert started.missing(PLAN) == []


def test_the_origin_is_known_before_and_after_the_manifest(tmp_path):
    started = CacheDirectory.begin(tmp_path / "c", SPEC)
    assert started.origin() is None
    started.keep_origin({"topk": 7})
    assert started.origin() == {"topk": 7}
    make_shards(started.folder, range(len(PLAN) - 1))
    started.complete_if_whole(PLAN, origin=ORIGIN)
    assert started.origin() == ORIGIN
    assert not [name for name in directory_bytes(started.folder) if name.startswith(".")]


def test_a_note_of_another_run_does_not_make_a_cache_complete(tmp_path):
    """Files whose names start with a dot are nobody's output; anything else is."""
    started = CacheDirectory.begin(tmp_path / "c", SPEC)
    started.keep_origin(ORIGIN)
    assert CacheDirectory.begin(tmp_path / "c", SPEC).missing(PLAN)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("years of work")
    with pytest.raises(CacheError, match="other files"):
        CacheDirectory.begin(tmp_path / "d", SPEC)


def test_another_description_is_refused_with_the_difference(tmp_path):
    CacheDirectory.begin(tmp_path / "c", SPEC)
    other = CacheSpec(vocab_size=1000, topk=9, teacher="t", tokenizer="k")
    with pytest.raises(CacheError, match="'topk': \\(8, 9\\)"):
        CacheDirectory.begin(tmp_path / "c", other)


def test_lost_shards_reopen_a_complete_cache_and_only_they_are_made(complete):
    whole = directory_bytes(complete.folder)
    assert complete.reopen_lost(PLAN) == [] and complete.is_complete
    (complete.folder / "shard-000001.safetensors").unlink()
    (complete.folder / "shard-000003.safetensors").write_bytes(b"cut")
    assert complete.reopen_lost(PLAN) == [1, 3]
    assert not complete.is_complete and complete.missing(PLAN) == [1, 3]
    assert complete.reopen_lost(PLAN) == []  # it is not complete any more
    make_shards(complete.folder, [1, 3])
    assert complete.complete_if_whole(PLAN, origin=ORIGIN)
    assert directory_bytes(complete.folder) == whole


@pytest.mark.parametrize("look", [1, 2])
def test_another_worker_completes_it_between_two_looks(complete, monkeypatch, look):
    """It takes the entries away while this one reads them, for the first or the second time."""
    complete.reopen()
    read, calls = directory._read_entry, []

    def read_entry(file):
        calls.append(file)
        if len(calls) == (look - 1) * (len(PLAN) - 1) + 1:
            monkeypatch.setattr(directory, "_read_entry", read)
            assert CacheDirectory(complete).complete_if_whole(PLAN, origin=ORIGIN)
        return read(file)

    monkeypatch.setattr(directory, "_read_entry", read_entry)
    assert complete.complete_if_whole(PLAN, origin=ORIGIN)
    assert directory._read_entry is read  # the other one did come in between
    assert len(CacheReader(complete)) == len(SAMPLES)


def test_another_worker_reopens_it_between_two_looks(complete, monkeypatch):
    (complete.folder / "shard-000001.safetensors").unlink()
    real = CacheDirectory.manifest

    def manifest(self):
        monkeypatch.setattr(CacheDirectory, "manifest", real)
        assert CacheDirectory(self.folder).reopen_lost(PLAN) == [1]
        return real(self)

    monkeypatch.setattr(CacheDirectory, "manifest", manifest)
    assert complete.reopen_lost(PLAN) == []
    assert complete.missing(PLAN) == [1]


def test_a_hole_in_the_numbers_does_not_complete_a_cache(tmp_path):
    """All samples there by count, but not one after the other."""
    started = CacheDirectory.begin(tmp_path / "c", SPEC)
    make_shards(started.folder, [0, 2])
    count = int(PLAN[1] + PLAN[3] - PLAN[2])
    with pytest.raises(CacheError, match="must start at sample"):
        started.publish_manifest(samples=count)
    with pytest.raises(CacheError, match=f"{count} of {count + 1} samples"):
        started.publish_manifest(samples=count + 1)


def test_a_manifest_that_was_changed_is_no_reason_to_make_shards_again(complete):
    """A worker that reads damage must stop, not count everything as lost."""
    manifest = json.loads(complete.manifest_file.read_text())
    manifest["samples"] += 1
    complete.manifest_file.write_text(json.dumps(manifest))
    with pytest.raises(CacheError, match="changed after"):
        complete.missing(PLAN)
    with pytest.raises(CacheError, match="changed after"):
        complete.reopen_lost(PLAN)


def test_looking_changes_nothing(tmp_path):
    path = write_cache(tmp_path / "c", SAMPLES)
    before = directory_bytes(path)
    started = CacheDirectory(path)
    started.finished(), started.origin(), started.spec(), started.manifest()
    assert started.missing(np.array([0, len(SAMPLES)])) == []
    assert directory_bytes(path) == before

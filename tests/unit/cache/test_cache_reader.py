"""Any sample from any process, with bounded files, memory and local copies."""

import multiprocessing
import os
import pickle
import resource
import subprocess
import sys

import fsspec
import numpy as np
import pytest
import torch
from cache_samples import assert_rows, make_sample, make_samples, put_id_sums, write_cache

from megatron_kd.cache import CacheError, CacheReader
from megatron_kd.files import canonical_json

COUNT = 30


@pytest.fixture(scope="module")
def samples():
    return make_samples(count=COUNT)


@pytest.fixture
def path(tmp_path, samples):
    return write_cache(tmp_path / "cache", samples)


def test_random_access_with_few_shards_open(path, samples):
    reader = CacheReader(path, max_open_shards=2)
    assert len(reader.shards) > 10 and len(reader) == COUNT
    for index in np.random.default_rng(0).integers(-COUNT, COUNT, 100):
        assert_rows(reader[int(index)], samples[index], 0.005)
    assert len(reader._open) <= 2
    for outside in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"sample {outside} of a cache with {COUNT}"):
            reader[outside]


def test_rows_and_tokens_alone(path, samples):
    reader = CacheReader(path)
    tokens, mask, _, _ = samples[4]
    rows = reader.rows(4)
    np.testing.assert_array_equal(rows.positions, np.flatnonzero(mask))
    np.testing.assert_array_equal(rows.topk_ids, reader[4].topk_ids[mask])
    np.testing.assert_array_equal(reader.tokens(4), tokens)


def test_no_file_is_opened_twice(path, samples, monkeypatch):
    opened = []
    real_open = os.open

    def counting_audit(event, args):
        if event == "open" and str(args[0]).endswith(".safetensors"):
            opened.append(str(args[0]))

    reader = CacheReader(path, check_checksums=False)
    monkeypatch.setattr(os, "open", real_open)
    sys.addaudithook(counting_audit)
    for _ in range(3):
        for index in range(COUNT):
            reader[index]
    assert len(opened) == len(set(opened)) == len(reader.shards)


def test_samples_outlive_the_reader(path, samples):
    reader = CacheReader(path, max_open_shards=1)
    kept = [reader[index] for index in range(COUNT)]
    reader.close()
    for got, sample in zip(kept, samples, strict=True):
        assert_rows(got, sample, 0.005)


def test_pickles_to_its_path(path, samples):
    reader = CacheReader(path)
    reader[0]
    frozen = pickle.dumps(reader)
    assert len(frozen) < 20_000
    assert_rows(pickle.loads(frozen)[7], samples[7], 0.005)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes(path, method):
    reader = CacheReader(path, max_open_shards=3)
    want = [int(reader[index].topk_ids.sum()) for index in range(len(reader))]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=put_id_sums, args=(reader, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=120) for _ in children] == [want, want]
    for child in children:
        child.join()
    assert [int(reader[index].topk_ids.sum()) for index in range(len(reader))] == want


class _Tensors(torch.utils.data.Dataset):
    def __init__(self, reader):
        self.reader = reader

    def __len__(self):
        return len(self.reader)

    def __getitem__(self, index):
        sample = self.reader[index]
        return index, torch.from_numpy(sample.topk_ids), torch.from_numpy(sample.topk_logprobs)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(path, samples, method):
    loader = torch.utils.data.DataLoader(
        _Tensors(CacheReader(path)),
        batch_size=None,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        generator=torch.Generator().manual_seed(0),
    )
    seen = set()
    for index, ids, logprobs in loader:
        seen.add(int(index))
        mask = samples[index][1]
        want = np.sort(samples[index][2][mask], axis=1)
        np.testing.assert_array_equal(np.sort(ids.numpy()[mask], axis=1), want)
        assert logprobs.dtype == torch.float32
    assert seen == set(range(COUNT))


MEMORY_SCRIPT = """
import resource, sys
import numpy as np
from megatron_kd.cache import CacheReader, reader as module
module.RESIDENT_BYTES = int(sys.argv[2])
reader = CacheReader(sys.argv[1])
def resident_bytes():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize()
reader[0]
before, most = resident_bytes(), 0
for index in np.random.default_rng(0).permutation(len(reader)):
    reader[int(index)]
    most = max(most, resident_bytes() - before)
print(most, sum(entry.bytes for entry in reader.shards))
"""


@pytest.mark.extended
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_resident_memory_does_not_grow_with_the_cache(tmp_path):
    """All of a cache sixty times the page budget is read in random order."""
    sample = make_sample(np.random.default_rng(3), 513, 60000, 200, masked=0, spread_ids=True)
    path = write_cache(
        tmp_path / "c",
        [sample] * 160,
        vocab_size=60000,
        topk=200,
        codec="fp16",
        shard_positions=5000,
    )
    grown = {}
    for budget_bytes in (1 << 20, 1 << 40):
        out = subprocess.run(
            [sys.executable, "-c", MEMORY_SCRIPT, str(path), str(budget_bytes)],
            capture_output=True,
            text=True,
            check=True,
        )
        grown[budget_bytes], cache_bytes = map(int, out.stdout.split())
    assert cache_bytes > 60 << 20
    assert grown[1 << 40] > 50 << 20, "the measurement does not see mapped pages"
    assert grown[1 << 20] < 16 << 20, f"{grown[1 << 20] / 2**20:.0f} MiB more resident"


def test_open_files_stay_bounded(path):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader = CacheReader(path, max_open_shards=4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, limit[1]))
    try:
        for index in range(COUNT):
            reader[index]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_fingerprint_binds_contents_not_origin(tmp_path, samples):
    one = CacheReader(write_cache(tmp_path / "a", samples, origin={"data": "/x"}))
    same = CacheReader(write_cache(tmp_path / "b", samples, origin={"data": "/y"}))
    other = CacheReader(write_cache(tmp_path / "c", samples[:-1]))
    teacher = CacheReader(write_cache(tmp_path / "d", samples, teacher="another"))
    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, other.fingerprint, teacher.fingerprint}) == 3
    assert one.manifest["origin"] == {"data": "/x"}


def test_checksums_are_checked_on_first_use_unless_switched_off(path):
    reader = CacheReader(path)
    entry = reader.shards[3]
    file = path / entry.file
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    reader[0]
    with pytest.raises(
        CacheError, match=f"{entry.file} is damaged .samples {entry.first_sample} to"
    ):
        reader[entry.first_sample]
    CacheReader(path, check_checksums=False)[0]


def test_tokens_are_checked_on_every_read(path, samples):
    """With checksums off, a shard whose tokens changed is still found out."""
    reader = CacheReader(path, check_checksums=False)
    entry = reader.shards[2]
    tokens = samples[entry.first_sample][0].astype("<u2").tobytes()
    file = path / entry.file
    content = file.read_bytes()
    assert content.count(tokens) == 1
    file.write_bytes(content.replace(tokens, tokens[2:] + tokens[:2]))
    with pytest.raises(CacheError, match=f"tokens of sample {entry.first_sample} do not match"):
        reader[entry.first_sample]


class TestRemote:
    """fsspec URLs. The memory file system stands in for an object store."""

    @pytest.fixture
    def url(self, path):
        store = fsspec.filesystem("memory")
        for file in path.rglob("*"):
            if file.is_file():
                store.pipe_file(f"/bucket/cache/{file.relative_to(path)}", file.read_bytes())
        yield "memory://bucket/cache"
        store.rm("/bucket", recursive=True)

    def test_reads_as_a_directory_does(self, url, samples):
        reader = CacheReader(url)
        for index in (0, 29, 13, 0):
            assert_rows(reader[index], samples[index], 0.005)
        assert_rows(pickle.loads(pickle.dumps(reader))[5], samples[5], 0.005)

    def test_local_copies_stay_within_the_bound(self, url, samples, tmp_path):
        folder = tmp_path / "copies"
        largest = max(entry.bytes for entry in CacheReader(url).shards)
        reader = CacheReader(
            url, local_folder=folder, max_local_bytes=3 * largest, max_open_shards=2
        )
        for index in np.random.default_rng(1).integers(0, COUNT, 60):
            assert_rows(reader[int(index)], samples[index], 0.005)
            assert sum(file.stat().st_size for file in folder.iterdir()) <= 3 * largest
        with pytest.raises(CacheError, match="raise max_local_bytes"):
            CacheReader(url, local_folder=folder, max_local_bytes=100)[0]

    def test_own_copies_are_removed_in_the_end(self, url):
        reader = CacheReader(url)
        reader[0]
        folder = reader._storage._folder
        assert os.listdir(folder)
        del reader
        assert not folder.exists()

    def test_a_short_or_missing_object_is_refused(self, url):
        store = fsspec.filesystem("memory")
        store.pipe_file("/bucket/cache/shard-000000.safetensors", b"short")
        store.rm("/bucket/cache/shard-000001.safetensors")
        reader = CacheReader(url)
        with pytest.raises(CacheError, match="truncated or replaced"):
            reader[0]
        with pytest.raises(CacheError, match="shard-000001.safetensors is missing"):
            reader[reader.shards[1].first_sample]

    def test_a_damaged_local_copy_is_fetched_again(self, url, samples, tmp_path):
        """As after a power cut: the name and the size are there, the bytes are not."""
        folder = tmp_path / "copies"
        CacheReader(url, local_folder=folder)[0]
        (copy,) = folder.iterdir()
        good = copy.read_bytes()
        copy.write_bytes(bytes(len(good)))
        assert_rows(CacheReader(url, local_folder=folder)[0], samples[0], 0.005)
        assert copy.read_bytes() == good

    def test_a_damaged_original_is_refused(self, url, tmp_path):
        store = fsspec.filesystem("memory")
        name = "/bucket/cache/shard-000000.safetensors"
        content = bytearray(store.cat_file(name))
        content[-1] ^= 1
        store.pipe_file(name, bytes(content))
        with pytest.raises(CacheError, match="checksum does not match"):
            CacheReader(url, local_folder=tmp_path / "copies")[0]

    def test_no_cache_there(self):
        with pytest.raises(CacheError, match="has no manifest.json"):
            CacheReader("memory://bucket/nothing")

    def test_caches_can_share_a_folder_of_copies(self, url, samples, path, tmp_path):
        others = make_samples(seed=9, count=COUNT)
        other = write_cache(tmp_path / "other", others)
        store = fsspec.filesystem("memory")
        for file in other.glob("*.*"):
            store.pipe_file(f"/bucket/other/{file.name}", file.read_bytes())
        folder = tmp_path / "copies"
        one = CacheReader(url, local_folder=folder)
        two = CacheReader("memory://bucket/other", local_folder=folder)
        for index in (0, 20):
            assert_rows(one[index], samples[index], 0.005)
            assert_rows(two[index], others[index], 0.005)


def test_file_urls_are_read_in_place(path, samples):
    assert_rows(CacheReader(f"file://{path}")[3], samples[3], 0.005)


def test_manifest_is_canonical_text(path):
    reader = CacheReader(path)
    assert (path / "manifest.json").read_text() == canonical_json(reader.manifest)
    assert (path / "manifest.backup.json").read_text() == canonical_json(reader.manifest)

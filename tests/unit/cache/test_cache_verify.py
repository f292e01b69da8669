"""Every damaged byte is found and named, and only what is broken is captured again."""

import errno
import os
import random
import shutil
import types

import fsspec
import pytest
from cache_samples import make_samples, write_cache

from megatron_kd import cli
from megatron_kd.cache import CacheError, CacheReader, CacheSpec
from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.format import read_json
from megatron_kd.cache.storage import Directory
from megatron_kd.cache.verify import find_caches, repair_cache, verify_cache
from megatron_kd.cache.writer import ShardWriter

COUNT = 24


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("sound") / "train", make_samples(count=COUNT))


@pytest.fixture
def path(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "train")


def contents(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def flip(rng, path, files):
    file = path / rng.choice(files)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return {file.name}


def truncate(rng, path, files):
    file = path / rng.choice(files)
    os.truncate(file, rng.randrange(file.stat().st_size))
    return {file.name}


def remove(rng, path, files):
    file = path / rng.choice(files)
    file.unlink()
    return {file.name}


def duplicate(rng, path, files):
    source, target = rng.sample([file for file in files if file.startswith("shard")], 2)
    shutil.copyfile(path / source, path / target)
    return {target}


def swap(rng, path, files):
    one, other = rng.sample([file for file in files if file.startswith("shard")], 2)
    (path / one).rename(path / "held")
    (path / other).rename(path / one)
    (path / "held").rename(path / other)
    return {one, other}


def append(rng, path, files):
    file = path / rng.choice(files)
    with open(file, "ab") as stream:
        stream.write(bytes(rng.randrange(1, 9)))
    return {file.name}


def surplus(rng, path, files):
    shutil.copyfile(path / "shard-000000.safetensors", path / "shard-000099.safetensors")
    return {"shard-000099.safetensors"}


DAMAGES = (flip, flip, flip, truncate, remove, duplicate, swap, append, surplus)


def test_two_hundred_corruptions(sound, tmp_path):
    entries = {entry.file: entry for entry in CacheReader(sound).shards}
    files = sorted(file.name for file in sound.iterdir() if file.is_file())
    assert len(entries) > 8 and verify_cache(sound, decode=True) == []
    path = tmp_path / "train"
    for number in range(200):
        rng = random.Random(number)
        shutil.copytree(sound, path)
        damage = DAMAGES[number % len(DAMAGES)]
        broken = damage(rng, path, files)
        problems = verify_cache(path)
        assert {problem.file for problem in problems} == broken, (number, damage.__name__)
        for problem in problems:
            entry = entries.get(problem.file)
            if entry is not None:
                last = entry.first_sample + entry.samples - 1
                assert f"{entry.file} (samples {entry.first_sample} to {last})" in str(problem)
        shutil.rmtree(path)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (swap, "swapped or duplicated"),
        (duplicate, "swapped or duplicated"),
        (remove, "missing"),
        (append, "instead of"),
    ],
)
def test_says_what_happened(path, damage, sentence):
    damage(random.Random(1), path, [entry.file for entry in CacheReader(path).shards])
    for problem in verify_cache(path):
        assert sentence in str(problem)


def test_a_shard_of_another_cache(path, tmp_path):
    other = write_cache(tmp_path / "other", make_samples(count=COUNT), teacher="another")
    name = "shard-000002.safetensors"
    shutil.copyfile(other / name, path / name)
    (problem,) = verify_cache(path)
    assert problem.file == name and "belongs to another cache" in str(problem)


def test_decode_finds_what_checksums_cannot(path, monkeypatch):
    """A writer's fault is inside the checksum."""
    assert verify_cache(path, decode=True) == []
    monkeypatch.setattr(
        "megatron_kd.cache.codecs.compact.low_bits", lambda counts, vocab_size: counts * 0 + 30
    )
    problems = verify_cache(path, decode=True)
    assert len(problems) == len(CacheReader(path).shards)


@pytest.fixture
def capture(monkeypatch):
    """Stands in for the capture command: makes the shards it is asked for from the same samples."""
    made = []

    def resume(path, shards=None):
        samples = make_samples(count=COUNT)
        if (path / "manifest.json").exists():
            entries = CacheReader(path).shards
            CacheDirectory(path).reopen(without=shards)
        else:
            entries = plan_of(path)
            shards = sorted(
                {entry.shard for entry in entries} - set(CacheDirectory(path).finished())
            )
        spec = CacheSpec.from_dict(read_json(path / "spec.json"))
        for shard in shards:
            writer = ShardWriter(path, spec, shard, entries[shard].first_sample)
            for number in range(entries[shard].samples):
                writer.append(*samples[entries[shard].first_sample + number])
            writer.publish()
            made.append(shard)
        return CacheDirectory(path).publish_manifest(samples=COUNT)

    known = {}

    def plan_of(path):
        return known[path.name]

    monkeypatch.setitem(cli.HANDED, "verify", {"recapture": resume})
    return types.SimpleNamespace(made=made, known=known)


def test_repair_captures_only_what_is_broken(path, sound, capture, capsys):
    rng = random.Random(3)
    broken = {1, 4}
    for shard in broken:
        flip(rng, path, [f"shard-{shard:06d}.safetensors"])
    (path / "shard-000002.safetensors").unlink()
    assert cli.main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert all(f"shard-{shard:06d}.safetensors (samples " in out for shard in (1, 2, 4))
    assert cli.main(["verify", str(path), "--repair"]) == 0
    assert capture.made == [1, 2, 4]
    assert contents(path) == contents(sound)
    assert "sound" in capsys.readouterr().out


def test_repair_without_a_teacher_says_what_to_use(path):
    """From Python, nothing captures again unless it is handed over; the cache stays to be seen."""
    (path / "shard-000002.safetensors").unlink()
    problems = verify_cache(path)
    with pytest.raises(CacheError, match="shards 2 can only be .*megatron-kd verify --repair"):
        repair_cache(path, problems)
    assert verify_cache(path) == problems
    asked = []
    with pytest.raises(KeyError, match="fingerprint"):
        repair_cache(path, problems, lambda folder, shards: asked.append((folder, shards)) or {})
    assert asked == [(path, [2])]


def test_repair_restores_manifest_and_description(path, sound, capture):
    for name in ("manifest.json", "spec.json"):
        flip(random.Random(5), path, [name])
    assert cli.main(["verify", str(path)]) == 1
    assert cli.main(["verify", str(path), "--repair"]) == 0
    assert contents(path) == contents(sound) and capture.made == []
    (path / "manifest.backup.json").unlink()
    (path / "manifest.backup.json").write_text("{}")
    assert cli.main(["verify", str(path), "--repair"]) == 0
    assert contents(path) == contents(sound)


def test_repair_finishes_an_interrupted_repair(path, sound, capture):
    capture.known["train"] = CacheReader(path).shards
    file = path / "shard-000003.safetensors"
    file.rename(path / "shard-000003.safetensors.broken")
    CacheDirectory(path).reopen(without=[3])
    assert cli.main(["verify", str(path)]) == 1
    assert cli.main(["verify", str(path), "--repair"]) == 0
    assert contents(path) == contents(sound) and capture.made == [3]


def test_a_surplus_shard_is_set_aside(path, capture):
    surplus(None, path, None)
    assert cli.main(["verify", str(path), "--repair"]) == 0
    assert (path / "shard-000099.safetensors.broken").exists() and capture.made == []


def test_both_manifests_lost(path, capture, capsys):
    for name in ("manifest.json", "manifest.backup.json"):
        (path / name).write_text("{}")
    assert cli.main(["verify", str(path), "--repair"]) == 1
    assert "both lost" in capsys.readouterr().err


def test_a_capture_with_splits(sound, tmp_path, capsys):
    for split in ("train", "validation"):
        shutil.copytree(sound, tmp_path / "capture" / split)
    assert [cache.name for cache in find_caches(tmp_path / "capture")] == ["train", "validation"]
    assert cli.main(["verify", str(tmp_path / "capture"), "--decode"]) == 0
    assert capsys.readouterr().out.count("sound") == 2
    remove(random.Random(0), tmp_path / "capture" / "validation", ["shard-000001.safetensors"])
    assert cli.main(["verify", str(tmp_path / "capture")]) == 1
    assert cli.main(["verify", str(tmp_path / "nothing")]) == 1
    assert "no cache" in capsys.readouterr().err


def test_a_url(sound, tmp_path, capsys):
    """Object storage: every byte is checked without copying shards here."""
    store = fsspec.filesystem("memory")
    for file in sound.iterdir():
        if file.is_file():
            for split in ("train", "validation"):
                store.pipe_file(f"/bucket/capture/{split}/{file.name}", file.read_bytes())
    try:
        assert cli.main(["verify", "memory://bucket/capture", "--decode"]) == 0
        assert capsys.readouterr().out.count("sound") == 2
        broken = "/bucket/capture/validation/shard-000001.safetensors"
        content = bytearray(store.cat_file(broken))
        content[len(content) // 2] ^= 1
        store.pipe_file(broken, bytes(content))
        store.rm("/bucket/capture/validation/shard-000002.safetensors")
        store.pipe_file("/bucket/capture/validation/shard-000099.safetensors", b"")
        assert cli.main(["verify", "memory://bucket/capture"]) == 1
        out = capsys.readouterr().out
        assert out.count("sound") == 1 and "shard-000001.safetensors (samples" in out
        assert "shard-000002.safetensors (samples" in out and "missing" in out
        assert "shard-000099.safetensors: not in the manifest" in out
        assert cli.main(["verify", "memory://bucket/capture", "--repair"]) == 1
        assert "local directory" in capsys.readouterr().err
        assert cli.main(["verify", "memory://bucket/nothing"]) == 1
        assert "no cache" in capsys.readouterr().err
    finally:
        store.rm("/bucket", recursive=True)


def test_a_file_the_disk_cannot_read_is_one_problem_among_others(path, monkeypatch):
    plain = Directory.open

    def failing(storage, name):
        if name == "shard-000001.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return plain(storage, name)

    monkeypatch.setattr(Directory, "open", failing)
    (path / "shard-000003.safetensors").unlink()
    os.truncate(path / "manifest.backup.json", 1 << 30)  # sparse; too large to read
    problems = verify_cache(path)
    assert [problem.file for problem in problems] == [
        "manifest.backup.json",
        "shard-000001.safetensors",
        "shard-000003.safetensors",
    ]
    assert "cannot be read" in str(problems[1]) and problems[1].entry.shard == 1


def test_an_unfinished_cache(path, capsys):
    CacheDirectory(path).reopen(without=[0])
    assert cli.main(["verify", str(path)]) == 1
    assert "unfinished" in capsys.readouterr().out

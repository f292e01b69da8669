import json
import mmap
import multiprocessing
import pickle
import shutil

import numpy as np
import pytest
import safetensors.numpy

from megatron_kd.data.sequence_format import SequencesError
from megatron_kd.data.sequences import SequenceReader, SequenceWriter
from megatron_kd.files import sha256_json

DESCRIPTION = dict(split="train", seq_length=31, packing="block", vocab_size=200, tokenizer="t")


def sample(seed):
    random = np.random.default_rng(seed)
    n = int(random.integers(2, 33))
    mask = random.random(n) < 0.7
    mask[-1] = False
    inner = np.flatnonzero(random.random(n - 1) < 0.1) + 1
    return (
        random.integers(0, 200, n).astype(np.int32),
        mask,
        np.array([0, *inner, n], np.int32),
    )


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "train"
    path.mkdir()
    writer = SequenceWriter(path, shard_tokens=100)
    for seed in range(40):
        writer.append(*sample(seed))
    writer.close(**DESCRIPTION)
    return path


def assert_all_there(reader):
    for index in [*range(40), -1, 0]:
        tokens, mask, bounds = sample(index % 40)
        got = reader[index]
        assert got.tokens.dtype == np.int32 and np.array_equal(got.tokens, tokens)
        assert got.loss_mask.dtype == bool and np.array_equal(got.loss_mask, mask)
        assert got.cu_seqlens.dtype == np.int32 and np.array_equal(got.cu_seqlens, bounds)


def read_in_process(path, queue):
    try:
        assert_all_there(path if isinstance(path, SequenceReader) else SequenceReader(path))
        queue.put("ok")
    except BaseException as error:
        queue.put(repr(error))


def test_round_trip(folder):
    assert len(list(folder.glob("*.safetensors"))) > 3
    reader = SequenceReader(folder)
    assert len(reader) == 40 == reader.manifest["samples"]
    assert_all_there(reader)
    assert reader.manifest["tokens"] == sum(len(sample(i)[0]) for i in range(40))
    assert reader.manifest["supervised_tokens"] == sum(sample(i)[1].sum() for i in range(40))
    assert_all_there(pickle.loads(pickle.dumps(reader)))
    with pytest.raises(IndexError):
        reader[40]
    with pytest.raises(IndexError):
        reader[-41]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_a_reader(folder, method):
    reader = SequenceReader(folder)
    assert_all_there(reader)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    workers = [context.Process(target=read_in_process, args=(reader, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=120) for _ in workers] == ["ok", "ok"]
    for worker in workers:
        worker.join(timeout=60)


def test_reading_does_not_copy_the_shard(folder):
    reader = SequenceReader(folder)
    base = reader[0].tokens
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)


@pytest.mark.parametrize("seed", range(60))
def test_any_flipped_bit_is_found(folder, seed):
    random = np.random.default_rng(seed)
    files = sorted(folder.iterdir())
    file = files[int(random.integers(len(files)))]
    content = bytearray(file.read_bytes())
    content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
    file.write_bytes(content)
    with pytest.raises(SequencesError):
        reader = SequenceReader(folder)
        list(reader)


@pytest.mark.parametrize("damage", ["truncate", "extend", "remove", "swap"])
def test_damaged_shards_are_named(folder, damage):
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    if damage == "truncate":
        first.write_bytes(first.read_bytes()[:-1])
    elif damage == "extend":
        first.write_bytes(first.read_bytes() + b"\0")
    elif damage == "remove":
        first.unlink()
    else:
        shutil.copy(first, folder / "kept")
        second.replace(first)
        (folder / "kept").replace(second)
    with pytest.raises(SequencesError, match="sequences-00000"):
        list(SequenceReader(folder))
    with pytest.raises(SequencesError, match="sequences-00000"):
        SequenceReader(folder, check_checksums=False).check()


def rewrite(folder, change, *, rebind=True):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if rebind:
        del manifest["fingerprint"]
        manifest["fingerprint"] = sha256_json(manifest)
    path.write_text(json.dumps(manifest))


def set_shard(key, value):
    return lambda manifest: manifest["shards"][0].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=2), "version 2"),
        (lambda m: m.update(format="other"), "not a manifest"),
        (lambda m: m.update(samples=41), "do not add up"),
        (lambda m: m.update(packing="tight"), "packing"),
        (lambda m: m.update(seq_length="31"), "seq_length"),
        (lambda m: m.update(shards={}), "shards"),
        (lambda m: m.pop("tokenizer"), "tokenizer"),
        (set_shard("file", "../other/sequences-000000.safetensors"), "must be sequences-000000"),
        (set_shard("file", "/etc/passwd"), "must be sequences-000000"),
        (set_shard("samples", True), "samples must be"),
        (set_shard("samples", 0), "hold something"),
        (set_shard("bytes", 1 << 80), "bytes"),
        (set_shard("xxh3_128", "zz"), "hexadecimal"),
        (lambda m: m["shards"][0].update(more=1), "must have the keys"),
    ],
)
def test_hostile_manifests_are_refused(folder, change, words):
    rewrite(folder, change)
    with pytest.raises(SequencesError, match=words):
        list(SequenceReader(folder))


def test_a_changed_manifest_is_noticed(folder):
    rewrite(folder, lambda m: m.update(packing="naive"), rebind=False)
    with pytest.raises(SequencesError, match="changed after"):
        SequenceReader(folder)


def forge_header(folder, change):
    """Changes a shard's header and makes size and checksum bookkeeping agree with it."""
    path = folder / "sequences-000000.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    rewrite(folder, set_shard("bytes", path.stat().st_size))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["tokens"].update(data_offsets=[0, 1 << 61]),
        lambda h: h["tokens"].update(shape=[1 << 60]),
        lambda h: h["tokens"].update(dtype="F32"),
        lambda h: h["tokens"].update(data_offsets=[-4, 0]),
        lambda h: h["tokens"].update(shape=[1, 2]),
        lambda h: h["loss_mask"].update(h["document_bounds"], dtype="U8"),
        lambda h: h.pop("bound_offsets"),
        lambda h: h.update(extra=h["tokens"]),
        lambda h: h.update(tokens=3),
    ],
)
def test_hostile_headers_are_refused(folder, change):
    forge_header(folder, change)
    with pytest.raises(SequencesError, match="sequences-000000"):
        SequenceReader(folder, check_checksums=False)[0]


def test_an_absurd_header_length_is_refused(folder):
    path = folder / "sequences-000000.safetensors"
    content = path.read_bytes()
    path.write_bytes((1 << 50).to_bytes(8, "little") + content[8:])
    with pytest.raises(SequencesError, match="header of"):
        SequenceReader(folder, check_checksums=False)[0]


def test_offsets_that_lead_elsewhere_are_refused(folder):
    path = folder / "sequences-000000.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, value in [("token_offsets", 1 << 40), ("bound_offsets", -3), ("document_bounds", 7)]:
        at = 8 + length + header[name]["data_offsets"][0]
        size = 4 if header[name]["dtype"] == "I32" else 8
        forged = value.to_bytes(size, "little", signed=True)
        path.write_bytes(content[:at] + forged + content[at + size :])
        with pytest.raises(SequencesError, match="must rise"):
            SequenceReader(folder, check_checksums=False)[0]


def test_bounds_that_fall_within_a_sequence_are_refused(folder):
    """First and last bound of the sequence are right; only the order between them is not."""
    path = folder / "sequences-000000.safetensors"
    tensors = safetensors.numpy.load_file(path)
    bounds, offsets = tensors["document_bounds"], tensors["bound_offsets"]
    begin, end = offsets[(sequence := int(np.argmax(np.diff(offsets)))) : sequence + 2]
    assert end - begin >= 4  # two bounds between the first and the last
    bounds[[begin + 1, begin + 2]] = bounds[[begin + 2, begin + 1]]
    safetensors.numpy.save_file(tensors, path)
    rewrite(folder, set_shard("bytes", path.stat().st_size))
    with pytest.raises(SequencesError, match="document bounds must rise"):
        SequenceReader(folder, check_checksums=False)[0]


def test_a_pickled_reader_carries_no_mapped_bytes(folder):
    reader = SequenceReader(folder)
    fresh = len(pickle.dumps(reader))
    assert_all_there(reader)
    assert len(pickle.dumps(reader)) == fresh
    assert_all_there(pickle.loads(pickle.dumps(reader)))


def test_no_manifest_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="megatron-kd prepare"):
        SequenceReader(tmp_path)

"""Files made to harm: refused with a clear sentence, and before anything is allocated."""

import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from cache_samples import make_sample, make_samples, write_cache

from megatron_kd.cache import CacheError, CacheReader, CacheSpec, CacheWriter
from megatron_kd.cache.codecs import RowEntries
from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.format import seal
from megatron_kd.cache.sample import Sample
from megatron_kd.cache.writer import ShardWriter
from megatron_kd.files import SAFETENSORS_DTYPES, canonical_json, file_checksum, sha256_json


@pytest.fixture
def path(tmp_path):
    return write_cache(tmp_path / "cache", make_samples(count=8), vocab_size=1000)


def forge_manifest(path, change):
    """A manifest with a change and correct hashes: what an attacker would write."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    bound = {k: v for k, v in manifest.items() if k not in ("fingerprint", "origin", "checksum")}
    manifest["fingerprint"] = sha256_json(bound)
    (path / "manifest.json").write_text(canonical_json(seal(manifest)))


class WholeFile(bytes):
    """The bytes of a shard's file, header and all."""


def forge_shard(path, change, shard=0):
    """Changes a shard's header and makes the manifest agree with the new bytes."""
    file = path / f"shard-{shard:06d}.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    result = change(header, data)  # None, other data, or a whole file
    if isinstance(result, WholeFile):
        file.write_bytes(result)
    else:
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + (result or data))
    adopt(path, file, shard)


def adopt(path, file, shard=0):
    def entry(manifest):
        manifest["shards"][shard]["bytes"] = file.stat().st_size
        manifest["shards"][shard]["xxh3_128"] = file_checksum(file)

    forge_manifest(path, entry)


def set_in(*keys):
    *way, last, value = keys

    def change(manifest):
        for key in way:
            manifest = manifest[key]
        manifest[last] = value

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (set_in("shards", 0, "file", "../../../etc/passwd"), "must be shard-000000"),
        (set_in("shards", 0, "file", "/etc/passwd"), "must be shard-000000"),
        (set_in("shards", 1, "file", "shard-000000.safetensors"), "must be shard-000001"),
        (set_in("shards", 0, "shard", 1), "must be shard-000001"),
        (set_in("shards", 0, "shard", -1), "shard must be a count"),
        (set_in("shards", 0, "samples", 1 << 62), "samples must be a count"),
        (set_in("shards", 0, "samples", 1.5), "samples must be a count"),
        (set_in("shards", 0, "samples", True), "samples must be a count"),
        (set_in("shards", 0, "samples", 0), "must start at sample 0"),
        (set_in("shards", 1, "first_sample", 1), "must start at sample"),
        (set_in("shards", 0, "xxh3_128", "z" * 32), "hexadecimal"),
        (set_in("shards", 0, "extra", 1), "exactly the keys"),
        (set_in("shards", 0, "positions", 1), "positions is"),
        (set_in("shards", {}), "keys are missing"),
        (set_in("shards", [[]]), "exactly the keys"),
        (set_in("samples", 7), "samples is 7"),
        (set_in("version", 3), "format version 3; this reader knows 1 and 2"),
        (set_in("version", 2), "as it describes has version 1, not 2"),
        (set_in("version", "1"), "format version '1'"),
        (set_in("format", "another cache"), "is not the manifest of"),
        (set_in("vocab_size", 1 << 40), "vocab_size must lie between"),
        (set_in("vocab_size", -1), "vocab_size must lie between"),
        (set_in("vocab_size", "1000"), "vocab_size must be an integer"),
        (set_in("topk", 1 << 40), "topk must lie between"),
        (set_in("codec", "pickle"), "codec must be one of"),
        (set_in("hidden_size", 1 << 50), "hidden_size must lie"),
        (set_in("temperatures", [1e400]), "JSON"),
        (set_in("temperatures", "hot"), "wrong type|JSON|could not"),
        (set_in("temperatures", 3), "wrong type"),
        (set_in("sampling", 3), "wrong type"),
        (set_in("colour", "red"), "unknown \\['colour'\\]"),
    ],
)
def test_manifests(path, change, message):
    try:
        forge_manifest(path, change)
    except ValueError:  # infinity has no canonical JSON; written as an attacker would
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(
            text.replace('"temperatures":[]', '"temperatures":[1e999]')
        )
        message = "changed|JSON"
    with pytest.raises(CacheError, match=message):
        CacheReader(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", "{}", '{"format": NaN}', "[" * 100_000, "\xff\xfe", "1" * 5000]
)
def test_manifests_that_are_none(path, text):
    (path / "manifest.json").write_text(text)
    with pytest.raises(CacheError):
        CacheReader(path)


SAME_VALUES = (lambda t: t + "\n", lambda t: t.replace("\\u00e9", "\\u00E9"))


@pytest.mark.parametrize("change", SAME_VALUES)
def test_manifests_with_the_same_values_in_another_text(tmp_path, change):
    """A flipped bit can leave the value as it is; the text is not the one that was written."""
    path = write_cache(tmp_path / "cache", make_samples(count=2), teacher="caf\u00e9")
    text = (path / "manifest.json").read_text()
    assert change(text) != text and json.loads(change(text)) == json.loads(text)
    (path / "manifest.json").write_text(change(text))
    with pytest.raises(CacheError, match="changed after it was written"):
        CacheReader(path)


def test_a_manifest_too_large_to_read(path):
    os.truncate(path / "manifest.json", (1 << 28) + 1)
    with pytest.raises(CacheError, match="at most"):
        CacheReader(path)


@pytest.mark.parametrize("missing", ["topk", "teacher", "shards", "fingerprint", "origin"])
def test_manifests_with_a_key_missing(path, missing):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[missing]
    (path / "manifest.json").write_text(canonical_json(seal(manifest)))
    with pytest.raises(CacheError, match="missing|changed"):
        CacheReader(path)


def header_length(length):
    return lambda header, data: WholeFile(length.to_bytes(8, "little") + b"{}" + data)


def offsets(name, begin, end):
    def change(header, data):
        size = header[name]["data_offsets"]
        header[name]["data_offsets"] = [size[0] + begin, size[1] + end]

    return change


def field(name, key, value):
    return lambda header, data: header[name].update({key: value})


def metadata(**changes):
    def change(header, data):
        head = json.loads(header["__metadata__"]["megatron_kd"]) | changes
        header["__metadata__"]["megatron_kd"] = json.dumps(head)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (header_length(1 << 60), "not a whole safetensors file"),
        (header_length((1 << 64) - 1), "not a whole safetensors file"),
        (header_length(1 << 21), "not a whole safetensors file"),
        (header_length(0), "not a whole safetensors file"),
        (lambda h, d: WholeFile(b"\x02\0\0"), "not a whole safetensors file"),
        (lambda h, d: WholeFile(), "not a whole safetensors file"),
        (header_length(2), "header cannot be read"),
        (
            lambda h, d: WholeFile((4).to_bytes(8, "little") + b"\xff\xff\xff\xff" + d),
            "header cannot be read",
        ),
        (lambda h, d: h.pop("__metadata__") and None, "header cannot be read"),
        (lambda h, d: h.pop("mass") and None, "tensors are not those.*'mass'"),
        (lambda h, d: h.update(evil=h["mass"]), "tensors are not those.*'evil'"),
        (field("mass", "dtype", "F64"), "mass must be F16"),
        (field("mass", "dtype", "F32"), "mass must be F16"),
        (field("stream", "shape", [1 << 61]), "does not fit its place"),
        (field("stream", "shape", [-1]), "must be U8"),
        (field("stream", "shape", [1, 2]), "must be U8"),
        (field("stream", "shape", "big"), "malformed|must be U8"),
        (field("mass", "shape", [1 << 40]), "tensor"),
        (field("token_hash", "shape", [1 << 40]), "token_hash must be"),
        (field("mass", "data_offsets", [0]), "malformed"),
        (field("mass", "data_offsets", ["a", "b"]), "must be F16"),
        (offsets("stream", 0, 1 << 50), "does not fit"),
        (offsets("stream", -1, -1), "overlap|does not fit"),
        (lambda h, d: d + b"more", "belong to no tensor"),
        (lambda h, d: d[:-8], "does not fit"),
        (metadata(samples=1 << 61), "tensor .* must be"),
        (metadata(samples=-1), "must be counts"),
        (metadata(shard=5), "is shard 5"),
        (metadata(first_sample=3), "samples from 3"),
        (metadata(version=9), "format version 9"),
        (metadata(spec="0" * 64), "belongs to another cache"),
        (metadata(format="x"), "not a shard"),
    ],
)
def test_shard_headers(path, change, message):
    forge_shard(path, change)
    with pytest.raises(CacheError, match=message):
        CacheReader(path, check_checksums=False)[0]


def edit_tensor(name, edit):
    def change(header, data):
        begin, end = header[name]["data_offsets"]
        values = np.frombuffer(data[begin:end], SAFETENSORS_DTYPES[header[name]["dtype"]]).copy()
        edit(values)
        return data[:begin] + values.tobytes() + data[end:]

    return change


def assign(where, value):
    def edit(values):
        values[where] = value

    return edit


@pytest.mark.parametrize(
    "name", ["token_offsets", "row_offsets", "document_offsets", "stream_offsets"]
)
@pytest.mark.parametrize("where, value", [(0, 1), (-1, 1 << 63), (1, 1 << 40), (-1, 0)])
def test_offsets_out_of_range(path, name, where, value):
    forge_shard(path, edit_tensor(name, assign(where, value)))
    with pytest.raises(CacheError, match=f"{name} does not rise"):
        CacheReader(path)[0]


@pytest.mark.parametrize(
    "name, where, value",
    [
        ("high_bytes", 0, 0xFFFFFFFF),
        ("layout", 0, 0x1F),
        ("layout", slice(None), 16),
        ("bottom", slice(None), 0),
        ("stream", slice(None), 0),
        ("stream", slice(None), 255),
    ],
)
def test_rows_that_cannot_be(path, name, where, value):
    forge_shard(path, edit_tensor(name, assign(where, value)))
    with pytest.raises(CacheError, match="sample 0 cannot be decoded"):
        CacheReader(path)[0]


@pytest.mark.parametrize("codec", ["compact", "fp16"])
@pytest.mark.parametrize(
    "name, where, value",
    [
        ("mass", 0, np.nan),
        ("mass", 1, np.inf),
        ("mass", 2, -3.0),
        ("cu_seqlens", 0, 1),
        ("cu_seqlens", 1, 1 << 30),
        ("cu_seqlens", 1, -1),
        ("log_z.0", 3, np.nan),
        ("loss_mask", slice(None), 255),
    ],
)
def test_what_would_poison_a_training_step(tmp_path, codec, name, where, value):
    """Checksums and all are right: only a writer at fault, or at war, makes such files."""
    description = dict(codec=codec, temperatures=(2.0,))
    rng = np.random.default_rng(0)
    path = tmp_path / "c"
    settings = dict(vocab_size=1000, topk=8, teacher="t", tokenizer="t")
    with CacheWriter(path, CacheSpec(**settings, **description)) as writer:
        for _ in range(3):
            sample = make_sample(rng, 24, 1000, 8)
            writer.append(*sample, log_z={2.0: rng.normal(size=24)})
    forge_shard(path, edit_tensor(name, assign(where, value)))
    with pytest.raises(CacheError, match="sample 0"):
        CacheReader(path)[0]


@pytest.mark.parametrize("half", [0x0001, 0x3C00, 0x7C00, 0x7E00, 0xFC00, 0xFE00])
def test_halves_that_are_no_log_probabilities(tmp_path, half):
    path = write_cache(tmp_path / "c", make_samples(count=2), codec="fp16")
    forge_shard(path, edit_tensor("logprobs", assign(5, np.uint16(half).view(np.float16))))
    with pytest.raises(CacheError, match="positive or no number"):
        CacheReader(path)[0]


@pytest.mark.parametrize("codec", ["compact", "fp16"])
@pytest.mark.parametrize("count", [0, 9, 0xFFFFFFFF])
def test_counts_beyond_k(tmp_path, codec, count):
    samples = make_samples(count=2)
    for _, _, ids, logprobs in samples:
        ids[:, 5:], logprobs[:, 5:] = -1, -np.inf
    path = write_cache(tmp_path / "c", samples, codec=codec)
    forge_shard(path, edit_tensor("counts", assign(0, count)))
    with pytest.raises(CacheError, match="counts beyond 1 to 8"):
        CacheReader(path)[0]


def test_ids_beyond_the_vocabulary(tmp_path):
    path = write_cache(tmp_path / "c", make_samples(count=2), codec="fp16")
    forge_shard(path, edit_tensor("ids", assign(0, 1000)))
    with pytest.raises(CacheError, match="id is out of range"):
        CacheReader(path)[0]


def test_a_link_is_not_followed_by_name(path, tmp_path):
    """A name in the manifest cannot leave the directory, whatever the listing says."""
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((path / "shard-000000.safetensors").read_bytes())
    forge_manifest(path, set_in("shards", 0, "file", "../outside.safetensors"))
    with pytest.raises(CacheError, match="must be shard-000000"):
        CacheReader(path)


SMALL_MEMORY = """
import resource, sys
from megatron_kd.cache import CacheError, CacheReader
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
try:
    CacheReader(sys.argv[1], check_checksums=False)[0]
except CacheError as error:
    print("refused:", error)
"""


def read_in_little_memory(path):
    """What a process says that may allocate 4 GiB beyond what it begins with."""
    pages = int(open("/proc/self/statm").read().split()[0])
    limit_bytes = pages * resource.getpagesize() + (4 << 30)
    return subprocess.run(
        [sys.executable, "-c", SMALL_MEMORY, str(path), str(limit_bytes)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("codec", ["compact", "fp16"])
def test_a_huge_k_over_many_rows_is_refused_before_allocation(tmp_path, codec):
    """Some 20 KB that claim 2000 rows of 2^20 slots, of which one is used."""
    rows = 2000
    description = dict(vocab_size=1 << 20, topk=1 << 20, teacher="t", tokenizer="t", codec=codec)
    spec = CacheSpec(**description)
    path = CacheDirectory.begin(tmp_path / "cache", spec).folder
    writer = ShardWriter(path, spec, 0, 0)
    sample = Sample(
        tokens=np.zeros(rows + 1, np.int32),
        loss_mask=np.arange(rows + 1) < rows,
        cu_seqlens=np.array([0, rows + 1], np.int32),
        rows=RowEntries(
            counts=np.ones(rows, np.int64),
            ids=np.zeros(rows, np.int64),
            logprobs=np.zeros(rows),
            mass=np.ones(rows),
        ),
        log_z=[],
        hidden=None,
    )
    writer._buffer.add(sample)
    writer.publish()
    CacheDirectory(path).publish_manifest(samples=1)
    out = read_in_little_memory(path)
    assert out.stdout.startswith("refused:") and "slots" in out.stdout, out.stderr[-2000:]


@pytest.mark.parametrize(
    "change",
    [
        header_length(1 << 60),
        metadata(samples=1 << 40),
        field("stream", "shape", [1 << 45]),
        edit_tensor("row_offsets", assign(-1, 1 << 45)),
    ],
)
def test_refused_before_allocation(path, change):
    """In a process that cannot allocate what the file announces."""
    forge_shard(path, change)
    out = read_in_little_memory(path)
    assert out.stdout.startswith("refused:"), out.stderr[-2000:]

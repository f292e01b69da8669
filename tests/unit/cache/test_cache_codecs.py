"""A codec from outside the package: writing, reading, verifying, inspecting and planning take it
from `CODECS` alone, and fall back on no other."""

import json

import numpy as np
import pytest
from cache_samples import assert_rows, make_samples, write_cache

from megatron_kd import cli
from megatron_kd.cache import CacheError, CacheReader
from megatron_kd.cache.codecs import CODECS, Codec
from megatron_kd.cache.statistics import cache_statistics
from megatron_kd.cache.verify import verify_cache


class Plain(Codec):
    """Ids and log-probabilities in 32 bits each, with a marker that no other codec has."""

    groups = {"mass": "mass", "entries": "the plain codec's entries", "marker": "markers"}
    pointers = {"entry_bounds": "entries"}

    def tensors(self, spec):
        return {
            "mass": ("F32", ("R",)),
            "entries": ("U32", ("entries", 2)),
            "marker": ("U8", ("S",)),
        }

    def encode(self, rows, spec):
        values = rows.logprobs.astype("<f4").view("<u4")
        return {
            "mass": rows.mass.astype("<f4"),
            "entries": np.stack([rows.ids.astype("<u4"), values], axis=1),
            "marker": np.array([77], np.uint8),
        }

    def decode(self, parts, counts, spec):
        if parts["marker"].tolist() != [77]:
            raise ValueError("the marker is gone")
        mass = parts["mass"].astype(np.float32)
        counts = np.full(mass.size, spec.topk) if counts is None else counts
        ids = np.full((mass.size, spec.topk), -1, np.int32)
        logprobs = np.full((mass.size, spec.topk), -np.inf, np.float32)
        slots = np.arange(spec.topk) < counts[:, None]
        ids[slots] = parts["entries"][:, 0]
        logprobs[slots] = parts["entries"][:, 1].copy().view("<f4")
        order = np.argsort(-logprobs, axis=1, kind="stable")
        return np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1), mass

    def bytes_per_position(self, vocab_size, topk):
        return 8 * topk + 4


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setitem(CODECS, "plain", Plain())


@pytest.fixture
def samples():
    samples = make_samples(count=9)
    for number, (_, mask, ids, logprobs) in enumerate(samples):
        if number % 2:  # rows with fewer candidates
            ids[:, 5:], logprobs[:, 5:] = -1, -np.inf
        if number == 4:  # a sample without rows
            mask[:] = False
    return samples


def test_written_and_read_to_the_last_bit(tmp_path, plain, samples):
    reader = CacheReader(write_cache(tmp_path / "c", samples, codec="plain"))
    assert len(reader.shards) > 2
    for index, sample in enumerate(samples):
        assert_rows(reader[index], sample, 0.0)


def test_verified_down_to_the_codec(tmp_path, plain, samples, monkeypatch):
    path = write_cache(tmp_path / "c", samples, codec="plain")
    assert verify_cache(path, decode=True) == []
    monkeypatch.setattr(CODECS["plain"], "decode", lambda *_: (_ for _ in ()).throw(ValueError()))
    assert len(verify_cache(path, decode=True)) == len(CacheReader(path).shards)
    monkeypatch.delitem(CODECS, "plain")
    with pytest.raises(CacheError, match="codec must be one of compact, fp16, got 'plain'"):
        CacheReader(path)


def test_a_sample_it_refuses_is_named(tmp_path, plain, samples, monkeypatch):
    encode = CODECS["plain"].encode
    other = {"marker": np.array([3], np.uint8)}
    monkeypatch.setattr(CODECS["plain"], "encode", lambda *given: encode(*given) | other)
    path = write_cache(tmp_path / "c", samples, codec="plain")
    with pytest.raises(CacheError, match="sample 0 cannot be decoded .the marker is gone"):
        CacheReader(path)[0]


def test_its_offsets_are_checked(tmp_path, plain, samples, monkeypatch):
    """They belong to the format, whatever the codec calls them."""
    path = write_cache(tmp_path / "c", samples, codec="plain")
    monkeypatch.setattr(Plain, "pointers", {"entry_offsets": "entries"})
    with pytest.raises(CacheError, match="differing: .'entry_bounds', 'entry_offsets'"):
        CacheReader(path)[0]
    monkeypatch.undo()
    monkeypatch.setitem(CODECS, "plain", Plain())
    bounds = {"S": np.array([0, 1])}
    monkeypatch.setattr(Plain, "bounds", lambda self, offsets: bounds)
    with pytest.raises(CacheError, match="token_hash, marker does not fit"):
        CacheReader(path)[0]


def test_inspected_by_its_own_groups(tmp_path, plain, samples, capsys):
    path = write_cache(tmp_path / "c", samples, codec="plain")
    reader = CacheReader(path)
    spent = cache_statistics(reader).bytes_per_position
    positions = reader.manifest["positions"]
    candidates = sum(int((sample[2][sample[1]] >= 0).sum()) for sample in samples)
    assert spent["the plain codec's entries"] == pytest.approx(8 * candidates / positions)
    assert spent["markers"] == pytest.approx(len(samples) / positions)
    assert sum(spent.values()) == pytest.approx(
        sum(entry.bytes for entry in reader.shards) / positions
    )
    assert cli.main(["inspect", str(path), "--samples", "1"]) == 0
    assert "bytes/position: the plain codec's entries" in capsys.readouterr().out


def test_planned_with(tmp_path, plain, capsys):
    student = tmp_path / "student"
    student.mkdir()
    config = dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        dtype="bfloat16",
    )
    (student / "config.json").write_text(json.dumps(config))
    recipe = tmp_path / "recipe.json"
    train = {"train_iters": 10, "global_batch_size": 8, "micro_batch_size": 2}
    content = {
        "output_dir": str(tmp_path / "run"),
        "student": {"hf_path": str(student)},
        "cache": {"path": str(tmp_path / "cache")},
        "bridge": {"model": {"seq_length": 256}, "train": train},
    }
    recipe.write_text(json.dumps(content))  # JSON is YAML
    for codec, each in (("plain", 8 * 100 + 4 + 2), ("fp16", 4 * 100 + 4 + 2)):
        assert cli.main(["plan", str(recipe), "--codec", codec]) == 0
        out = " ".join(capsys.readouterr().out.split())
        megabytes = 10 * 8 * 256 * each / 1e6
        assert f"{codec}) = {megabytes:.1f} MB" in out, out
    assert cli.main(["plan", str(recipe), "--codec", "plane"]) == 1
    assert "codec must be one of compact, fp16, plain, not plane" in capsys.readouterr().err

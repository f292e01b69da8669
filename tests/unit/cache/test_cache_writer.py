"""The writer refuses what is no truncated distribution, and dies without leaving half a cache."""

import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_samples import assert_rows, directory_bytes, make_sample, make_samples, write_cache

from megatron_kd.cache import CacheError, CacheReader, CacheSpec, CacheWriter
from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.writer import ShardWriter, plan_shards

SETTINGS = dict(vocab_size=1000, topk=4, teacher="t", tokenizer="k")


def good_sample():
    ids = np.array([[1, 2, 3, 4], [5, 6, -1, -1], [7, 8, 9, 10]])
    logprobs = np.log(np.array([[0.5, 0.2, 0.1, 0.1], [0.6, 0.3, 1, 1], [0.4, 0.3, 0.2, 0.05]]))
    logprobs[1, 2:] = -np.inf
    return np.array([3, 1, 2, 9]), np.array([1, 1, 1, 0]), ids, logprobs.astype(np.float32)


def broken(change):
    tokens, mask, ids, logprobs = good_sample()
    ids, logprobs = np.vstack([ids, ids[:1]]), np.vstack([logprobs, logprobs[:1]])
    return change(tokens.copy(), mask.copy(), ids.copy(), logprobs.copy())


def put(array, where, value):
    array[where] = value
    return array


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, m, i, p: (t, m, put(i, (0, 1), 1), p), "position 0: id 1 occurs twice"),
        (lambda t, m, i, p: (t, m, put(i, (2, 0), 1000), p), "position 2: id 1000 is outside"),
        (lambda t, m, i, p: (t, m, put(i, (2, 0), -2), p), "id -2 is outside"),
        (lambda t, m, i, p: (t, m, i, put(p, (0, 0), np.nan)), "position 0: nan is not a log"),
        (lambda t, m, i, p: (t, m, i, put(p, (0, 0), 0.01)), "is not a log-probability"),
        (lambda t, m, i, p: (t, m, i, put(p, (0, 0), np.inf)), "inf is not a log-probability"),
        (
            lambda t, m, i, p: (t, m, i, put(p, (0, 1), -0.5)),
            "position 0: probabilities sum to 1.3",
        ),
        (lambda t, m, i, p: (t, m, i, put(p, (1, 2), -3.0)), "unused slot"),
        (
            lambda t, m, i, p: (t, m, put(i, 1, -1), put(p, 1, -np.inf)),
            "position 1: supervised, but",
        ),
        (lambda t, m, i, p: (t, put(m, 3, 1), i, p), "last position is supervised"),
        (lambda t, m, i, p: (t, m[:3], i, p), "loss_mask must be"),
        (lambda t, m, i, p: (t, put(m, 0, 2), i, p), "of 0 and 1"),
        (lambda t, m, i, p: (t, m, i[:2], p), "topk_ids must be"),
        (lambda t, m, i, p: (t, m, i, p[:, :3]), "topk_logprobs must be"),
        (lambda t, m, i, p: (t, m, i.astype(np.float32), p), "topk_ids must be integers"),
        (lambda t, m, i, p: (t, m, i, i), "topk_logprobs must be floating"),
        (lambda t, m, i, p: (t * 1.0, m, i, p), "tokens must be integers"),
        (lambda t, m, i, p: (put(t, 0, 1000), m, i, p), "tokens must lie in"),
        (lambda t, m, i, p: (put(t, 0, -1), m, i, p), "tokens must lie in"),
        (lambda t, m, i, p: (t[None], m, i, p), "tokens must be \\[n\\]"),
    ],
)
def test_refuses_what_is_no_row(tmp_path, change, message):
    writer = CacheWriter(tmp_path / "c", CacheSpec(**SETTINGS))
    writer.append(*good_sample())
    with pytest.raises(CacheError, match=message) as caught:
        writer.append(*broken(change))
    assert "sample 1" in str(caught.value)
    writer.append(*good_sample())  # a refused sample leaves no trace
    writer.close()
    assert len(CacheReader(tmp_path / "c")) == 2


@pytest.mark.parametrize(
    "extra, message",
    [
        (dict(cu_seqlens=np.array([0, 2])), "cu_seqlens must rise"),
        (dict(cu_seqlens=np.array([0, 2, 2, 4])), "cu_seqlens must rise"),
        (dict(log_z={2.0: np.zeros(4)}), "log_z must come for the temperatures"),
        (dict(hidden=np.zeros((4, 8), np.float32)), "hidden_size 0, hidden states came"),
    ],
)
def test_refuses_wrong_extras(tmp_path, extra, message):
    writer = CacheWriter(tmp_path / "c", CacheSpec(**SETTINGS))
    with pytest.raises(CacheError, match=message):
        writer.append(*good_sample(), **extra)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(vocab_size=0), "vocab_size must lie"),
        (dict(vocab_size=(1 << 20) + 1), "vocab_size must lie"),
        (dict(vocab_size=10.5), "vocab_size must be an integer"),
        (dict(topk=0), "topk must lie"),
        (dict(topk=1001), "topk must lie"),
        (dict(codec="zip"), "codec must be one of"),
        (dict(sampling="nucleus"), "sampling must be"),
        (dict(temperatures=(2.0, 2.0)), "distinct"),
        (dict(temperatures=(0.0,)), "positive"),
        (dict(hidden_size=4, hidden_dtype="int8"), "hidden_dtype must be"),
        (dict(teacher=object()), "teacher must be a fingerprint"),
        (dict(teacher={"name": object()}), "plain JSON"),
        (dict(teacher=""), "teacher must be a fingerprint"),
        (dict(tokenizer=None), "tokenizer must be a fingerprint"),
    ],
)
def test_refuses_a_wrong_description(tmp_path, change, message):
    with pytest.raises(CacheError, match=message):
        CacheWriter(tmp_path / "c", CacheSpec(**(SETTINGS | change)))
    assert not (tmp_path / "c").exists()


def test_refuses_shards_without_positions(tmp_path):
    with pytest.raises(CacheError, match="shard_positions must be at least 1, got 0"):
        CacheWriter(tmp_path / "c", CacheSpec(**SETTINGS), shard_positions=0)
    assert not (tmp_path / "c").exists()


def test_a_sample_no_reader_would_take_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_kd.cache.sample.MAX_SAMPLE_SLOTS", 8 * 25)
    with pytest.raises(CacheError, match="26 tokens of 8 candidates"):
        write_cache(tmp_path / "c", [make_sample(np.random.default_rng(0), 26, 1000, 8)])


def test_rounding_above_zero_is_taken_as_zero(tmp_path):
    sample = (np.array([1, 2]), np.array([1, 0]), np.array([[5]]), np.array([[2e-7]], np.float32))
    write_cache(tmp_path / "c", [sample], topk=1)
    got = CacheReader(tmp_path / "c")[0]
    assert got.topk_logprobs[0, 0] == 0 and got.mass[0] == 1


def test_probability_zero_is_no_candidate(tmp_path):
    logprobs = np.array([[-0.5, -np.inf]], np.float32)
    sample = (np.array([1, 2]), np.array([1, 0]), np.array([[5, 6]]), logprobs)
    write_cache(tmp_path / "c", [sample], topk=2)
    assert CacheReader(tmp_path / "c")[0].topk_ids[0].tolist() == [5, -1]


def test_takes_torch_and_the_supervised_rows_alone(tmp_path):
    tokens, mask, ids, logprobs = make_sample(np.random.default_rng(0), 30, 1000, 8)
    full = write_cache(tmp_path / "full", [(tokens, mask, ids, logprobs)])
    tensors = [torch.from_numpy(x) for x in (tokens, mask, ids[mask], logprobs[mask])]
    alone = write_cache(tmp_path / "alone", [tensors])
    assert directory_bytes(full) == directory_bytes(alone)


def test_bfloat16_rows(tmp_path):
    tokens, mask, ids, logprobs = make_sample(np.random.default_rng(0), 30, 1000, 8)
    rounded = torch.from_numpy(logprobs).bfloat16()
    path = write_cache(tmp_path / "c", [(tokens, mask, ids, rounded)])
    assert_rows(CacheReader(path)[0], (tokens, mask, ids, rounded.float().numpy()), 0.005)


def test_a_fully_masked_sample(tmp_path):
    samples = make_samples(count=3)
    samples[1][1][:] = False
    path = write_cache(tmp_path / "c", samples)
    got = CacheReader(path)[1]
    assert not got.loss_mask.any() and (got.topk_ids == -1).all()


@pytest.mark.parametrize("codec", ["compact", "fp16"])
def test_everything_beside_the_rows(tmp_path, codec):
    rng = np.random.default_rng(1)
    extras, samples = [], make_samples(count=3)
    settings = dict(temperatures=(2.0, 0.5), hidden_size=5, codec=codec)
    for dtype, tolerance in (("float32", 0), ("float16", 1e-3), ("bfloat16", 8e-3)):
        path = tmp_path / dtype
        spec = CacheSpec(
            vocab_size=1000,
            topk=8,
            teacher={"name": "t"},
            tokenizer="k",
            hidden_dtype=dtype,
            licence="apache-2.0",
            **settings,
        )
        with CacheWriter(path, spec, shard_positions=50) as writer:
            extras.clear()
            for sample in samples:
                n = sample[0].size
                extras.append(
                    dict(
                        cu_seqlens=np.array([0, 4, n]),
                        log_z={2.0: rng.normal(size=n), 0.5: rng.normal(size=n)},
                        hidden=rng.normal(size=(n, 5)).astype(np.float32),
                    )
                )
                writer.append(*sample, **extras[-1])
        reader = CacheReader(path)
        assert reader.manifest["licence"] == "apache-2.0"
        for index, (sample, extra) in enumerate(zip(samples, extras, strict=True)):
            got, mask = reader[index], sample[1]
            assert_rows(got, sample, 0.008)
            np.testing.assert_array_equal(got.cu_seqlens, extra["cu_seqlens"])
            for tau in (2.0, 0.5):
                want = extra["log_z"][tau].astype(np.float32)
                np.testing.assert_array_equal(got.log_z[tau][mask], want[mask])
            np.testing.assert_allclose(got.hidden[mask], extra["hidden"][mask], rtol=tolerance)
            assert (got.hidden[~mask] == 0).all()


def test_random_sampling_targets(tmp_path):
    """Draws merged into counts: varying numbers of candidates, weights that sum to one."""
    rng = np.random.default_rng(2)
    draws, n = 32, 50
    ids = np.full((n, draws), -1)
    logprobs = np.full((n, draws), -np.inf)
    for row in range(n):
        distinct, counts = np.unique(rng.zipf(1.5, draws) % 1000, return_counts=True)
        ids[row, : distinct.size] = distinct
        logprobs[row, : distinct.size] = np.log(counts / draws)
    mask = np.arange(n) < n - 1
    sample = (rng.integers(0, 1000, n), mask, ids, logprobs.astype(np.float32))
    path = write_cache(
        tmp_path / "c",
        [sample],
        topk=draws,
        sampling={"method": "random", "draws": draws, "seed": 2},
    )
    reader = CacheReader(path)
    assert_rows(reader[0], sample, 0.005)
    np.testing.assert_allclose(reader[0].mass[mask], 1, atol=1e-6)
    assert reader.manifest["sampling"]["method"] == "random"


def test_same_bytes_however_the_work_is_split(tmp_path):
    samples = make_samples(count=23)
    whole = write_cache(tmp_path / "whole", samples)
    plan = plan_shards([int(sample[1].sum()) for sample in samples], 60)
    spec = CacheSpec(vocab_size=1000, topk=8, teacher="teacher", tokenizer="tokenizer")
    split = tmp_path / "split"
    shards = list(range(len(plan) - 1))
    assert len(shards) > 5
    random.Random(0).shuffle(shards)
    for worker in range(3):
        CacheDirectory.begin(split, spec)
        for shard in shards[worker::3]:
            writer = ShardWriter(split, spec, shard, int(plan[shard]))
            for sample in samples[plan[shard] : plan[shard + 1]]:
                writer.append(*sample)
            if worker == 1 and shard == shards[1]:
                with pytest.raises(CacheError, match="not complete"):
                    CacheDirectory(split).publish_manifest(samples=len(samples))
            writer.publish()
    CacheDirectory(split).publish_manifest(samples=len(samples))
    assert directory_bytes(split) == directory_bytes(whole)


def test_plan_cuts_where_the_plain_writer_cuts(tmp_path):
    samples = make_samples(count=17)
    path = write_cache(tmp_path / "c", samples)
    plan = plan_shards([int(sample[1].sum()) for sample in samples], 60)
    assert plan.tolist() == [entry.first_sample for entry in CacheReader(path).shards] + [17]
    assert plan_shards([0, 0, 5, 0], 5).tolist() == [0, 3, 4]
    assert plan_shards([], 5).tolist() == [0]


def test_an_exception_leaves_no_manifest_and_can_be_continued(tmp_path):
    samples = make_samples(count=12)
    spec = CacheSpec(vocab_size=1000, topk=8, teacher="teacher", tokenizer="tokenizer")
    with (
        pytest.raises(RuntimeError),
        CacheWriter(tmp_path / "c", spec, shard_positions=60) as writer,
    ):
        for sample in samples[:8]:
            writer.append(*sample)
        raise RuntimeError("the teacher died")
    assert not (tmp_path / "c" / "manifest.json").exists()
    with pytest.raises(CacheError, match="unfinished one"):
        CacheReader(tmp_path / "c")
    with pytest.raises(CacheError, match="resume=True"):
        CacheWriter(tmp_path / "c", spec)
    with pytest.raises(CacheError, match="other settings.*topk"):
        CacheWriter(tmp_path / "c", replace(spec, topk=9), resume=True)
    with CacheWriter(tmp_path / "c", spec, resume=True, shard_positions=60) as writer:
        assert 0 < writer.next_sample <= 8  # what was in finished shards
        for sample in samples[writer.next_sample :]:
            writer.append(*sample)
    whole = write_cache(tmp_path / "whole", samples)
    assert directory_bytes(tmp_path / "c") == directory_bytes(whole)
    with pytest.raises(CacheError, match="complete cache"):
        CacheWriter(tmp_path / "c", spec, resume=True)


def test_reopening_keeps_sound_shards(tmp_path):
    path = write_cache(tmp_path / "c", make_samples(count=12))
    before, files = directory_bytes(path), len(CacheReader(path).shards)
    CacheDirectory(path).reopen(without=[1])
    assert sorted(CacheDirectory(path).finished()) == [n for n in range(files) if n != 1]
    assert not (path / "manifest.json").exists()
    with pytest.raises(CacheError, match="not complete"):
        CacheDirectory(path).publish_manifest(samples=12)
    reopened = write_cache(tmp_path / "again", make_samples(count=12))
    os.replace(reopened / "shard-000001.safetensors", path / "shard-000001.safetensors")
    (path / "finished" / "shard-000001.json").write_text(
        json.dumps(CacheReader(reopened).shards[1].as_dict())
    )
    CacheDirectory(path).publish_manifest(samples=12)
    assert directory_bytes(path) == before

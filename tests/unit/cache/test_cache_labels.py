"""The next token's log-probability: version 2 of the format, what it is checked for, and the choice
of samples by it and by mass."""

import json

import numpy as np
import pytest
from cache_samples import label_logprobs, make_samples, write_cache

from megatron_kd.cache import CacheError, CacheReader, CacheSpec, CacheWriter, MixedReader
from megatron_kd.cache.inspect import statistics_table
from megatron_kd.cache.selection import SampleChoice, SelectedReader
from megatron_kd.cache.statistics import cache_statistics

SPEC = dict(vocab_size=1000, topk=8, teacher="teacher", tokenizer="tokenizer")


def write(path, samples, *, change=lambda values: values, **more):
    spec = CacheSpec(**(SPEC | {"label_logprob": True} | more))
    with CacheWriter(path, spec, shard_positions=60) as writer:
        for tokens, mask, ids, logprobs in samples:
            label = change(label_logprobs(tokens, ids, logprobs))
            writer.append(tokens, mask, ids, logprobs, label_logprob=label)
    return path


@pytest.mark.parametrize("codec", ["compact", "fp16"])
def test_they_come_back_as_they_were(codec, tmp_path):
    samples = make_samples(count=9)
    reader = CacheReader(write(tmp_path / "c", samples, codec=codec))
    for index, (tokens, mask, ids, logprobs) in enumerate(samples):
        want = label_logprobs(tokens, ids, logprobs)
        np.testing.assert_array_equal(reader[index].label_logprob, np.where(mask, want, 0))
        np.testing.assert_array_equal(reader.rows(index).label_logprob, want[mask])
    mixed = MixedReader([(reader, 1), (write_cache(tmp_path / "d", samples), 1)])
    assert {mixed[i].rows.label_logprob is None for i in range(len(mixed))} == {True, False}


def test_such_a_cache_alone_has_the_second_version(tmp_path):
    samples = make_samples(count=3)
    write(tmp_path / "new", samples)
    write_cache(tmp_path / "old", samples)
    for name, version in (("new", 2), ("old", 1)):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        shard = (tmp_path / name / "shard-000000.safetensors").read_bytes()
        assert manifest["version"] == version
        assert f'\\"version\\":{version}'.encode() in shard
        assert ("label_logprob" in manifest) is (b"label_logprob" in shard) is (version == 2)


def test_what_cannot_be_a_next_tokens_log_probability_is_refused(tmp_path):
    samples = make_samples(count=2)
    for name, change, words in (
        ("nan", lambda values: values * np.nan, "no log-probabilities"),
        ("positive", lambda values: values + 30, "no log-probabilities"),
        ("missing", lambda values: None, "is missing"),
        ("another", lambda values: np.minimum(values - 1, -1), "another position"),
    ):
        with pytest.raises(CacheError, match=words):
            write(tmp_path / name, with_kept_labels(samples), change=change)
    with pytest.raises(CacheError, match="came"):
        write(tmp_path / "unasked", samples, label_logprob=False)


def with_kept_labels(samples):
    """Samples whose next tokens are candidates."""
    for tokens, mask, ids, logprobs in samples:
        tokens = tokens.copy()
        tokens[1:] = ids[:-1, 0]
        yield tokens, mask, ids, logprobs


def test_inspect_says_the_teachers_cross_entropy(tmp_path):
    samples = make_samples(count=5)
    reader = CacheReader(write(tmp_path / "c", samples))
    kept = [label_logprobs(t, i, p)[mask] for t, mask, i, p in samples]
    statistics = cache_statistics(reader)
    assert statistics.label_nats.mean() == pytest.approx(-np.concatenate(kept).mean(), rel=1e-6)
    names = list(statistics_table(statistics).columns[0].cells)
    assert "teacher's perplexity" in names
    plain = cache_statistics(CacheReader(write_cache(tmp_path / "d", samples)))
    assert plain.label_nats is None
    assert "teacher's perplexity" not in list(statistics_table(plain).columns[0].cells)


@pytest.mark.parametrize("codec", ["compact", "fp16"])
def test_samples_are_chosen_by_perplexity_and_mass(codec, tmp_path):
    samples = make_samples(seed=4, count=40)
    reader = CacheReader(write(tmp_path / "c", samples, codec=codec))
    rows = [reader.rows(index) for index in range(40)]
    masses = np.array([row.mass.mean(dtype=np.float64) for row in rows])
    perplexities = np.exp([-row.label_logprob.mean(dtype=np.float64) for row in rows])
    low, high = np.quantile(perplexities, (0.2, 0.7))
    least = float(np.median(masses))
    for choice, keep in (
        (SampleChoice(max_perplexity=high), perplexities <= high),
        (SampleChoice(min_perplexity=low), perplexities >= low),
        (SampleChoice(min_mass=least), masses >= least - 1e-12),
        (
            SampleChoice(min_mass=least, max_perplexity=high),
            (masses >= least - 1e-12) & (perplexities <= high),
        ),
    ):
        chosen = SelectedReader(reader, choice)
        kept = np.flatnonzero(keep)
        assert abs(len(chosen) - len(kept)) <= 1  # one may lie on the bound
        want = [reader.tokens(int(index)).tobytes() for index in kept]
        got = [chosen[index].tokens.tobytes() for index in range(len(chosen))]
        assert set(want) >= set(got) or set(got) >= set(want)
        assert chosen.manifest["positions"] == sum(
            s.loss_mask.sum() for s in map(chosen.__getitem__, range(len(chosen)))
        )
        assert chosen.fingerprint != reader.fingerprint
    assert len(MixedReader([(chosen, 1), (reader, 1)])) == 2 * len(chosen)
    with pytest.raises(IndexError, match="chosen from"):
        chosen[len(chosen)]


def test_a_choice_that_leaves_nothing_or_is_not_known_is_refused(tmp_path):
    samples = make_samples(count=4)
    reader = CacheReader(write_cache(tmp_path / "c", samples))
    with pytest.raises(CacheError, match="capture again with --label-logprob"):
        SelectedReader(reader, SampleChoice(max_perplexity=5.0))
    with pytest.raises(CacheError, match="none of its 4 samples"):
        SelectedReader(reader, SampleChoice(min_mass=1.5))

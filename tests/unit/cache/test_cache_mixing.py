"""Several caches as one, in a fixed order and in the asked proportions."""

import pickle

import numpy as np
import pytest
from cache_samples import assert_rows, make_samples, write_cache

from megatron_kd.cache import CacheError, CacheReader, CacheSpec, CacheWriter, MixedReader


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    made = {}
    for seed, (name, count, topk) in enumerate((("a", 30, 8), ("b", 10, 5), ("c", 20, 8))):
        samples = make_samples(seed=seed, count=count, topk=topk)
        made[name] = (write_cache(folder / name, samples, topk=topk), samples)
    return made


def test_proportions_and_order(sources):
    paths = [(sources["a"][0], 3.0), (sources["b"][0], 1.0)]
    mixed = MixedReader(paths)
    assert len(mixed) == 40  # both run out together
    places = [mixed.locate(index) for index in range(40)]
    assert sorted(places) == [(0, i) for i in range(30)] + [(1, i) for i in range(10)]
    for window in range(0, 40, 8):  # evenly spread: every stretch holds the asked share
        assert sum(source for source, _ in places[window : window + 8]) == 2
    for source in (0, 1):  # each cache in its own order
        own = [local for which, local in places if which == source]
        assert own == sorted(own)
    again = pickle.loads(pickle.dumps(MixedReader(paths)))
    assert [again.locate(index) for index in range(40)] == places
    assert again.fingerprint == mixed.fingerprint


def test_samples_are_those_of_the_caches(sources):
    mixed = MixedReader([(sources[name][0], 1) for name in "abc"])
    assert mixed.topk == 8 and mixed.vocab_size == 1000 and mixed.tokenizer == "tokenizer"
    for index in range(len(mixed)):
        source, local = mixed.locate(index)
        tokens, mask, ids, logprobs = sources["abc"[source]][1][local]
        widen = ((0, 0), (0, 8 - ids.shape[1]))
        ids = np.pad(ids, widen, constant_values=-1)
        logprobs = np.pad(logprobs, widen, constant_values=-np.inf)
        assert_rows(mixed[index], (tokens, mask, ids, logprobs), 0.005)
        assert_rows(mixed[index - len(mixed)], (tokens, mask, ids, logprobs), 0.005)
    with pytest.raises(IndexError, match="of a mixture"):
        mixed[len(mixed)]


def test_shares_by_tokens_count_what_is_supervised(tmp_path):
    rng = np.random.default_rng(0)
    folders = []
    for name, rows in (("short", (3, 8)), ("long", (30, 60))):
        samples = make_samples(seed=rows[0], count=200, topk=4)
        samples = [
            (tokens, thinned(rng, mask, rng.integers(*rows)), ids, logprobs)
            for tokens, mask, ids, logprobs in samples
        ]
        folders.append(write_cache(tmp_path / name, samples, topk=4))
    mixed = MixedReader(list(zip(folders, (1.0, 3.0), strict=True)), share_by="tokens")
    tokens = np.zeros(2)
    for index in range(len(mixed)):
        tokens[mixed.locate(index)[0]] += mixed[index].loss_mask.sum()
    assert tokens[1] / tokens[0] == pytest.approx(3.0, rel=0.15)
    by_samples = MixedReader(list(zip(folders, (1.0, 3.0), strict=True)))
    assert by_samples.fingerprint != mixed.fingerprint
    with pytest.raises(CacheError, match="samples or tokens"):
        MixedReader([(folders[0], 1)], share_by="rows")


def thinned(rng, mask, count):
    """The mask with `count` positions kept, or all where it has fewer."""
    kept = np.flatnonzero(mask)
    kept = rng.choice(kept, min(count, len(kept)), replace=False)
    thin = np.zeros_like(mask)
    thin[kept] = mask[kept]
    return thin


def test_no_sample_twice_unless_asked(sources):
    mixed = MixedReader([(sources["a"][0], 1), (sources["b"][0], 1)])
    assert len(mixed) == 20
    places = [mixed.locate(index) for index in range(20)]
    assert len(set(places)) == 20
    longer = MixedReader([(sources["a"][0], 1), (sources["b"][0], 1)], samples=50)
    used = [local for source, local in map(longer.locate, range(50)) if source == 1]
    assert used == [*range(10), *range(10), *range(5)]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (0.123, 0.456), (1e-3, 1.0)])
def test_counts_are_the_nearest_whole_numbers(sources, weights):
    mixed = MixedReader(list(zip([sources["a"][0], sources["b"][0]], weights, strict=True)), 137)
    first = sum(mixed.locate(index)[0] == 0 for index in range(137))
    assert abs(first - 137 * weights[0] / sum(weights)) < 1


def test_another_tokenizer_is_refused_in_one_sentence(sources, tmp_path):
    other = write_cache(tmp_path / "other", make_samples(count=2), tokenizer={"sha256": "ff"})
    with pytest.raises(CacheError) as caught:
        MixedReader([(sources["a"][0], 1), (other, 1)])
    message = str(caught.value)
    assert "cannot be mixed: their tokenizer differs" in message and "\n" not in message
    assert str(sources["a"][0]) in message and str(other) in message


@pytest.mark.parametrize("change", [dict(packing="block"), dict(vocab_size=1001)])
def test_other_differences_are_refused(sources, tmp_path, change):
    other = write_cache(tmp_path / "other", make_samples(count=2), **change)
    with pytest.raises(CacheError, match=f"their {next(iter(change))} differs"):
        MixedReader([(sources["a"][0], 1), (other, 1)])


def test_refuses_senseless_weights(sources):
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(CacheError, match="positive numbers"):
            MixedReader([(sources["a"][0], weight)])
    with pytest.raises(CacheError, match="at least one cache"):
        MixedReader([])
    with pytest.raises(CacheError, match="at least 1 sample"):
        MixedReader([(sources["a"][0], 1)], samples=0)


def test_manifest_says_what_is_mixed(sources):
    readers = [CacheReader(sources[name][0]) for name in "ab"]
    mixed = MixedReader([(readers[0], 3), (readers[1], 1)])
    assert mixed.manifest["tokenizer"] == "tokenizer" and mixed.manifest["samples"] == 40
    assert [part["weight"] for part in mixed.manifest["mixture"]] == [0.75, 0.25]
    assert mixed.manifest["mixture"][0]["fingerprint"] == readers[0].fingerprint
    other = MixedReader([(readers[0], 2), (readers[1], 1)])
    assert other.fingerprint != mixed.fingerprint


def test_extras_are_those_all_have(tmp_path):
    rng, paths = np.random.default_rng(0), []
    for name, temperatures in (("a", (2.0, 3.0)), ("b", (2.0,))):
        samples = make_samples(count=3)
        with_extras = tmp_path / name
        spec = CacheSpec(
            vocab_size=1000,
            topk=8,
            teacher="t",
            tokenizer="k",
            temperatures=temperatures,
            hidden_size=4,
        )
        with CacheWriter(with_extras, spec) as writer:
            for sample in samples:
                n = sample[0].size
                writer.append(
                    *sample,
                    log_z={tau: rng.normal(size=n) for tau in temperatures},
                    hidden=rng.normal(size=(n, 4)),
                )
        paths.append((with_extras, 1))
    mixed = MixedReader(paths)
    assert list(mixed[0].log_z) == [2.0] and mixed[0].hidden.shape[1] == 4

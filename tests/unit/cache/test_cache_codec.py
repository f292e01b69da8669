"""Ids come back exactly, log-probabilities within the promised error, at the promised size."""

import numpy as np
import pytest
from cache_samples import assert_rows, by_id, canonical, make_rows, make_sample, write_cache

from megatron_kd.cache import CacheReader
from megatron_kd.cache.codecs import compact

TOLERANCE_NATS = {"compact": 0.005, "fp16": 0.008}  # that of halves is below -16 nats


def roundtrip(ids, logprobs, vocab_size):
    """Compact rows, ids [R, K] with -1 unused, there and back: (ids, logprobs, bytes per row)."""
    used = ids >= 0
    order = np.argsort(np.where(used, ids, vocab_size), axis=1)
    ids, logprobs = np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)
    used, counts = np.take_along_axis(used, order, 1), used.sum(axis=1)
    mass = compact.decode_mass(compact.code_mass(np.exp(logprobs.astype(np.float64)).sum(axis=1)))
    bottom, layout, stream, high_bytes = compact.encode(
        ids[used], logprobs[used].astype(np.float64), counts, vocab_size
    )
    got = compact.decode(stream, high_bytes, bottom, layout, counts, mass, vocab_size, ids.shape[1])
    return (*got, stream.size / len(ids))


@pytest.mark.parametrize("codec_name", ["compact", "fp16"])
@pytest.mark.parametrize(
    "vocab_size, topk",
    [
        (128256, 100),
        (49152, 100),
        (1, 1),
        (2, 2),
        (7, 7),
        (300, 300),
        (65536, 3),
        (65537, 3),
        (1 << 20, 40),
    ],
)
@pytest.mark.parametrize("shape", ["zipf", "peaked"])
def test_round_trip(tmp_path, codec_name, vocab_size, topk, shape):
    rng = np.random.default_rng(1)
    samples = [make_sample(rng, n, vocab_size, topk, shape=shape) for n in (2, 33, 70)]
    path = write_cache(tmp_path / "c", samples, vocab_size=vocab_size, topk=topk, codec=codec_name)
    reader = CacheReader(path)
    for index, sample in enumerate(samples):
        assert_rows(reader[index], sample, TOLERANCE_NATS[codec_name])


@pytest.mark.parametrize("codec_name", ["compact", "fp16"])
def test_ids_at_width_boundaries(tmp_path, codec_name):
    """17-bit packing and uint16 have corrupted just these."""
    ids = [0, 65535, 65536, 119546, 131071, 131072, 151935, 201087, 262143, 1048575]
    row_ids = np.array([ids, ids[::-1]])
    logprobs = np.log(np.full((2, 10), 0.09, np.float32)) + np.linspace(0, -3, 10, dtype=np.float32)
    sample = (np.array([5, 1048575]), np.array([1, 0]), row_ids, logprobs)
    path = write_cache(tmp_path / "c", [sample], vocab_size=1 << 20, topk=10, codec=codec_name)
    got = CacheReader(path)[0]
    assert got.topk_ids[0].tolist() == ids
    assert got.tokens.tolist() == [5, 1048575]
    assert got.topk_ids.dtype == np.int32 and got.topk_logprobs.dtype == np.float32


@pytest.mark.parametrize("shape", ["zipf", "wide", "peaked"])
def test_compact_error_is_bounded_and_rows_sum_to_their_mass(shape):
    rng = np.random.default_rng(2)
    ids, logprobs = make_rows(rng, 400, 128256, 100, shape=shape)
    got_ids, got_logprobs, _ = roundtrip(ids, logprobs, 128256)
    want_ids, want = by_id(ids, logprobs)
    found_ids, found = by_id(got_ids, got_logprobs)
    np.testing.assert_array_equal(found_ids, want_ids)
    assert np.abs(found - want).max() <= 0.005
    mass = np.exp(want.astype(np.float64)).sum(axis=1)
    top_share = np.exp(want.max(axis=1)) / mass
    sums = np.exp(got_logprobs.astype(np.float64)).sum(axis=1)
    assert np.abs(sums - mass)[top_share > 0.7].max(initial=0) < 2.5e-4
    if shape == "peaked":
        assert (top_share > 0.7).all()


def test_a_certain_teacher_stays_certain():
    """On the grid alone the top candidate of 0.998 would become 1."""
    logprobs = np.log(np.array([[0.998, 0.001, 0.0005]], dtype=np.float64)).astype(np.float32)
    _, got, _ = roundtrip(np.array([[7, 3, 900]]), logprobs, 1000)
    assert np.exp(got[0, 0]) == pytest.approx(0.998, abs=2e-5)
    assert np.exp(got.astype(np.float64)).sum() == pytest.approx(0.9995, abs=1e-6)


def test_any_range_keeps_the_error():
    """Fixed-width codes scaled per row lose precision as the range grows."""
    for span in (1, 25, 60, 300, 590):
        logprobs = -np.linspace(0.7, span, 64, dtype=np.float32)[None]
        _, got, _ = roundtrip(np.arange(64)[None], logprobs, 128256)
        assert np.abs(got - logprobs).max() <= 0.005


def test_vanishing_probabilities_end_at_600_nats():
    logprobs = np.array([[-0.1, -700.0, -1e30]], np.float32)
    ids, got, _ = roundtrip(np.array([[1, 2, 3]]), logprobs, 10)
    assert got[0].tolist() == pytest.approx([-0.1, -600.0, -600.0], abs=0.005)
    assert ids[0].tolist() == [1, 2, 3]


def test_varying_counts():
    rng = np.random.default_rng(3)
    ids, logprobs = make_rows(rng, 200, 128256, 60, shape="zipf")
    counts = rng.integers(1, 61, 200)
    unused = np.arange(60) >= counts[:, None]
    ids[unused], logprobs[unused] = -1, -np.inf
    got_ids, got_logprobs, _ = roundtrip(ids, logprobs, 128256)
    np.testing.assert_array_equal(np.sort(got_ids, axis=1), np.sort(ids, axis=1))
    np.testing.assert_array_equal((got_ids < 0), unused)
    assert np.isneginf(got_logprobs[unused]).all() and np.isfinite(got_logprobs[~unused]).all()


@pytest.mark.parametrize("codec_name", ["compact", "fp16"])
def test_order_is_falling_probability_then_rising_id(tmp_path, codec_name):
    rng = np.random.default_rng(4)
    tokens, mask, ids, _ = make_sample(rng, 40, 1000, 16)
    logprobs = np.log(rng.choice([0.02, 0.03, 0.05], (40, 16))).astype(np.float32)  # many ties
    path = write_cache(tmp_path / "c", [(tokens, mask, ids, logprobs)], topk=16, codec=codec_name)
    got = CacheReader(path).rows(0)
    want_ids, _ = canonical(ids[mask], logprobs[mask])
    np.testing.assert_array_equal(got.topk_ids, want_ids)


def test_half_precision_comes_back_to_the_bit(tmp_path):
    rng = np.random.default_rng(5)
    tokens, mask, ids, logprobs = make_sample(rng, 50, 1000, 8)
    halves = logprobs.astype(np.float16)
    path = write_cache(tmp_path / "c", [(tokens, mask, ids, halves)], codec="fp16")
    rows = CacheReader(path).rows(0)
    _, got = by_id(rows.topk_ids, rows.topk_logprobs)
    np.testing.assert_array_equal(got, by_id(ids[mask], halves[mask])[1].astype(np.float32))


@pytest.mark.parametrize(
    "vocab_size, shape, spread_ids, limit_bytes",
    [(128256, "wide", True, 300), (128256, "zipf", True, 300), (49152, "zipf", False, 275)],
)
def test_size_of_the_whole_file(tmp_path, vocab_size, shape, spread_ids, limit_bytes):
    """Everything counted: rows, mass, tokens, mask, offsets, header."""
    rng = np.random.default_rng(6)
    samples = [
        make_sample(rng, 1025, vocab_size, 100, masked=0, shape=shape, spread_ids=spread_ids)
        for _ in range(4)
    ]
    path = write_cache(
        tmp_path / "c", samples, vocab_size=vocab_size, topk=100, shard_positions=1 << 17
    )
    reader = CacheReader(path)
    assert sum(entry.bytes for entry in reader.shards) / reader.manifest["positions"] <= limit_bytes


def test_mass_keeps_both_ends():
    mass = np.array([0.0, 1e-4, 0.3, 0.5, 0.51, 0.9, 0.9999, 1 - 1e-6, 1.0])
    got = compact.decode_mass(compact.code_mass(mass)).astype(np.float64)
    np.testing.assert_allclose(got[:4], mass[:4], rtol=5e-4)
    np.testing.assert_allclose(1 - got[4:], 1 - mass[4:], rtol=5e-2, atol=6e-8)
    assert got[0] == 0 and got[-1] == 1


@pytest.mark.parametrize("damage", ["short", "ones", "zeros", "noise"])
def test_broken_streams_are_refused_not_believed(damage):
    rng = np.random.default_rng(7)
    ids, logprobs = (np.sort(x, 1) for x in make_rows(rng, 30, 5000, 20))
    counts = np.full(30, 20)
    bottom, layout, stream, high_bytes = compact.encode(
        ids.ravel(), logprobs.ravel().astype(np.float64), counts, 5000
    )
    at = stream.size // 2
    if damage == "short":
        stream = stream[:at]
    else:
        stream = stream.copy()
        fill = {"ones": 255, "zeros": 0, "noise": rng.integers(0, 256, stream.size - at)}[damage]
        stream[at:] = fill
    with pytest.raises(ValueError):
        compact.decode(stream, high_bytes, bottom, layout, None, np.ones(30, np.float32), 5000, 20)

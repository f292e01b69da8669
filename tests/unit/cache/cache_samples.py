"""Samples with teacher rows whose values look like a language model's, and caches made of them."""

import hashlib
from pathlib import Path

import numpy as np

from megatron_kd.cache import CacheSpec, CacheWriter


def make_rows(rng, rows, vocab_size, topk, *, shape="zipf", spread_ids=False):
    """(ids [rows, K] int64, logprobs [rows, K] fp32), in no particular order."""
    if spread_ids:  # evenly over the vocabulary: the most bits a set of ids can need
        step = vocab_size // topk
        ids = np.arange(topk) * step + rng.integers(0, step, (rows, topk))
    else:
        ids = np.stack([rng.choice(vocab_size, topk, replace=False) for _ in range(rows)])
    if shape == "zipf":
        raw = -1.4 * np.log(np.arange(1, topk + 1)) + rng.normal(0, 0.3, (rows, topk))
    elif shape == "wide":  # 18 nats, evenly: the most bits a row of values can need
        raw = -rng.uniform(0, 18, (rows, topk))
    elif shape == "peaked":
        raw = np.concatenate(
            [np.full((rows, 1), 9.0), rng.normal(-2, 2, (rows, max(topk - 1, 0)))], axis=1
        )[:, :topk]
    else:
        raise AssertionError(shape)
    raw = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    mass = rng.uniform(0.6, 0.999999, (rows, 1)) if topk < vocab_size else 1.0
    order = np.argsort(rng.random((rows, topk)), axis=1)
    return ids, np.take_along_axis(raw + np.log(mass), order, 1).astype(np.float32)


def make_sample(rng, tokens, vocab_size, topk, *, masked=0.2, **kind):
    """(tokens [n], loss_mask [n], ids [n, K], logprobs [n, K])"""
    mask = rng.random(tokens) >= masked
    mask[-1] = False
    rows = make_rows(rng, tokens, vocab_size, topk, **kind)
    return (rng.integers(0, vocab_size, tokens), mask, *rows)


def make_samples(seed=0, count=6, vocab_size=1000, topk=8, tokens=(20, 60), **kind):
    rng = np.random.default_rng(seed)
    return [
        make_sample(rng, int(rng.integers(*tokens)), vocab_size, topk, **kind) for _ in range(count)
    ]


def label_logprobs(tokens, ids, logprobs):
    """[n] fp32: what the rows say of each next token, or a guess where they say nothing."""
    following = np.append(tokens[1:], 0)
    found = ids == following[:, None]
    kept = np.where(found, logprobs, 0.0).sum(axis=1)
    return np.where(found.any(axis=1), kept, -9.5 - 0.01 * np.arange(len(tokens))).astype("f4")


def write_cache(path, samples, *, shard_positions=60, origin=None, **description):
    """A cache of samples as `make_samples` gives them."""
    settings = dict(vocab_size=1000, topk=8, teacher="teacher", tokenizer="tokenizer")
    spec = CacheSpec(**(settings | description))
    with CacheWriter(path, spec, shard_positions=shard_positions, origin=origin) as writer:
        for sample in samples:
            writer.append(*sample)
    return path


def canonical(ids, logprobs):
    """Rows by falling log-probability, ties by rising id."""
    order = np.lexsort((ids, -logprobs), axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(logprobs, order, -1)


def by_id(ids, logprobs):
    order = np.argsort(ids, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1), np.take_along_axis(logprobs, order, -1)


def assert_rows(got, sample, tolerance_nats):
    """A read sample against what was written; -1 and -inf where nothing was."""
    tokens, mask, ids, logprobs = sample
    np.testing.assert_array_equal(got.tokens, tokens)
    np.testing.assert_array_equal(got.loss_mask, mask)
    got_ids, got_logprobs = by_id(got.topk_ids[mask], got.topk_logprobs[mask])
    want_ids, want_logprobs = by_id(ids[mask], logprobs[mask])
    np.testing.assert_array_equal(got_ids, want_ids)
    used = want_ids >= 0
    error = np.abs(got_logprobs[used] - want_logprobs[used].astype(np.float64))
    assert error.max(initial=0) <= tolerance_nats
    assert np.isneginf(got_logprobs[~used]).all()
    assert (got.topk_ids[~mask] == -1).all()
    assert np.isneginf(got.topk_logprobs[~mask]).all()
    assert (got.mass[~mask] == 0).all()
    mass = np.exp(logprobs[mask].astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(got.mass[mask], np.minimum(mass, 1), atol=3e-4)


def put_id_sums(reader, queue):
    """What child processes run; here, so that a spawned one need not import a test module."""
    queue.put([int(reader[index].topk_ids.sum()) for index in range(len(reader))])


def directory_bytes(path):
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file()
    }

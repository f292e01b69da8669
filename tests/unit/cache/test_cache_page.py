"""docs/cache-format.md says enough: a reader written from it alone reads the same samples."""

import numpy as np
import pytest
from cache_samples import label_logprobs, make_sample
from page_reader import PageReader

from megatron_kd.cache import CacheReader, CacheSpec, CacheWriter


@pytest.mark.parametrize("codec", ["compact", "fp16"])
@pytest.mark.parametrize("vocab_size, topk", [(1000, 1), (5000, 20), (70000, 7), (40, 40)])
@pytest.mark.parametrize("shape", ["zipf", "wide", "peaked"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_reader_written_from_the_page(tmp_path, codec, vocab_size, topk, shape, dtype):
    rng = np.random.default_rng(0)
    spec = CacheSpec(
        vocab_size=vocab_size,
        topk=topk,
        teacher={"name": "t"},
        tokenizer="k",
        codec=codec,
        temperatures=(2.0, 0.7),
        hidden_size=3,
        hidden_dtype=dtype,
        label_logprob=shape == "wide",
    )
    with CacheWriter(tmp_path / "c", spec, shard_positions=30) as writer:
        for number in range(5):
            n = int(rng.integers(2, 30))
            tokens, mask, ids, logprobs = make_sample(rng, n, vocab_size, topk, shape=shape)
            if number > 2 and topk > 2:  # shards with and without varying counts
                unused = np.arange(topk) >= rng.integers(1, topk, n)[:, None]
                ids[unused], logprobs[unused] = -1, -np.inf
            label = label_logprobs(tokens, ids, logprobs) if shape == "wide" else None
            writer.append(
                tokens,
                mask,
                ids,
                logprobs,
                cu_seqlens=np.array([0, 1, n]),
                log_z={2.0: rng.normal(size=n), 0.7: rng.normal(size=n)},
                hidden=rng.normal(size=(n, 3)),
                label_logprob=label,
            )
    reader, count = CacheReader(tmp_path / "c"), 0
    for index, want in enumerate(PageReader(tmp_path / "c").samples()):
        got, count = reader[index], count + 1
        mask = got.loss_mask
        assert got.tokens.tolist() == want["tokens"] and mask.tolist() == want["loss_mask"]
        assert got.cu_seqlens.tolist() == want["cu_seqlens"]
        np.testing.assert_allclose(got.mass[mask], want["mass"], rtol=1e-6)
        for tau, column in zip((2.0, 0.7), want["log_z"], strict=True):
            np.testing.assert_array_equal(got.log_z[tau][mask], np.float32(column))
        label = [] if got.label_logprob is None else got.label_logprob[mask].tolist()
        assert label == want["label_logprob"] and bool(label) == (shape == "wide" and mask.any())
        np.testing.assert_array_equal(got.hidden[mask], np.float32(want["hidden"]).reshape(-1, 3))
        for ids, logprobs, row in zip(
            got.topk_ids[mask], got.topk_logprobs[mask], want["rows"], strict=True
        ):
            used = ids >= 0
            assert ids[used].tolist() == [token for token, _ in row]
            np.testing.assert_allclose(logprobs[used], [p for _, p in row], atol=2e-6)
    assert count == len(reader) == 5

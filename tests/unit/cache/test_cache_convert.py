"""Captures of other tools come over with every id and every value."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from cache_samples import by_id, canonical, make_rows
from foreign_captures import write_distillkit, write_megatron

from megatron_kd import cli
from megatron_kd.cache import CacheReader
from megatron_kd.data.sequences import SequenceWriter

VOCAB, TOPK, LENGTH = 131072, 6, 16


def teacher_samples(seed, count, length, vocab_size=VOCAB, topk=TOPK):
    """(tokens, ids, logprobs), the next tokens mostly among the candidates as a teacher's are."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        ids, logprobs = canonical(*make_rows(rng, length - 1, vocab_size, topk))
        tokens = rng.integers(0, vocab_size, length)
        known = rng.random(length - 1) < 0.9
        tokens[1:][known] = ids[known, 0]
        samples.append((tokens, ids, logprobs.astype(np.float16).astype(np.float32)))
    return samples


def write_split(folder, samples, vocab_size=VOCAB):
    folder.mkdir()
    writer = SequenceWriter(folder)
    for number, (tokens, _, _) in enumerate(samples):
        mask = np.arange(tokens.size) % 5 != number % 5
        mask[-1] = False
        writer.append(tokens.astype(np.int32), mask, np.array([0, tokens.size], np.int32))
    writer.close(
        split="train",
        seq_length=samples[0][0].size - 1,
        packing="naive",
        vocab_size=vocab_size,
        tokenizer="ab" * 32,
    )
    return folder


def assert_same(reader, samples, tolerance_nats=0.0):
    assert len(reader) == len(samples)
    for index, (tokens, ids, logprobs) in enumerate(samples):
        got = reader[index]
        np.testing.assert_array_equal(got.tokens, tokens)
        rows = np.flatnonzero(got.loss_mask)
        got_ids, got_logprobs = by_id(got.topk_ids[rows], got.topk_logprobs[rows])
        want_ids, want = by_id(ids[rows], logprobs[rows])
        np.testing.assert_array_equal(got_ids, want_ids)
        used = want_ids >= 0
        assert np.abs(got_logprobs[used] - want[used]).max() <= tolerance_nats


@pytest.mark.parametrize(
    "version, ranks, micro_batch, contexts, ranges",
    [
        (1, 1, 1, 1, False),
        (1, 2, 2, 1, False),
        (1, 2, 1, 2, False),
        (2, 1, 2, 1, False),
        (2, 3, 2, 1, True),
    ],
)
def test_megatron(tmp_path, version, ranks, micro_batch, contexts, ranges):
    samples = teacher_samples(0, 36, LENGTH + 1)
    for _, ids, logprobs in samples:  # cut by top-p: marked slots, id -1
        ids[2:5, 4:], logprobs[2:5, 4:] = -1, -np.inf
    saved = write_megatron(
        tmp_path / "saved",
        [(ids, logprobs) for _, ids, logprobs in samples],
        version=version,
        ranks=ranks,
        micro_batch=micro_batch,
        batch=12,
        contexts=contexts,
        ranges=ranges,
    )
    data = write_split(tmp_path / "data", samples)
    arguments = ["convert", "megatron", str(saved), "--data", str(data), "--codec", "fp16"]
    output = tmp_path / "cache"
    assert cli.main([*arguments, "--output", str(output), "--teacher", "llama"]) == 0
    reader = CacheReader(output)
    assert_same(reader, samples)
    assert reader.tokenizer == "ab" * 32 and reader.manifest["packing"] == "naive"
    assert reader.manifest["teacher"] == "llama"


def test_megatron_padding_rows_are_dropped(tmp_path, capsys):
    samples = teacher_samples(1, 4, LENGTH + 1, vocab_size=1000)
    saved = write_megatron(
        tmp_path / "saved",
        [(np.where(ids == ids[:, -1:], 1003, ids), logprobs) for _, ids, logprobs in samples],
        version=1,
        ranks=1,
        micro_batch=1,
        batch=2,
    )
    data = write_split(tmp_path / "data", samples, vocab_size=1000)
    arguments = ["convert", "megatron", str(saved), "--data", str(data), "--teacher", "t"]
    assert cli.main([*arguments, "--output", str(tmp_path / "cache")]) == 0
    assert f"{4 * LENGTH} candidates were padding rows" in capsys.readouterr().out
    got = CacheReader(tmp_path / "cache").rows(0)
    assert (got.topk_ids[:, -1] == -1).all() and got.topk_ids.max() < 1000


@pytest.mark.parametrize(
    "fault", ["shifted", "shuffled", "short", "no data", "missing step", "noise"]
)
def test_megatron_refusals(tmp_path, capsys, fault):
    samples = teacher_samples(2, 12, LENGTH + 1)
    rows = [(ids, logprobs) for _, ids, logprobs in samples]
    saved = write_megatron(
        tmp_path / "saved", rows, version=1, ranks=2, micro_batch=1, batch=4, steps_per_tar=1
    )
    message = "the rows do not fit the tokens"
    if fault == "shifted":
        samples = [(np.roll(tokens, 1), ids, p) for tokens, ids, p in samples]
    elif fault == "shuffled":
        samples = samples[::-1]
    elif fault == "short":
        samples, message = samples[:-1], "more samples than the 11"
    elif fault == "missing step":
        for rank in range(2):
            (tmp_path / "saved" / f"cp0_dp{rank}__1.tar").unlink()
        message = "expected step or sample 1, found 2"
    elif fault == "noise":
        (tmp_path / "saved" / "cp0_dp1__1.tar").write_bytes(b"noise" * 500)
        message = "cannot be read"
    data = write_split(tmp_path / "data", samples)
    arguments = ["convert", "megatron", str(saved), "--teacher", "t"]
    if fault == "no data":
        message = "hold no tokens"
    else:
        arguments += ["--data", str(data)]
    assert cli.main([*arguments, "--output", str(tmp_path / "cache")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache" / "manifest.json").exists()


EXACT = dict(
    d=100000,
    k=12,
    exact_k=12,
    exact_dtype="float32",
    polynomial_terms=None,
    term_dtype="float32",
    residual_bins=[],
    delta_encoding=False,
    error_diffusion=False,
)


@pytest.mark.parametrize(
    "change, tolerance_nats",
    [
        (dict(), 1e-6),
        (dict(d=131072), 1e-6),
        (dict(delta_encoding=True), 1e-5),
        (dict(exact_dtype="bfloat16"), 0.04),
        (
            dict(
                exact_k=4,
                residual_bins=[dict(scale_dtype="float32", element_bits=13, num_elements=8)],
            ),
            2e-3,
        ),
        (
            dict(
                exact_k=2,
                exact_dtype="float16",
                polynomial_terms=[0, 1, 2, "sqrt"],
                residual_bins=[
                    dict(scale_dtype="float16", element_bits=12, num_elements=6),
                    dict(scale_dtype="float32", element_bits=11, num_elements=4),
                ],
            ),
            6e-3,
        ),
        (
            dict(
                exact_k=2,
                polynomial_terms=[0, 1, 2],
                normalize_t=True,
                delta_encoding=True,
                residual_bins=[dict(scale_dtype="float32", element_bits=14, num_elements=10)],
            ),
            6e-3,
        ),
    ],
)
def test_distillkit(tmp_path, change, tolerance_nats):
    config = EXACT | change
    samples = teacher_samples(3, 11, 40, vocab_size=config["d"], topk=12)
    saved = write_distillkit(tmp_path / "saved", samples, config)
    arguments = ["convert", "distillkit", str(saved), "--teacher", "t", "--tokenizer", "ab" * 32]
    output = tmp_path / "cache"
    assert cli.main([*arguments, "--licence", "mit", "--output", str(output)]) == 0
    reader = CacheReader(output)
    assert_same(reader, samples, 0.005 + tolerance_nats)
    assert reader[0].loss_mask.tolist() == [True] * 39 + [False]
    assert reader.manifest["licence"] == "mit" and reader.vocab_size == config["d"]


def test_distillkit_rows_above_one_are_scaled(tmp_path, capsys):
    config = EXACT | dict(exact_dtype="bfloat16")
    samples = teacher_samples(4, 3, 40, vocab_size=config["d"], topk=12)
    samples = [
        (t, ids, p - np.log(np.exp(p).sum(1, keepdims=True)) + 0.03) for t, ids, p in samples
    ]
    saved = write_distillkit(tmp_path / "saved", samples, config)
    arguments = ["convert", "distillkit", str(saved), "--teacher", "t", "--tokenizer", "x"]
    assert cli.main([*arguments, "--output", str(tmp_path / "cache")]) == 0
    assert "rows summed to more than one" in capsys.readouterr().out
    assert CacheReader(tmp_path / "cache").rows(0).mass.max() <= 1


@pytest.mark.parametrize("fault", ["no tokenizer", "no config", "wrong config", "columns", "k"])
def test_distillkit_refusals(tmp_path, capsys, fault):
    samples = teacher_samples(5, 3, 20, vocab_size=EXACT["d"], topk=12)
    saved = write_distillkit(tmp_path / "saved", samples, EXACT)
    config = saved / "compression_config.yaml"
    arguments = [
        "convert",
        "distillkit",
        str(saved),
        "--teacher",
        "t",
        "--output",
        str(tmp_path / "c"),
    ]
    if fault != "no tokenizer":
        arguments += ["--tokenizer", "x"]
    message = "give --tokenizer"
    if fault == "no config":
        config.unlink()
        message = "compression configuration"
    elif fault == "wrong config":
        config.write_text(config.read_text().replace("float32", "float8"))
        message = "make no sense"
    elif fault == "columns":
        table = pyarrow.table({"input_ids": [[1, 2]], "coeffs": [[[0.5]]]})
        pyarrow.parquet.write_table(table, saved / "data_0.parquet")
        message = "without a normalizer"
    elif fault == "k":
        config.write_text(config.read_text().replace("k: 12", "k: 14"))
        message = "shorter than the compression configuration"
    assert cli.main(arguments) == 1
    assert message in capsys.readouterr().err

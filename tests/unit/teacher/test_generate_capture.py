"""Rows kept while generating against those of a later capture over the prepared responses."""

import numpy as np
import pytest
import tiny_chat
from model_servers import ModelServer
from tiny_chat import command, records_of, write_prompts
from tiny_teacher import full_logprobs
from transformers import LlamaForCausalLM

from megatron_kd.cache import CacheReader
from megatron_kd.cache.writer import ShardWriter
from megatron_kd.cli import main

KEPT = ("--samples", "2", "--capture", "--topk", "9", "--validation-fraction", "0")


@pytest.fixture
def written(monkeypatch):
    """tokens of a sample: the rows that went into its cache, before a codec rounds them."""
    rows_of = {}
    append = ShardWriter.append

    def keep(writer, tokens, loss_mask, topk_ids, topk_logprobs, **more):
        extras = dict(more["log_z"])
        if more["label_logprob"] is not None:
            extras["label"] = more["label_logprob"]
        rows = (np.asarray(loss_mask), topk_ids, topk_logprobs, extras)
        rows_of.setdefault(np.asarray(tokens).tobytes(), []).append(rows)
        append(writer, tokens, loss_mask, topk_ids, topk_logprobs, **more)

    monkeypatch.setattr(ShardWriter, "append", keep)
    return rows_of


def capture_later(folder, model, *more):
    """prepare and capture over the responses of a generation."""
    arguments = ("--input", str(folder), "--tokenizer", str(model), "--seq-length", "127")
    output = ("--output", str(folder / "data"), "--validation-fraction", "0")
    assert main(["prepare", *arguments, *output]) == 0
    arguments = ("--data", str(folder / "data"), "--teacher", str(model), "--topk", "9")
    assert main(["capture", *arguments, "--output", str(folder / "later"), *more]) == 0


def largest_difference(written):
    """Nats between the two rows of every position; ids that one of them lacks must be ties."""
    worst = 0.0
    for one, other in written.values():
        (mask, ids, logprobs, extras), (later_mask, later_ids, later_logprobs, others) = one, other
        assert extras.keys() == others.keys()
        np.testing.assert_array_equal(mask, later_mask)
        assert ids.shape == later_ids.shape == (mask.sum(), 9)
        for name, values in extras.items():
            worst = max(worst, np.abs(values - others[name]).max())
        for i, (mine, theirs) in enumerate(zip(ids.tolist(), later_ids.tolist(), strict=True)):
            mine = dict(zip(mine, logprobs[i].tolist(), strict=True))
            theirs = dict(zip(theirs, later_logprobs[i].tolist(), strict=True))
            gaps = [abs(mine[v] - theirs[v]) for v in mine.keys() & theirs.keys()]
            last = min(theirs.values())
            gaps += [abs((mine | theirs)[v] - last) for v in mine.keys() ^ theirs.keys()]
            worst = max(worst, *gaps)
    return worst


@pytest.mark.parametrize("dtype, nats", [("float32", 1e-4), ("bfloat16", 0.15)])
def test_rows_equal_those_of_a_later_capture(dtype, nats, written, chat_model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    more = ("--dtype", dtype, "--temperatures", "2")
    folder = tmp_path / "out"
    assert main(command(prompts, chat_model_dir, folder, *KEPT, *more)) == 0
    assert len(written) == 14
    capture_later(folder, chat_model_dir, *more)
    worst = largest_difference(written)
    print(f"largest difference in {dtype}: {worst:.2g} nats")
    assert worst <= nats
    kept, later = CacheReader(folder / "cache/train"), CacheReader(folder / "later/train")
    for key in ("teacher", "tokenizer", "packing", "vocab_size", "temperatures", "positions"):
        assert kept.manifest[key] == later.manifest[key], key
    for index, record in enumerate(records_of(folder)):
        assert kept[index].tokens.tolist() == record["tokens"]
        assert kept[index].loss_mask[:-1].tolist() == [bool(m) for m in record["loss_mask"][1:]]


def test_each_tokens_own_log_probability_is_kept(chat_model_dir, tmp_path):
    """Candidate or not, whatever the responses were drawn with; a later capture agrees."""
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    folder = tmp_path / "out"
    more = ("--dtype", "float32", "--label-logprob")
    drawn = ("--temperature", "1.5", "--top-p", "0.95")
    assert main(command(prompts, chat_model_dir, folder, *KEPT, *more, *drawn)) == 0
    capture_later(folder, chat_model_dir, *more)
    model = LlamaForCausalLM.from_pretrained(chat_model_dir).eval()
    later = CacheReader(folder / "later/train")
    by_tokens = {later.tokens(i).tobytes(): later.rows(i) for i in range(len(later))}
    kept = CacheReader(folder / "cache/train")
    outside = 0
    for index in range(len(kept)):
        sample, mask = kept[index], kept[index].loss_mask
        logprobs = full_logprobs(model, sample.tokens, kept.vocab_size)
        following = np.append(sample.tokens[1:], 0)
        want = logprobs[range(len(following)), following].numpy()[mask]
        np.testing.assert_allclose(sample.rows.label_logprob, want, atol=1e-4)
        other = by_tokens[sample.tokens.tobytes()].label_logprob
        np.testing.assert_allclose(sample.rows.label_logprob, other, atol=1e-4)
        outside += int((sample.rows.topk_ids != following[mask][:, None]).all(axis=1).sum())
    assert outside > 10


def test_a_servers_rows_equal_those_of_a_later_capture(written, chat_model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    model = LlamaForCausalLM.from_pretrained(chat_model_dir).eval()
    tokenizer = tiny_chat.tiny_chat_tokenizer()
    kept = ("--capture", "--topk", "9", "--validation-fraction", "0", "--temperature", "0")
    kept += ("--label-logprob",)
    with ModelServer(model, tokenizer=tokenizer) as server:
        engine = ("--engine", "vllm-server", "--server", server.address)
        more = ("--tokenizer", str(chat_model_dir), *engine, *kept)
        assert main(command(prompts, "tiny", tmp_path / "out", *more)) == 0
    assert len(written) == 7
    capture_later(tmp_path / "out", chat_model_dir, "--dtype", "float32", "--label-logprob")
    assert largest_difference(written) <= 1e-4


def test_whole_prompts_are_held_out(chat_model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    lines = prompts.read_text()
    prompts.write_text(lines + lines)  # copies go where their first goes
    kept = ("--capture", "--topk", "4", "--samples", "2", "--validation-fraction", "0.2")
    assert main(command(prompts, chat_model_dir, tmp_path / "out", *kept)) == 0
    asked = {}
    for split in ("train", "validation"):
        reader = CacheReader(tmp_path / "out" / "cache" / split)
        samples = [reader[i] for i in range(len(reader))]
        asked[split] = {s.tokens[: s.loss_mask.argmax() + 1].tobytes() for s in samples}
    assert len(asked["validation"]) >= 2 and not asked["train"] & asked["validation"]
    assert len(asked["train"] | asked["validation"]) == 20
    assert len(records_of(tmp_path / "out")) == 80

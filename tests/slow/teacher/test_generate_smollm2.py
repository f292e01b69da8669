"""What SmolLM2-135M-Instruct answers, and the rows it answers from."""

import json

import numpy as np
import pytest

from megatron_kd.cache.writer import ShardWriter
from megatron_kd.cli import main

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Name three colors.",
    "Write one sentence about the sea.",
    "What is 2 + 3?",
    "Who wrote Romeo and Juliet?",
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    turns = ([{"role": "user", "content": question}] for question in QUESTIONS)
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return path


def generate(prompts, model, output, *more):
    given = ["--prompts", str(prompts), "--model", str(model), "--output", str(output)]
    assert main(["generate", *given, "--max-new-tokens", "48", *more]) == 0
    return [json.loads(line) for line in open(output / "responses.jsonl", encoding="utf-8")]


def test_answers_make_sense_and_end(smollm2_dir, prompts, tmp_path):
    found = generate(
        prompts, smollm2_dir, tmp_path / "out", "--temperature", "0", "--dtype", "float32"
    )
    assert "Paris" in found[0]["response"] and "Shakespeare" in found[5]["response"]
    over = [record for record in found if not record["truncated"]]
    assert len(over) >= 2 and all(record["tokens"][-1] == 2 for record in over)  # <|im_end|>


@pytest.mark.parametrize("dtype, nats", [("float32", 1e-4), ("bfloat16", 1.0)])
def test_rows_equal_those_of_a_later_capture(
    dtype, nats, smollm2_dir, prompts, tmp_path, monkeypatch
):
    written = {}
    append = ShardWriter.append

    def keep(writer, tokens, mask, ids, logprobs, **more):
        written.setdefault(np.asarray(tokens).tobytes(), []).append((ids, logprobs))
        append(writer, tokens, mask, ids, logprobs, **more)

    monkeypatch.setattr(ShardWriter, "append", keep)
    out = tmp_path / "out"
    kept = ("--capture", "--topk", "50", "--validation-fraction", "0", "--dtype", dtype)
    generate(prompts, smollm2_dir, out, *kept)
    read = ["--input", str(out), "--tokenizer", str(smollm2_dir), "--seq-length", "127"]
    more = ["--output", str(out / "data"), "--validation-fraction", "0"]
    assert main(["prepare", *read, *more]) == 0
    given = ["--data", str(out / "data"), "--teacher", str(smollm2_dir), "--topk", "50"]
    assert main(["capture", *given, "--output", str(out / "later"), "--dtype", dtype]) == 0
    worst, shared = 0.0, []
    assert len(written) == len(QUESTIONS)
    for (ids, logprobs), (later_ids, later) in written.values():
        for i in range(len(ids)):
            mine = dict(zip(ids[i].tolist(), logprobs[i].tolist(), strict=True))
            theirs = dict(zip(later_ids[i].tolist(), later[i].tolist(), strict=True))
            both = mine.keys() & theirs.keys()
            shared.append(len(both) / len(mine))
            gaps = [abs(mine[v] - theirs[v]) for v in both]
            gaps += [abs((mine | theirs)[v] - later[i][-1]) for v in mine.keys() ^ theirs.keys()]
            worst = max(worst, *gaps)
    print(f"{dtype}: {worst:.2g} nats at most, {np.mean(shared):.4f} of the ids shared")
    assert worst <= nats

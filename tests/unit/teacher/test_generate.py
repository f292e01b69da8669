import json
import math

import numpy as np
import pytest
import tiny_chat
import torch
from tiny_chat import command, records_of, write_prompts
from tiny_teacher import full_logprobs, write_teacher
from transformers import LlamaForCausalLM

from megatron_kd.cli import main
from megatron_kd.data.sequences import SequenceReader
from megatron_kd.teacher.engines.base import EngineError
from megatron_kd.teacher.generators.base import Sampling
from megatron_kd.teacher.generators.decoding import draw_tokens

FP32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


def most_likely(model, prompt, count, ends):
    """The definition: one token after the other, each from a pass over everything before it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (
        len(tokens) == len(prompt) or tokens[-1] not in ends
    ):
        tokens.append(int(full_logprobs(model, tokens, model.config.vocab_size)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_responses_are_the_models_own(chat_model_dir, prompts, tmp_path, capsys):
    greedy = ("--temperature", "0", *FP32)
    assert main(command(prompts, chat_model_dir, tmp_path / "out", *greedy)) == 0
    model = LlamaForCausalLM.from_pretrained(chat_model_dir).eval()
    tokenizer = tiny_chat.tiny_chat_tokenizer()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    given = [json.loads(line)["messages"] for line in prompts.read_text().splitlines()]
    found = records_of(tmp_path / "out")
    assert [record["prompt_number"] for record in found] == list(range(len(given)))
    for record, turns in zip(found, given, strict=True):
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        assert record["prompt"] == turns
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text).input_ids
        response = record["tokens"][len(prompt) :]
        assert record["tokens"][: len(prompt)] == prompt
        assert record["loss_mask"] == [0] * len(prompt) + [1] * len(response)
        assert response == most_likely(model, prompt, 12, manifest["ends"])
        over = response[-1] in manifest["ends"]
        assert record["stop_reason"] == ("stop" if over else "length")
        assert record["truncated"] is not over
        assert record["response"] == tokenizer.decode(response[:-1] if over else response)
    assert f"{sum(r['truncated'] for r in found)} cut short" in capsys.readouterr().out
    assert manifest["sampling"]["seed"] == 1234 and manifest["sampling"]["temperature"] == 0
    assert manifest["stop_reasons"]["length"] == sum(r["truncated"] for r in found)


def test_responses_end_where_the_template_and_the_model_say(chat_model_dir, prompts, tmp_path):
    """<|end|> is the tokenizer's and the template's, 2 the configuration's."""
    assert main(command(prompts, chat_model_dir, tmp_path / "out", *FP32, "--samples", "9")) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    end = tiny_chat.tiny_chat_tokenizer().convert_tokens_to_ids("<|end|>")
    assert manifest["ends"] == [2, end]
    found = records_of(tmp_path / "out")
    whole = [record for record in found if not record["truncated"]]
    assert whole and len(found) == 63
    for record in found:
        response = [t for t, m in zip(record["tokens"], record["loss_mask"], strict=True) if m]
        assert not set(response[:-1]) & {2, end}
        assert (response[-1] in (2, end)) is not record["truncated"]
        assert record["truncated"] is (len(response) == 12 and response[-1] not in (2, end))


def test_what_is_drawn_depends_on_seed_and_prompt_alone(chat_model_dir, prompts, tmp_path):
    base = ("--samples", "2", *FP32)

    def drawn(name, *more):
        assert main(command(prompts, chat_model_dir, tmp_path / name, *base, *more)) == 0
        return {(r["prompt_number"], r["sample"]): r["tokens"] for r in records_of(tmp_path / name)}

    one = drawn("one")
    assert drawn("alone", "--batch-tokens", "1") == one
    assert drawn("larger", "--shard-prompts", "5") == one
    assert drawn("kept", "--capture", "--topk", "4") == one
    other = drawn("other", "--seed", "5")
    assert all(other[key] != tokens for key, tokens in one.items())
    assert all(one[number, 0] != one[number, 1] for number in range(7))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.5), Sampling(top_k=4), Sampling(top_p=0.7)]
    + [Sampling(temperature=2.0, top_k=6, top_p=0.8)],
    ids=str,
)
def test_draws_follow_the_distribution(sampling):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator) * 2
    want = (logits.double() / sampling.temperature).softmax(-1)
    order = want.argsort(descending=True)
    kept = order[: sampling.top_k or 9]
    want = torch.zeros(9, dtype=torch.double).scatter(0, kept, want[kept] / want[kept].sum())
    for place, v in enumerate(order.tolist()):  # the smallest leading set that reaches top_p
        if want[order[:place]].sum() >= sampling.top_p:
            want[v] = 0
    want = want / want.sum()
    count = 20_000
    uniforms = np.random.default_rng(0).random(count)
    drawn = draw_tokens(logits.expand(count, -1), sampling, uniforms)
    share = torch.bincount(drawn, minlength=9).double() / count
    assert (share[want == 0] == 0).all()
    error = (share - want).abs()
    assert (error <= 5 * (want * (1 - want) / count).sqrt() + 1e-12).all()


def test_a_draw_at_the_border_is_a_token_that_can_come():
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    for sampling in (Sampling(), Sampling(top_k=2), Sampling(top_p=0.9)):
        for uniform in (0.0, 0.5, np.nextafter(0.5, 0), np.nextafter(1.0, 0)):
            assert draw_tokens(logits, sampling, [uniform]).item() in (0, 2)


def test_prepare_reads_the_responses_and_trains_them_alone(chat_model_dir, prompts, tmp_path):
    assert main(command(prompts, chat_model_dir, tmp_path / "out", *FP32)) == 0
    arguments = ["--input", str(tmp_path / "out"), "--tokenizer", str(chat_model_dir)]
    more = ["--output", str(tmp_path / "data"), "--seq-length", "127"]
    assert main(["prepare", *arguments, *more, "--validation-fraction", "0"]) == 0
    sequences = list(SequenceReader(tmp_path / "data" / "train"))
    found = records_of(tmp_path / "out")
    assert len(sequences) == len(found)
    for sequence, record in zip(sequences, found, strict=True):
        assert sequence.tokens.tolist() == record["tokens"]
        assert sequence.loss_mask[:-1].tolist() == [bool(m) for m in record["loss_mask"][1:]]


def test_text_is_written_on(chat_model_dir, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "Once upon"}\n{"text": "A <|end|> is text"}\n')
    assert main(command(tmp_path / "texts.jsonl", chat_model_dir, tmp_path / "out", *FP32)) == 0
    tokenizer = tiny_chat.tiny_chat_tokenizer()
    first, second = records_of(tmp_path / "out")
    prompt = tokenizer("Once upon").input_ids
    assert first["prompt"] == "Once upon" and first["tokens"][: len(prompt)] == prompt
    asked = [t for t, m in zip(second["tokens"], second["loss_mask"], strict=True) if not m]
    assert len(asked) == len("A <|end|> is text")


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_share_the_shards_and_make_the_same_bytes(
    workers, chat_model_dir, prompts, tmp_path, capsys
):
    kept = (*FP32, "--capture", "--topk", "4", "--validation-fraction", "0.3")
    assert main(command(prompts, chat_model_dir, tmp_path / "one", *kept)) == 0
    for index in reversed(range(workers)):
        capsys.readouterr()
        share = ("--worker", f"{index}/{workers}", *kept)
        assert main(command(prompts, chat_model_dir, tmp_path / "many", *share)) == 0
        assert ("waits" in capsys.readouterr().out) == (index > 0)
        assert (tmp_path / "many" / "responses.jsonl").exists() == (index == 0)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many")
    assert len(bytes_of(tmp_path / "one")) >= 6


def bytes_of(folder):
    """Every file but the caches' manifests, which also say where they lay."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (path.parent == folder or not path.name.startswith("manifest."))
    }


def test_a_rerun_makes_only_what_is_missing(chat_model_dir, prompts, tmp_path, monkeypatch):
    share = command(prompts, chat_model_dir, tmp_path / "out", *FP32)
    assert main([*share, "--worker", "1/2"]) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "parts").iterdir()}
    assert main([*share, "--worker", "0/3"]) == 0  # leaves some to make
    assert {p: p.stat().st_mtime_ns for p in before} == before
    part = min(before)
    part.write_bytes(part.read_bytes()[:-1])  # cut by a disk: not whole
    assert main(share) == 0
    assert not (tmp_path / "out" / "parts").exists()
    assert main(command(prompts, chat_model_dir, tmp_path / "whole", *FP32)) == 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")

    def refuse(*args, **kwargs):
        raise AssertionError("the model was loaded for complete responses")

    monkeypatch.setattr("megatron_kd.teacher.generators.decoding.load_model", refuse)
    assert main(share) == 0


@pytest.mark.parametrize(
    "other",
    [["--seed", "7"], ["--top-p", "0.9"], ["--samples", "2"], ["--max-new-tokens", "11"]]
    + [["--shard-prompts", "3"], ["--dtype", "bfloat16"], ["--max-prompts", "5"]]
    + [["--capture", "--topk", "4"]],
    ids=" ".join,
)
def test_a_rerun_with_other_settings_is_refused(other, chat_model_dir, prompts, tmp_path, capsys):
    share = command(prompts, chat_model_dir, tmp_path / "out", *FP32)
    assert main([*share, "--worker", "0/2"]) == 0
    assert main([*share, *other]) == 1
    assert "use the same settings, or another directory" in capsys.readouterr().err


def test_other_prompts_or_another_model_are_refused(chat_model_dir, prompts, tmp_path, capsys):
    share = command(prompts, chat_model_dir, tmp_path / "out", *FP32, "--worker", "0/2")
    assert main(share) == 0
    lines = prompts.read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(reversed(lines)))
    assert main(command(tmp_path / "other.jsonl", chat_model_dir, tmp_path / "out", *FP32)) == 1
    assert "prompts" in capsys.readouterr().err
    tiny_chat.write_chat_model(tmp_path / "model", seed=1)
    assert main(command(prompts, tmp_path / "model", tmp_path / "out", *FP32)) == 1
    assert "weights_xxh3_128" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert main(command(prompts, chat_model_dir, tmp_path / "full")) == 1
    assert "choose an empty directory" in capsys.readouterr().err


def refused(tmp_path, model, line, capsys, *more):
    (tmp_path / "bad.jsonl").write_text(line + '\n{"messages": [{"role": "user", "content": "a"}]}')
    share = command(tmp_path / "bad.jsonl", model, tmp_path / "out", *FP32, *more)
    assert main(share) == 1
    message = capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # before anything is begun
    assert main([*share, "--skip-invalid"]) == 0
    assert "left out" in capsys.readouterr().err
    assert len(records_of(tmp_path / "out")) == 1
    return message


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"messages": [{"role": "user", "content": "' + "a" * 250 + '"}]}', "lower --max-new-tok"),
        ('{"text": ""}', "an empty prompt"),
        ('{"tokens": [1, 2]}', "text or messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "before the assistant's"),
        ('{"messages": [{"role": "user", "content": "a<|end|>"}]}', "control token"),
    ],
    ids=["long", "empty", "tokens", "nobody asks", "forged"],
)
def test_a_prompt_that_cannot_be_used_is_named(line, words, chat_model_dir, tmp_path, capsys):
    message = refused(tmp_path, chat_model_dir, line, capsys)
    assert words in message and "bad.jsonl:1" in message


def test_a_tokenizer_without_a_template_or_another_one_is_refused(
    chat_model_dir, prompts, tmp_path, capsys
):
    tokenizer = tiny_chat.tiny_chat_tokenizer(shift=3)
    tokenizer.save_pretrained(tmp_path / "shifted")
    share = command(prompts, chat_model_dir, tmp_path / "out")
    assert main([*share, "--tokenizer", str(tmp_path / "shifted")]) == 1
    assert "another tokenizer" in capsys.readouterr().err
    tokenizer = tiny_chat.tiny_chat_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    assert main([*share, "--tokenizer", str(tmp_path / "plain")]) == 1
    assert "no chat template" in capsys.readouterr().err
    write_teacher(tmp_path / "small", vocab=100)
    small = command(prompts, tmp_path / "small", tmp_path / "out")
    assert main([*small, "--tokenizer", str(chat_model_dir)]) == 1
    assert "fewer than the vocabulary size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sampling_that_makes_no_sense_is_refused():
    for wrong, words in (
        (dict(temperature=-1.0), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(samples=0), "samples"),
        (dict(temperature=0.0, samples=2), "copies"),
    ):
        with pytest.raises(EngineError, match=words):
            Sampling(**wrong)


def test_empty_responses_are_marked(tmp_path, capsys):
    """A model that ends every turn at once."""
    model, tokenizer = tiny_chat.write_chat_model(tmp_path / "model")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[:, 0] = -1.0
        model.lm_head.weight[end] *= -1.0
    model.save_pretrained(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl", 4)
    share = command(tmp_path / "prompts.jsonl", tmp_path / "model", tmp_path / "out", *FP32)
    assert main([*share, "--temperature", "0"]) == 0
    found = records_of(tmp_path / "out")
    said = [record for record in found if record["empty"]]
    assert said and all(r["response"] == "" and r["tokens"][-1] == end for r in said)
    assert f"; {len(said)} empty" in capsys.readouterr().out

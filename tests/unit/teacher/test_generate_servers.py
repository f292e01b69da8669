import numpy as np
import pytest
import tiny_chat
from model_servers import ModelServer
from tiny_chat import command, records_of, write_prompts
from transformers import LlamaForCausalLM

from megatron_kd.cli import main
from megatron_kd.teacher.engines import http_client
from megatron_kd.teacher.engines.base import EngineError, RowRequest
from megatron_kd.teacher.generators import vllm_server

WITH_TOKENS = ["vllm-server", "sglang"]
SERVERS = [*WITH_TOKENS, "openai"]
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="session")
def model(chat_model_dir):
    return LlamaForCausalLM.from_pretrained(chat_model_dir).eval()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 5)


@pytest.fixture(scope="module")
def here(chat_model_dir, prompts, tmp_path_factory):
    """What the model answers in this process."""
    folder = tmp_path_factory.mktemp("here") / "out"
    assert main(command(prompts, chat_model_dir, folder, *GREEDY, "--dtype", "float32")) == 0
    return records_of(folder)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http_client, "_FIRST_WAIT_S", 0.01)


def serve(model, **options):
    return ModelServer(model, tokenizer=tiny_chat.tiny_chat_tokenizer(), **options)


def ask(engine, server, prompts, tokenizer, output, *more):
    options = ("--engine", engine, "--server", server.address, "--tokenizer", str(tokenizer))
    return main(command(prompts, "tiny", output, *options, *more))


@pytest.mark.parametrize("engine", WITH_TOKENS)
def test_responses_equal_those_in_this_process(
    engine, model, prompts, here, chat_model_dir, tmp_path
):
    with serve(model) as server:
        assert ask(engine, server, prompts, chat_model_dir, tmp_path / "out", *GREEDY) == 0
        bodies = server.bodies
    found = records_of(tmp_path / "out")
    # A server's model may end at tokens that its directory names; here only the tokenizer is seen.
    for got, want in zip(found, here, strict=True):
        shared = min(len(got["tokens"]), len(want["tokens"]))
        assert got["tokens"][:shared] == want["tokens"][:shared]
        assert got["prompt"] == want["prompt"]
    assert sum(got["tokens"] == want["tokens"] for got, want in zip(found, here, strict=True)) >= 3
    seeds = {body.get("seed") or body["sampling_params"]["sampling_seed"] for body in bodies}
    assert len(seeds) == len(here)


def test_words_of_a_server_become_its_tokens(model, here, chat_model_dir, tmp_path):
    """Of a model that says letters alone, since bytes that are no text do not survive as words."""
    tokenizer = tiny_chat.tiny_chat_tokenizer()
    told = LlamaForCausalLM.from_pretrained(chat_model_dir).eval()
    spoken = [tokenizer.convert_tokens_to_ids(c) for c in "abcdefghij"]
    silent = np.setdiff1d(np.arange(len(tokenizer)), [*spoken, tokenizer.eos_token_id])
    told.lm_head.weight.data[silent] = 0.0
    told.lm_head.weight.data[spoken] *= 30
    told.lm_head.weight.data[tokenizer.eos_token_id] *= 30
    told.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 9)
    with open(prompts, "a") as file:
        file.write('{"text": "abc"}\n')
    share = command(prompts, tmp_path / "model", tmp_path / "here", *GREEDY, "--dtype", "float32")
    assert main(share) == 0
    with serve(told) as server:
        assert ask("openai", server, prompts, chat_model_dir, tmp_path / "out", *GREEDY) == 0
    got, want = records_of(tmp_path / "out"), records_of(tmp_path / "here")
    assert {record["truncated"] for record in got} == {True, False}
    for one, other in zip(got, want, strict=True):
        one.pop("message", None)
        assert one == other


@pytest.mark.parametrize("engine", SERVERS)
def test_a_server_that_dies_costs_no_finished_shard(
    engine, model, prompts, chat_model_dir, tmp_path, capsys
):
    """One of five shards comes, then only overload answers; the same command goes on later."""
    more = (*GREEDY, "--concurrency", "1", "--retries", "1", "--shard-prompts", "1")
    faults = ["fine", *["503"] * 8]
    with serve(model, faults=faults) as server:
        assert ask(engine, server, prompts, chat_model_dir, tmp_path / "out", *more) == 1
        message = capsys.readouterr().err
        assert "run the same command again" in message and "503" in message
        parts = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "parts").glob("*.jsonl")}
        assert len(parts) == 1 and not (tmp_path / "out" / "responses.jsonl").exists()
        server.faults.clear()
        before = sum(server.answered.values())
        assert ask(engine, server, prompts, chat_model_dir, tmp_path / "out", *more) == 0
        assert sum(server.answered.values()) == before + 4
    assert len(records_of(tmp_path / "out")) == 5


@pytest.mark.parametrize("engine", WITH_TOKENS)
def test_a_server_with_another_tokenizer_is_found_out(
    engine, model, prompts, chat_model_dir, tmp_path, capsys
):
    tiny_chat.tiny_chat_tokenizer(shift=7).save_pretrained(tmp_path / "shifted")
    with serve(model) as server:
        assert ask(engine, server, prompts, tmp_path / "shifted", tmp_path / "out", *GREEDY) == 1
        assert "another tokenizer" in capsys.readouterr().err
        assert not list((tmp_path / "out" / "parts").glob("*"))
        assert ask(engine, server, prompts, chat_model_dir, tmp_path / "right", *GREEDY) == 0


@pytest.mark.parametrize(
    "engine, more, words",
    [
        ("vllm-server", (), "--tokenizer DIR"),
        ("openai", ("--top-k", "5"), "no top_k"),
        ("openai", ("--capture",), "no distributions"),
        ("sglang", ("--capture",), "no distributions"),
        ("vllm-server", ("--capture", "--temperatures", "2"), "temperatures"),
    ],
)
def test_what_a_server_cannot_do_is_refused(
    engine, more, words, prompts, chat_model_dir, tmp_path, capsys
):
    options = ["--engine", engine, "--server", "http://127.0.0.1:1"]
    if more:
        options += ["--tokenizer", str(chat_model_dir)]
    assert main(command(prompts, "tiny", tmp_path / "out", *options, *more)) == 1
    assert words in capsys.readouterr().err


def test_an_answer_of_another_form_is_refused():
    request = RowRequest(topk=2, vocab_size=9)
    good = {
        "token_ids": [3, 8],
        "prompt_token_ids": [1],
        "finish_reason": "stop",
        "logprobs": {
            "top_logprobs": [
                {"token_id:3": -1.0, "token_id:1": -2.0},
                {"token_id:8": -1.0, "token_id:1": -2.0},
            ]
        },
    }

    def parse(**changed):
        return vllm_server.parse_completion({"choices": [good | changed]}, [1], [8], request)

    assert parse().rows.topk_ids.tolist() == [[3, 1], [8, 1]]
    for changed, words in (
        (dict(token_ids=None), "0.10.2"),
        (dict(prompt_token_ids=[2]), "another prompt"),
        (dict(logprobs=None), "not objects"),
        (dict(logprobs={"top_logprobs": [{"a": -1.0}] * 2}), "not objects"),
        (dict(logprobs={"top_logprobs": good["logprobs"]["top_logprobs"][:1]}), "no candidates"),
        (dict(token_ids=[5, 8]), "own token 5"),
    ):
        with pytest.raises(EngineError, match=words):
            parse(**changed)
    left_out = parse(token_ids=[3], stop_reason=8)
    assert left_out.tokens.tolist() == [3, 8]  # a server that keeps the end to itself

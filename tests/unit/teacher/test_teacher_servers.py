import base64
import time
from dataclasses import replace

import numpy as np
import pytest
from model_servers import ModelServer
from tiny_teacher import VOCAB, documents, full_logprobs
from transformers import LlamaForCausalLM

from megatron_kd.teacher.engines import http_client
from megatron_kd.teacher.engines.base import (
    EngineError,
    EngineUnavailable,
    RowRequest,
    TeacherDocument,
)
from megatron_kd.teacher.engines.http_client import HttpOptions
from megatron_kd.teacher.engines.sglang import SglangEngine
from megatron_kd.teacher.engines.transformers import TransformersEngine, TransformersOptions
from megatron_kd.teacher.engines.vllm_server import VllmServerEngine

ENGINES = [VllmServerEngine, SglangEngine]
REQUEST = RowRequest(topk=9, vocab_size=VOCAB)


@pytest.fixture(scope="session")
def model(teacher_dir):
    return LlamaForCausalLM.from_pretrained(teacher_dir).eval()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http_client, "_FIRST_WAIT_S", 0.01)


def ask(engine, server, docs, request=REQUEST, **options):
    made = engine("tiny", request, HttpOptions(server=(server.address,), **options))
    return dict(made.stream(docs))


@pytest.mark.parametrize("top_p", [1.0, 0.4])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_equal_the_transformers_engine(engine, flat, top_p, model, teacher_dir):
    docs = documents(0, [1, 2, 17, 40, 33])
    request = replace(REQUEST, top_p=top_p)
    want = dict(TransformersEngine(teacher_dir, request, TransformersOptions()).stream(docs))
    with ModelServer(model, flat=flat) as server:
        got = ask(engine, server, docs, request)
    assert any((rows.topk_ids == -1).any() for rows in want.values()) is (top_p < 1)
    assert sorted(got) == sorted(want)
    for index in want:
        np.testing.assert_array_equal(got[index].topk_ids, want[index].topk_ids)
        np.testing.assert_allclose(got[index].topk_logprobs, want[index].topk_logprobs, atol=1e-4)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_tokens_log_probability_is_the_transformers_engines(
    engine, flat, model, teacher_dir
):
    docs = [replace(d, rows=d.rows[d.rows + 1 < len(d.tokens)]) for d in documents(7, [17, 40, 9])]
    request = replace(REQUEST, labels=True)
    want = dict(TransformersEngine(teacher_dir, request, TransformersOptions()).stream(docs))
    with ModelServer(model, flat=flat) as server:
        got = ask(engine, server, docs, request)
        outside = 0
        for index, document in enumerate(docs):
            rows = full_logprobs(model, document.tokens)[document.rows]
            truth = rows[range(len(rows)), document.labels()]
            np.testing.assert_allclose(want[index].label_logprobs, truth, atol=1e-5)
            np.testing.assert_allclose(got[index].label_logprobs, truth, atol=1e-4)
            outside += int((got[index].topk_ids != document.labels()[:, None]).all(1).sum())
        assert outside > 10
        last = TeacherDocument(docs[0].tokens, np.array([len(docs[0].tokens) - 1]))
        with pytest.raises(EngineError, match="last position is supervised"):
            ask(engine, server, [last], request)


def test_sglangs_token_log_probabilities_are_those_of_the_prompt(model):
    def spoil(answer):
        answer["meta_info"]["input_token_logprobs"][3][1] += 1
        return answer

    def lose(answer):
        del answer["meta_info"]["input_token_logprobs"]
        return answer

    request, docs = replace(REQUEST, labels=True), [documents(8, [12])[0]]
    docs[0] = replace(docs[0], rows=docs[0].rows[:3])
    for fault, words in ((spoil, "another prompt"), (lose, "malformed")):
        with ModelServer(model, faults=[fault]) as server:
            with pytest.raises(EngineError, match=words):
                ask(SglangEngine, server, docs, request)


@pytest.mark.parametrize("engine", ENGINES)
def test_faults_are_retried_and_nothing_is_doubled(engine, model):
    docs = documents(1, [20] * 12)
    faults = ["503", "drop", "drop", "503", "hang"]
    with ModelServer(model, faults=faults) as server:
        seen = []
        made = engine(
            "tiny", REQUEST, HttpOptions(server=(server.address,), concurrency=3, timeout_s=4)
        )
        for index, _ in made.stream(docs):
            seen.append(index)
        assert sorted(seen) == list(range(12))
        assert sum(server.prompts.values()) == 12 + len(faults)
        assert set(server.answered.values()) == {1}
        assert server.most_running <= 3


@pytest.mark.parametrize("engine", ENGINES)
def test_dead_server_is_a_clear_error(engine, model):
    with ModelServer(model) as server:
        address = server.address
    options = HttpOptions(server=(address,), retries=2)
    with pytest.raises(EngineUnavailable, match="run the same command again"):
        engine.describe("tiny", options)
    with pytest.raises(EngineUnavailable, match="after 3 tries"):
        list(engine("tiny", REQUEST, options).stream(documents(2, [5])))


def test_pauses_between_tries_grow_up_to_a_bound(monkeypatch):
    pauses = []

    async def sleep(pause_s):
        pauses.append(pause_s)

    with ModelServer(None) as dead:
        pass
    monkeypatch.setattr(http_client.asyncio, "sleep", sleep)
    monkeypatch.setattr(http_client, "_LONGEST_WAIT_S", 0.05)
    with pytest.raises(EngineUnavailable):
        SglangEngine.describe("tiny", HttpOptions(server=(dead.address,), retries=5))
    bounds = [0.01, 0.02, 0.04, 0.05, 0.05]
    assert len(pauses) == len(bounds)
    for pause_s, bound_s in zip(pauses, bounds, strict=True):
        assert bound_s / 2 <= pause_s <= bound_s


@pytest.mark.parametrize("engine", ENGINES)
def test_one_of_two_servers_dies_and_the_other_goes_on(engine, model):
    with ModelServer(model) as dead:
        pass
    with ModelServer(model) as server:
        options = HttpOptions(server=(dead.address, server.address), retries=3)
        docs = documents(3, [9] * 6)
        assert len(list(engine("tiny", REQUEST, options).stream(docs))) == 6


@pytest.mark.parametrize("engine", ENGINES)
def test_closing_the_stream_stops_the_work(engine, model):
    with ModelServer(model) as server:
        options = HttpOptions(server=(server.address,), concurrency=2)
        stream = engine("tiny", REQUEST, options).stream(documents(4, [30] * 50))
        next(stream)
        stream.close()
        time.sleep(0.1)
        assert sum(server.prompts.values()) <= 6


@pytest.mark.parametrize("engine", ENGINES)
def test_another_model_is_refused(engine, model):
    with ModelServer(model, name="other") as server:
        with pytest.raises(EngineError, match="does not serve 'tiny' but other"):
            engine.describe("tiny", HttpOptions(server=(server.address,)))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_server_names_itself(engine, model):
    with ModelServer(model) as server:
        teacher = engine.describe("tiny", HttpOptions(server=(server.address,)))
    assert teacher.fingerprint["name"] == "tiny"
    assert teacher.version in ("vllm 0.32.0 (server)", "sglang 0.5.23 (server)")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_key_goes_to_the_server_and_nowhere_else(engine, model, monkeypatch):
    monkeypatch.setenv("MEGATRON_KD_API_KEY", "secret-7")
    with ModelServer(model) as server:
        options = HttpOptions(server=(server.address,))
        engine.describe("tiny", options)
        list(engine("tiny", REQUEST, options).stream(documents(8, [5])))
        assert set(server.keys) == {"Bearer secret-7"}
    assert "secret" not in repr(options)


def test_vllm_limit_is_reported_with_the_servers_words(model):
    with ModelServer(model, max_logprobs=5) as server:
        with pytest.raises(EngineError, match="greater than max allowed: 5"):
            ask(VllmServerEngine, server, documents(5, [4]))


def test_vllm_requests_do_not_share_prefixes(model):
    docs = documents(6, [8, 8])
    with ModelServer(model) as server:
        ask(VllmServerEngine, server, [docs[0], docs[0]])
        salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 2


def spoil(path, change):
    """A fault that changes one place of an answer."""

    def fault(answer):
        at = answer
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = change(at.get(path[-1]) if isinstance(at, dict) else at[path[-1]])
        return answer

    return fault


CHOICE = ("choices", 0)
VLLM_FAULTS = {
    "not JSON": lambda answer: "<html>",
    "a list": lambda answer: [answer],
    "no choice": spoil(("choices",), lambda _: []),
    "no prompt_logprobs": spoil((*CHOICE, "prompt_logprobs"), lambda _: None),
    "a position missing": spoil((*CHOICE, "prompt_logprobs"), lambda ps: ps[:-1]),
    "an empty position": spoil((*CHOICE, "prompt_logprobs", 3), lambda _: None),
    "too few candidates": spoil(
        (*CHOICE, "prompt_logprobs", 3), lambda p: dict(list(p.items())[:4])
    ),
    "strings for ids": spoil((*CHOICE, "prompt_logprobs", 3), lambda p: {f"w{k}": p[k] for k in p}),
    "text for a logprob": spoil(
        (*CHOICE, "prompt_logprobs", 3), lambda p: {k: {"logprob": "x"} for k in p}
    ),
    "padding id": spoil(
        (*CHOICE, "prompt_logprobs", 3), lambda p: {**p, str(VOCAB): {"logprob": -0.1}}
    ),
    "probabilities": spoil(
        (*CHOICE, "prompt_logprobs", 3),
        lambda p: {k: {"logprob": np.exp(v["logprob"])} for k, v in p.items()},
    ),
    "renormalised": spoil(
        (*CHOICE, "prompt_logprobs", 3), lambda p: {k: {"logprob": -0.5} for k in p}
    ),
    "NaN": spoil(
        (*CHOICE, "prompt_logprobs", 3), lambda p: {k: {"logprob": float("nan")} for k in p}
    ),
    "shifted by one": spoil((*CHOICE, "prompt_logprobs"), lambda ps: [None, *ps[2:], ps[1]]),
    "another prompt": spoil((*CHOICE, "prompt_token_ids"), lambda ids: ids[::-1]),
}
META = ("meta_info",)
SGLANG_FAULTS = {
    "not JSON": lambda answer: "oops",
    "no meta_info": spoil(META, lambda _: None),
    "no candidates": spoil(META, lambda _: {"prompt_tokens": 12}),
    "another length": spoil((*META, "prompt_tokens"), lambda n: n + 1),
    "bad base64": spoil((*META, "input_top_logprobs_val_flat_b64"), lambda _: "@@@"),
    "short array": spoil((*META, "input_top_logprobs_idx_flat_b64"), lambda text: text[:-8]),
    "bad shape": spoil((*META, "input_top_logprobs_shape"), lambda _: "x"),
    "NaN": spoil(
        (*META, "input_top_logprobs_val_flat_b64"),
        lambda text: base64.b64encode(b"\x00\x00\xc0\x7f" * (len(text) * 3 // 16)).decode(),
    ),
    "cached prefix": spoil((*META, "input_top_logprobs_null_prefix"), lambda _: 0),
}


@pytest.mark.parametrize(
    ("engine", "fault"),
    [(VllmServerEngine, f) for f in VLLM_FAULTS] + [(SglangEngine, f) for f in SGLANG_FAULTS],
)
def test_malformed_answers_are_refused(engine, fault, model):
    spoiler = (VLLM_FAULTS if engine is VllmServerEngine else SGLANG_FAULTS)[fault]
    docs = documents(7, [12], supervised=1.0)
    with ModelServer(model, faults=[spoiler]) as server:
        with pytest.raises(EngineError):
            ask(engine, server, docs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "request_",
    [
        RowRequest(topk=3, vocab_size=VOCAB, temperatures=(2.0,)),
        RowRequest(topk=3, vocab_size=VOCAB, hidden=True),
        RowRequest(topk=3, vocab_size=VOCAB, sampling="random"),
    ],
    ids=["temperatures", "hidden", "random"],
)
def test_what_lists_cannot_give_is_refused(engine, request_):
    with pytest.raises(EngineError, match="transformers"):
        engine("tiny", request_, HttpOptions(server=("http://localhost:1",)))


@pytest.mark.parametrize(
    "wrong",
    [{"server": ()}, {"server": ("localhost:8000",)}, {"concurrency": 0}, {"timeout_s": 0}],
    ids=str,
)
def test_senseless_options_are_refused(wrong):
    with pytest.raises(EngineError):
        HttpOptions(**{"server": ("http://localhost:8000",), **wrong})

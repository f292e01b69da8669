"""vLLM itself, in process and behind its server, against transformers on SmolLM2.

scripts/setup_vllm.sh makes the environment (minutes, 4 GB) where it is not there yet.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from dump_rows import load_documents, main

from megatron_kd.cache import CacheReader
from megatron_kd.teacher.engines import engine_class
from megatron_kd.teacher.engines.base import EngineError, RowRequest
from megatron_kd.teacher.engines.http_client import HttpOptions

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
TOPK, VOCAB = 100, 49152
NATS = 0.01


@pytest.fixture(scope="session")
def vllm_python():
    subprocess.run(["bash", REPOSITORY / "scripts/setup_vllm.sh"], check=True)
    return REPOSITORY / ".venv-vllm/bin/python"


@pytest.fixture(scope="session")
def vllm_environment():
    return {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@pytest.fixture(scope="session")
def truth(smollm2, documents_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("truth") / "rows.npz"
    main("transformers", str(smollm2), TOPK, VOCAB, documents_file, path, '{"dtype": "float32"}')
    return dict(np.load(path))


def assert_same_rows(got_ids, got_logprobs, want_ids, want_logprobs, nats=NATS):
    """Ids equal up to ties, log-probabilities within `nats`."""
    assert got_ids.shape == want_ids.shape
    for ids, logprobs, true_ids, true_logprobs in zip(
        got_ids, got_logprobs, want_ids, want_logprobs, strict=True
    ):
        assert len(set(ids.tolist())) == TOPK and ids.min() >= 0
        assert (np.diff(logprobs) <= 0).all()
        np.testing.assert_allclose(logprobs, true_logprobs, atol=nats, rtol=0)
        mine, true = (
            dict(zip(ids, logprobs, strict=True)),
            dict(zip(true_ids, true_logprobs, strict=True)),
        )
        for v in mine.keys() & true.keys():
            assert abs(mine[v] - true[v]) <= nats
        for v in mine.keys() ^ true.keys():
            assert mine.get(v, true.get(v)) - true_logprobs[-1] <= nats


def test_in_process(smollm2, documents_file, truth, vllm_python, vllm_environment, tmp_path):
    script = Path(__file__).with_name("dump_rows.py")
    options = '{"dtype": "float32", "max_model_len": 1024}'
    arguments = [
        "vllm",
        smollm2,
        str(TOPK),
        str(VOCAB),
        documents_file,
        tmp_path / "rows.npz",
        options,
    ]
    subprocess.run([vllm_python, script, *arguments], check=True, env=vllm_environment)
    rows = dict(np.load(tmp_path / "rows.npz"))
    assert str(rows["version"]).startswith("vllm 0.32.0")
    assert rows["tokenizer"] == truth["tokenizer"]
    for index in range(3):
        assert_same_rows(
            rows[f"ids{index}"],
            rows[f"logprobs{index}"],
            truth[f"ids{index}"],
            truth[f"logprobs{index}"],
        )


@pytest.fixture(scope="session")
def server(smollm2, vllm_python, vllm_environment, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [
        vllm_python,
        *("-m", "vllm.entrypoints.openai.api_server"),  # `vllm serve` asks for a package named vllm
        *("--model", smollm2),
        *("--served-model-name", "smollm2"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "1024"),
        *("--max-logprobs", str(TOPK), "--no-enable-prefix-caching"),
    ]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=vllm_environment, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 1200
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[
                    -3000:
                ]
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:  # its engine and worker processes too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_server(server, documents_file, truth):
    kind = engine_class("vllm-server")
    options = HttpOptions(server=(server,), concurrency=2)
    assert kind.describe("smollm2", options).version == "vllm 0.32.0 (server)"
    engine = kind("smollm2", RowRequest(topk=TOPK, vocab_size=VOCAB), options)
    documents = load_documents(documents_file)
    rows = dict(engine.stream([*documents, documents[0]]))  # one twice: no prefix may be reused
    for place, index in enumerate([0, 1, 2, 0]):
        found = rows[place]
        assert_same_rows(
            found.topk_ids, found.topk_logprobs, truth[f"ids{index}"], truth[f"logprobs{index}"]
        )


def test_server_refuses_more_than_its_limit(server, documents_file):
    engine = engine_class("vllm-server")(
        "smollm2", RowRequest(topk=TOPK + 1, vocab_size=VOCAB), HttpOptions(server=(server,))
    )
    with pytest.raises(EngineError, match="max"):
        list(engine.stream(load_documents(documents_file)))


def test_capture_through_the_server(server, smollm2, prose, tmp_path):
    """The whole command, with real prepared text."""
    from megatron_kd.cache import CacheReader

    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": words * 2}) + "\n" for words in prose))
    cli = [sys.executable, "-m", "megatron_kd.cli"]
    prepare = ["prepare", "--input", text, "--tokenizer", smollm2, "--seq-length", "32"]
    prepare += ["--validation-fraction", "0", "--output", tmp_path / "data"]
    subprocess.run([*cli, *prepare], check=True)
    for engine in (
        ["--engine", "vllm-server", "--server", server, "--teacher", "smollm2"],
        ["--engine", "transformers", "--teacher", smollm2, "--dtype", "float32"],
    ):
        output = tmp_path / engine[1]
        subprocess.run(
            [*cli, "capture", "--data", tmp_path / "data", "--output", output, *engine], check=True
        )
    one = CacheReader(tmp_path / "vllm-server" / "train")
    other = CacheReader(tmp_path / "transformers" / "train")
    assert len(one) == len(other) >= 3
    for index in range(len(one)):
        mask = other[index].loss_mask
        np.testing.assert_array_equal(one[index].tokens, other[index].tokens)
        np.testing.assert_array_equal(one[index].loss_mask, mask)
        assert_same_rows(
            one[index].topk_ids[mask],
            one[index].topk_logprobs[mask],
            other[index].topk_ids[mask],
            other[index].topk_logprobs[mask],
            nats=2 * NATS,  # both are stored within 0.005
        )


PROMPTS = ("What is the capital of France?", "Name three colors.", "What is 2 + 3?")


def generated(python, environment, prompts, model, output, *more):
    """The records of a greedy generation in whatever environment, and the rows that it kept."""
    command = [python, "-m", "megatron_kd", "generate", "--prompts", prompts, "--model", model]
    command += ["--output", output, "--max-new-tokens", "24", "--temperature", "0"]
    command += ["--capture", "--topk", "20", "--codec", "fp16", "--validation-fraction", "0", *more]
    subprocess.run(list(map(str, command)), check=True, env=environment)
    with open(output / "responses.jsonl", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    reader = CacheReader(output / "cache" / "train")
    return records, [reader[index] for index in range(len(reader))]


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    turns = ([{"role": "user", "content": text}] for text in PROMPTS)
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return path


@pytest.fixture(scope="session")
def generated_here(smollm2, prompts_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("here") / "out"
    return generated(
        sys.executable, os.environ, prompts_file, smollm2, output, "--dtype", "float32"
    )


def assert_same_generation(got, want):
    (records, samples), (true_records, true_samples) = got, want
    for record, true in zip(records, true_records, strict=True):
        for key in ("tokens", "stop_reason", "response"):
            assert record[key] == true[key]
    for sample, true in zip(samples, true_samples, strict=True):
        np.testing.assert_array_equal(sample.loss_mask, true.loss_mask)
        # Half precision rounds 16 nats and more by up to 0.008.
        np.testing.assert_allclose(
            sample.rows.topk_logprobs, true.rows.topk_logprobs, atol=NATS + 0.016
        )
        shared = sample.rows.topk_ids == true.rows.topk_ids
        assert shared.mean() > 0.9


def test_generation_in_process(
    smollm2, prompts_file, generated_here, vllm_python, vllm_environment, tmp_path
):
    more = ("--engine", "vllm", "--dtype", "float32", "--max-model-len", "1024")
    got = generated(vllm_python, vllm_environment, prompts_file, smollm2, tmp_path / "out", *more)
    assert_same_generation(got, generated_here)


def test_generation_by_the_server(server, smollm2, prompts_file, generated_here, tmp_path):
    more = ("--engine", "vllm-server", "--server", server, "--tokenizer", smollm2)
    got = generated(sys.executable, os.environ, prompts_file, "smollm2", tmp_path / "out", *more)
    assert_same_generation(got, generated_here)


def test_a_servers_words_become_tokens(server, smollm2, prompts_file, generated_here, tmp_path):
    command = [sys.executable, "-m", "megatron_kd", "generate", "--prompts", prompts_file]
    command += ["--model", "smollm2", "--output", tmp_path / "out", "--max-new-tokens", "24"]
    command += ["--temperature", "0", "--engine", "openai", "--server", server]
    subprocess.run([*map(str, command), "--tokenizer", smollm2], check=True)
    with open(tmp_path / "out" / "responses.jsonl", encoding="utf-8") as lines:
        got = [json.loads(line) for line in lines]
    for record, want in zip(got, generated_here[0], strict=True):
        assert record["response"] == want["response"]
        assert record["tokens"] == want["tokens"]

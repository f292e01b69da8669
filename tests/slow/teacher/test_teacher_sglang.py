"""Our SGLang requests and the test server's answers, against the source of the real sglang wheel.

The wheel is fetched with its requirements left out (it needs CUDA to run); its own functions build
the answers that are parsed here, and its own request classes say which fields it takes.
"""

import ast
import asyncio
import base64
import subprocess
import sys
import types
import typing
import zipfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "teacher"))

from model_servers import flat_fields

from megatron_kd.teacher.engines.base import RowRequest, TeacherDocument
from megatron_kd.teacher.engines.http_client import HttpOptions
from megatron_kd.teacher.engines.sglang import SglangEngine, parse_generate

pytestmark = pytest.mark.slow

VERSION = "0.5.23"
MANAGERS = "sglang/srt/managers"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang")
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    subprocess.run([*fetch, f"sglang=={VERSION}"], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        yield lambda name: ast.parse(archive.read(name).decode())


def functions(tree, names, **context):
    """Runs only these functions of a module, with what they need given."""
    chosen = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert {n.name for n in chosen} == set(names)
    scope = {**vars(typing), "np": np, **context}
    exec(compile(ast.Module(chosen, []), "sglang", "exec"), scope)
    return [scope[name] for name in names]


def method(tree, class_name, name):
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    scope = {**vars(typing), "Req": object}
    found = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name]
    exec(compile(ast.Module(found, []), "sglang", "exec"), scope)
    return scope[name]


def fields_of(tree, class_name):
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    return {n.target.id for n in owner.body if isinstance(n, ast.AnnAssign)}


@pytest.fixture(scope="session")
def builders(wheel):
    layout, arrays = functions(
        wheel(f"{MANAGERS}/io_struct.py"),
        ["flat_top_logprobs_layout", "build_flat_top_logprobs_arrays"],
    )
    (encode,) = functions(
        wheel(f"{MANAGERS}/tokenizer_manager.py"),
        ["_build_flat_top_logprobs_fields_from_arrays"],
        pybase64=base64,
    )
    return layout, arrays, encode


def candidates(seed, rows=6, topk=4):
    rng = np.random.default_rng(seed)
    values = -np.sort(rng.exponential(2, (rows, topk)).astype(np.float32), -1)
    ids = np.array([rng.choice(200000, topk, replace=False) for _ in range(rows)], np.int32)
    return values, ids


def test_request_fields_exist_in_sglang(wheel):
    """What the engine really sends, field by field."""
    sent = {}

    class Client:
        async def ask(self, path, body):
            sent.update(body)
            raise InterruptedError

    request = RowRequest(topk=4, vocab_size=200000)
    engine = SglangEngine("m", request, HttpOptions(server=("http://localhost:1",)))
    document = TeacherDocument(np.arange(7, dtype=np.int32), np.arange(6))
    with pytest.raises(InterruptedError):
        asyncio.run(engine._rows(Client(), document))
    known = fields_of(wheel(f"{MANAGERS}/io_struct.py"), "GenerateReqInput")
    assert set(sent) <= known, set(sent) - known
    parameters = fields_of(wheel("sglang/srt/sampling/sampling_params.py"), "SamplingParams")
    assert set(sent["sampling_params"]) <= parameters


def test_paths_exist_in_sglang(wheel):
    tree = wheel("sglang/srt/entrypoints/http_server.py")
    paths = {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        for argument in decorator.args
        if isinstance(argument, ast.Constant)
    }
    assert {"/generate", "/model_info", "/server_info", "/get_model_info"} <= paths
    named = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert {"model_path", "served_model_name", "weight_version", "version"} <= named
    manager = wheel(f"{MANAGERS}/tokenizer_manager.py")
    assert "prompt_tokens" in {n.value for n in ast.walk(manager) if isinstance(n, ast.Constant)}


@pytest.mark.parametrize("encoded", [True, False], ids=["base64", "lists"])
def test_flat_answers_built_by_sglang_are_read(encoded, builders):
    _, arrays, encode = builders
    values, ids = candidates(0)
    rows = [None, *values.tolist()], [None, *ids.tolist()]
    meta = encode("input", *arrays(*rows, 4), return_b64=encoded)
    lists = parse_generate({"meta_info": {**meta, "prompt_tokens": 7}}, list(range(7)))
    assert lists[0] is None
    for (got_ids, got_values), want_ids, want_values in zip(lists[1:], ids, values, strict=True):
        np.testing.assert_array_equal(got_ids, want_ids)
        np.testing.assert_array_equal(got_values, want_values)


def test_the_test_servers_answer_is_sglangs(builders):
    import torch

    _, arrays, encode = builders
    values, ids = candidates(1)
    real = encode(
        "input", *arrays([None, *values.tolist()], [None, *ids.tolist()], 4), return_b64=True
    )
    assert flat_fields(torch.from_numpy(values), torch.from_numpy(ids)) == real


def test_nested_answers_built_by_sglang_are_read(wheel):
    tree = wheel(f"{MANAGERS}/tokenizer_manager.py")
    manager = types.SimpleNamespace()
    one = method(tree, "TokenizerManager", "detokenize_logprob_tokens")
    many = method(tree, "TokenizerManager", "detokenize_top_logprobs_tokens")
    manager.detokenize_logprob_tokens = lambda *a: one(manager, *a)
    values, ids = candidates(2)
    nested = many(manager, [None, *values.tolist()], [None, *ids.tolist()], False)
    lists = parse_generate({"meta_info": {"input_top_logprobs": nested}}, list(range(7)))
    assert lists[0] is None
    np.testing.assert_array_equal(np.array([pair[0] for pair in lists[1:]]), ids)
    np.testing.assert_array_equal(np.array([pair[1] for pair in lists[1:]]), values)


def test_the_first_entry_is_empty_and_the_sampling_position_is_dropped(wheel):
    """The alignment our rows rely on, from the function that puts SGLang's input candidates
    together."""
    tree = wheel(f"{MANAGERS}/scheduler_components/logprob_result_processor.py")
    owner = next(
        n
        for n in tree.body
        if isinstance(n, ast.ClassDef)
        and any(getattr(m, "name", "") == "_process_input_top_logprobs" for m in n.body)
    )
    process = method(tree, owner.name, "_process_input_top_logprobs")
    values, ids = candidates(3, rows=7)
    logprob = types.SimpleNamespace(top_logprobs_num=4)
    req = types.SimpleNamespace(
        logprob=logprob,
        temp_input_top_logprobs_val=[
            values[:3].tolist(),
            values[3:].tolist(),
        ],  # two prefill chunks
        temp_input_top_logprobs_idx=[ids[:3].tolist(), ids[3:].tolist()],
    )
    process(types.SimpleNamespace(_uses_scoring_positions=lambda req: False), req)
    assert logprob.input_top_logprobs_val == [None, *values[:6].tolist()]
    assert logprob.input_top_logprobs_idx == [None, *ids[:6].tolist()]

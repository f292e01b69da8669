import contextlib
import json
import os
import signal
import subprocess

import numpy as np
import pytest
from model_servers import ModelServer
from prepared import random_sequences, write_split
from tiny_teacher import VOCAB, full_logprobs, write_teacher
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM

from megatron_kd.cache import CacheReader
from megatron_kd.cli import main
from megatron_kd.teacher import http_client
from megatron_kd.teacher.engine import EngineError, EngineUnavailable
from megatron_kd.teacher.fingerprint import tokenizer_of
from megatron_kd.teacher.job import CaptureJob, capture, resume
from megatron_kd.teacher.transformers_engine import TransformersEngine
from megatron_kd.teacher.worker import Worker


@pytest.fixture
def data(tmp_path):
    write_split(tmp_path / "data" / "train", random_sequences(0, 12))
    write_split(tmp_path / "data" / "validation", random_sequences(1, 3))
    return tmp_path / "data"


def command(data, teacher, output, *more):
    return [
        "capture",
        *("--data", str(data)),
        *("--teacher", str(teacher)),
        *("--output", str(output)),
        *("--topk", "8", "--shard-positions", "70", "--dtype", "float32"),
        *more,
    ]


def shards_of(folder):
    """Everything but the manifest, which also says where the data lay."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("shard-*"))
    }


def test_rows_in_the_cache_are_the_teachers(data, teacher_dir, tmp_path, capsys):
    assert main(command(data, teacher_dir, tmp_path / "cache", "--codec", "fp16")) == 0
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    reader = CacheReader(tmp_path / "cache" / "train")
    sequences = random_sequences(0, 12)
    assert len(reader) == 12
    for index, (tokens, mask, _) in enumerate(sequences):
        sample = reader[index]
        np.testing.assert_array_equal(sample.tokens, tokens)
        np.testing.assert_array_equal(sample.loss_mask, mask)
        want = full_logprobs(model, tokens)[mask].topk(8)
        # By value: half precision makes ties of close neighbours, and ties go by id.
        np.testing.assert_array_equal(np.sort(sample.topk_ids[mask]), np.sort(want.indices))
        np.testing.assert_allclose(sample.topk_logprobs[mask], want.values, atol=5e-3)
        assert (sample.topk_ids[~mask] == -1).all()
    manifest = reader.manifest
    assert manifest["vocab_size"] == VOCAB and manifest["packing"] == "none"
    assert (
        manifest["engine"]["name"] == "transformers" and "weights_xxh3_128" in manifest["teacher"]
    )
    words = capsys.readouterr()
    assert "estimate from" in words.err and "bytes/position" in words.err
    assert "validation: complete" in words.out


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_share_the_shards_and_make_the_same_bytes(
    workers, data, teacher_dir, tmp_path, capsys
):
    assert main(command(data, teacher_dir, tmp_path / "one")) == 0
    for index in reversed(range(workers)):
        capsys.readouterr()
        share = command(data, teacher_dir, tmp_path / "many", "--worker", f"{index}/{workers}")
        assert main(share) == 0
        assert ("waits" in capsys.readouterr().out) == (index > 0)
    assert shards_of(tmp_path / "one") == shards_of(tmp_path / "many")


def test_a_rerun_makes_only_what_is_missing(data, teacher_dir, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(command(data, teacher_dir, one)) == 0
    assert main(command(data, teacher_dir, two, "--worker", "1/2")) == 0
    before = {path: path.stat().st_mtime_ns for path in two.rglob("shard-*.safetensors")}
    assert main(command(data, teacher_dir, two)) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert shards_of(one) == shards_of(two)

    def refuse(*args, **kwargs):
        raise AssertionError("the teacher was loaded for a complete cache")

    monkeypatch.setattr("megatron_kd.teacher.transformers_engine._load", refuse)
    assert main(command(data, teacher_dir, two)) == 0


@pytest.mark.parametrize(
    "other",
    [["--topk", "9"], ["--codec", "fp16"], ["--top-p", "0.9"], ["--shard-positions", "71"]]
    + [["--dtype", "bfloat16"], ["--temperatures", "2"], ["--sampling", "random"]],
    ids=" ".join,
)
def test_a_rerun_with_other_parameters_is_refused(other, data, teacher_dir, tmp_path, capsys):
    assert main(command(data, teacher_dir, tmp_path / "cache", "--worker", "0/2")) == 0
    assert main(command(data, teacher_dir, tmp_path / "cache", *other)) == 1
    assert "use the same settings, or another directory" in capsys.readouterr().err


def test_a_rerun_with_another_teacher_is_refused(data, teacher_dir, tmp_path, capsys):
    write_teacher(tmp_path / "other", seed=1)
    assert main(command(data, teacher_dir, tmp_path / "cache", "--worker", "0/2")) == 0
    assert main(command(data, tmp_path / "other", tmp_path / "cache")) == 1
    assert "weights_xxh3_128" in capsys.readouterr().err


def test_a_teacher_with_another_tokenizer_is_refused(data, tmp_path, capsys):
    write_teacher(tmp_path / "teacher")
    words = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "teacher/tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (tmp_path / "teacher/tokenizer_config.json").write_text(json.dumps(config))
    assert main(command(data, tmp_path / "teacher", tmp_path / "cache")) == 1
    assert "another tokenizer" in capsys.readouterr().err
    own = tokenizer_of(tmp_path / "teacher")
    write_split(tmp_path / "own" / "train", random_sequences(0, 2), tokenizer=own)
    assert main(command(tmp_path / "own", tmp_path / "teacher", tmp_path / "cache")) == 0


def test_texts_longer_than_the_teacher_reads_are_refused(teacher_dir, tmp_path, capsys):
    write_split(tmp_path / "data" / "train", random_sequences(0, 1, length=300))
    assert main(command(tmp_path / "data", teacher_dir, tmp_path / "cache")) == 1
    assert "--seq-length 256 or less" in capsys.readouterr().err


def test_a_rerun_with_other_data_is_refused(data, teacher_dir, tmp_path, capsys):
    assert main(command(data, teacher_dir, tmp_path / "cache", "--worker", "0/2")) == 0
    write_split(tmp_path / "changed" / "train", random_sequences(9, 12))
    assert main(command(tmp_path / "changed", teacher_dir, tmp_path / "cache")) == 1
    assert "'data'" in capsys.readouterr().err


def test_the_same_prompt_twice_and_prompts_in_two_orders_give_the_same_rows(teacher_dir, tmp_path):
    counting = (np.arange(33, dtype=np.int32), np.arange(33) < 32, np.array([0, 33], np.int32))
    for name in ("a", "b"):
        data = write_split(tmp_path / name / "train", [counting])
        job = CaptureJob(data=str(data), teacher=str(teacher_dir), topk=20, codec="fp16")
        capture({"train": (job, tmp_path / f"cache-{name}")}, Worker())
    assert shards_of(tmp_path / "cache-a") == shards_of(tmp_path / "cache-b")
    three = [*random_sequences(2, 1, length=20), *random_sequences(3, 1, length=41), counting]
    samples = {}
    for name, order in (("forth", [0, 1, 2]), ("back", [2, 0, 1])):
        data = write_split(tmp_path / name / "train", [three[i] for i in order])
        job = CaptureJob(data=str(data), teacher=str(teacher_dir), topk=20, codec="fp16")
        capture({"train": (job, tmp_path / f"cache-{name}")}, Worker())
        reader = CacheReader(tmp_path / f"cache-{name}")
        samples[name] = {i: reader[place] for place, i in enumerate(order)}
    for i in range(3):
        one, other = samples["forth"][i], samples["back"][i]
        assert one.topk_ids.tobytes() == other.topk_ids.tobytes()
        assert one.topk_logprobs.tobytes() == other.topk_logprobs.tobytes()


@pytest.mark.parametrize("packing", ["naive", "block"])
def test_block_packed_documents_are_read_alone(packing, teacher_dir, tmp_path):
    sequences = random_sequences(4, 3, length=40, documents=3)
    data = write_split(tmp_path / "data" / "train", sequences, packing=packing)
    job = CaptureJob(data=str(data), teacher=str(teacher_dir), topk=6, codec="fp16")
    capture({"train": (job, tmp_path / "cache")}, Worker())
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    reader = CacheReader(tmp_path / "cache")
    for index, (tokens, mask, bounds) in enumerate(sequences):
        parts = np.split(tokens, bounds[1:-1]) if packing == "block" else [tokens]
        want = np.concatenate([full_logprobs(model, part).numpy() for part in parts])[mask]
        got = reader[index]
        picked = np.take_along_axis(want, got.topk_ids[mask].astype(np.int64), -1)
        np.testing.assert_allclose(got.topk_logprobs[mask], picked, atol=5e-3)
        np.testing.assert_allclose(got.topk_logprobs[mask][:, 0], want.max(-1), atol=5e-3)


def test_normalisers_and_hidden_states_reach_the_cache(data, teacher_dir, tmp_path):
    more = ["--temperatures", "2", "0.5", "--hidden-dtype", "float32", "--codec", "fp16"]
    assert main(command(data, teacher_dir, tmp_path / "cache", *more)) == 0
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    sample = CacheReader(tmp_path / "cache" / "train")[0]
    mask = sample.loss_mask
    want = full_logprobs(model, sample.tokens)[mask]
    for tau in (2.0, 0.5):
        np.testing.assert_allclose(sample.log_z[tau][mask], (want / tau).logsumexp(-1), atol=1e-4)
    logits = sample.hidden[mask] @ model.lm_head.weight.detach().numpy().T
    np.testing.assert_array_equal(logits.argmax(-1), want.argmax(-1))


def test_padding_rows_of_a_wider_teacher_are_masked(tmp_path):
    model = write_teacher(tmp_path / "teacher", vocab=VOCAB + 5)
    data = write_split(tmp_path / "data" / "train", random_sequences(5, 3))
    job = CaptureJob(data=str(data), teacher=str(tmp_path / "teacher"), topk=VOCAB, codec="fp16")
    capture({"train": (job, tmp_path / "cache")}, Worker())
    sample = CacheReader(tmp_path / "cache")[0]
    ids = sample.topk_ids[sample.loss_mask]
    assert ids.max() == VOCAB - 1
    np.testing.assert_allclose(sample.mass[sample.loss_mask], 1.0, atol=1e-3)
    with pytest.raises(EngineError, match=f"fewer than the vocabulary size {VOCAB + 6}"):
        wide = CaptureJob(data=str(data), teacher=str(tmp_path / "teacher"), vocab_size=VOCAB + 6)
        capture({"train": (wide, tmp_path / "wide")}, Worker())
    del model


def test_resume_makes_the_given_shards_again(data, teacher_dir, tmp_path):
    assert main(command(data, teacher_dir, tmp_path / "cache")) == 0
    split = tmp_path / "cache" / "train"
    before = shards_of(split)
    shards = sorted(split.glob("shard-*.safetensors"))
    kept = shards[0].stat().st_mtime_ns
    damaged = bytearray(shards[2].read_bytes())
    damaged[-7] ^= 4
    shards[2].write_bytes(damaged)
    resume(split, shards=[2])
    assert shards_of(split) == before and shards[0].stat().st_mtime_ns == kept
    shards[1].unlink()
    resume(split)
    assert shards_of(split) == before
    with pytest.raises(ValueError):
        resume(data / "train")


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_complete_cache_that_lost_a_shard_gets_it_back(
    damage, data, teacher_dir, tmp_path, capsys
):
    arguments = command(data, teacher_dir, tmp_path / "cache")
    assert main(arguments) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    shards = sorted((tmp_path / "cache" / "train").glob("shard-*.safetensors"))
    kept = shards[0].stat().st_mtime_ns
    if damage == "missing":
        shards[1].unlink()
    else:
        os.truncate(shards[1], 100)
    capsys.readouterr()
    assert main(arguments) == 0
    assert "shard 1" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert after == before and shards[0].stat().st_mtime_ns == kept


def test_a_key_is_not_sent_to_servers_that_a_manifest_names(
    data, teacher_dir, tmp_path, monkeypatch
):
    """Whoever hands over a cache could put an address of their own into it."""
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    with ModelServer(model) as server:
        job = CaptureJob(
            data=str(data / "train"),
            teacher="tiny",
            engine="sglang",
            topk=8,
            shard_positions=70,
            options={"server": [server.address]},
        )
        capture({"train": (job, tmp_path / "cache")}, Worker())
        asked = len(server.keys)
        monkeypatch.setenv(http_client.API_KEY, "secret")
        with pytest.raises(EngineError, match="megatron-kd capture command again"):
            resume(tmp_path / "cache", shards=[0])
        assert len(server.keys) == asked
        (tmp_path / "cache" / "shard-000000.safetensors").unlink()
        assert capture({"train": (job, tmp_path / "cache")}, Worker()) == {"train": True}


def test_repair_runs_no_remote_code(data, teacher_dir, tmp_path):
    assert main(command(data, teacher_dir, tmp_path / "cache", "--trust-remote-code")) == 0
    with pytest.raises(EngineError, match="--trust-remote-code"):
        resume(tmp_path / "cache" / "train", shards=[0])


def test_verify_repairs_a_broken_shard_by_capturing_it_again(data, teacher_dir, tmp_path, capsys):
    assert main(command(data, teacher_dir, tmp_path / "cache")) == 0
    before = shards_of(tmp_path / "cache")
    shard = tmp_path / "cache" / "train" / "shard-000001.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    assert main(["verify", str(tmp_path / "cache")]) == 1
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "cache"), "--repair"]) == 0
    assert "captured again" in capsys.readouterr().out
    assert shards_of(tmp_path / "cache") == before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_cleanly_and_the_rerun_goes_on(
    name, data, teacher_dir, tmp_path, monkeypatch, capsys
):
    assert main(command(data, teacher_dir, tmp_path / "whole")) == 0
    number, calls = getattr(signal, name), []
    handler = signal.getsignal(number)
    plain = TransformersEngine._run

    def interrupted(engine, documents):
        calls.append(0)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return plain(engine, documents)

    monkeypatch.setattr(TransformersEngine, "_run", interrupted)
    arguments = command(data, teacher_dir, tmp_path / "cache")
    assert main(arguments) == 128 + number
    assert f"stopped by {name}" in capsys.readouterr().err
    assert signal.getsignal(number) is handler
    finished = shards_of(tmp_path / "cache")
    assert 0 < len(finished) < len(shards_of(tmp_path / "whole"))
    assert main(arguments) == 0
    assert shards_of(tmp_path / "cache") == shards_of(tmp_path / "whole")


@contextlib.contextmanager
def small_disk(folder, size_kib):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root and CAP_SYS_ADMIN")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_keeps_finished_shards_and_resumes(teacher_dir, tmp_path, capsys):
    write_split(tmp_path / "data" / "train", random_sequences(6, 60, length=65))
    data = tmp_path / "data"
    assert main(command(data, teacher_dir, tmp_path / "whole", "--shard-positions", "400")) == 0
    whole = shards_of(tmp_path / "whole")
    disk = tmp_path / "disk"
    with small_disk(disk, 64):
        arguments = command(data, teacher_dir, disk / "cache", "--shard-positions", "400")
        assert main(arguments) == 1
        words = capsys.readouterr().err
        assert "No space left" in words and "run the same command again" in words
        finished = sorted((disk / "cache" / "train").glob("shard-*.safetensors"))
        assert finished
        for path in finished:
            assert path.read_bytes() == whole[f"train/{path.name}"]
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert main(arguments) == 0
        assert shards_of(disk / "cache") == whole


@pytest.mark.parametrize("engine", ["vllm-server", "sglang"])
def test_a_dead_server_keeps_finished_shards_and_resumes(
    engine, data, teacher_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(http_client, "_FIRST_WAIT_S", 0.01)
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    common = dict(
        data=str(data / "train"), teacher="tiny", engine=engine, topk=8, shard_positions=70
    )
    with ModelServer(model, faults=[None] * 7 + ["drop"] * 100) as server:
        options = {"server": [server.address], "retries": 1, "concurrency": 2}
        with pytest.raises(EngineUnavailable):
            capture(
                {"train": (CaptureJob(options=options, **common), tmp_path / "cache")}, Worker()
            )
    assert list((tmp_path / "cache").glob("shard-*"))
    with ModelServer(model) as server:
        options = {"server": [server.address]}
        capture({"train": (CaptureJob(options=options, **common), tmp_path / "cache")}, Worker())
    direct = CaptureJob(
        data=str(data / "train"), teacher=str(teacher_dir), topk=8, shard_positions=70
    )
    capture({"train": (direct, tmp_path / "direct")}, Worker())
    got, want = CacheReader(tmp_path / "cache"), CacheReader(tmp_path / "direct")
    for index in range(len(want)):
        mask = want[index].loss_mask
        np.testing.assert_array_equal(got[index].topk_ids, want[index].topk_ids)
        difference = np.abs(got[index].topk_logprobs[mask] - want[index].topk_logprobs[mask])
        assert difference.max() <= 0.01


def test_options_of_another_engine_are_refused(data, teacher_dir, tmp_path, capsys):
    arguments = command(data, teacher_dir, tmp_path / "cache", "--server", "http://localhost:1")
    assert main(arguments) == 1
    assert "server: not an option of the transformers engine" in capsys.readouterr().err


def test_no_prepared_data_is_a_clear_error(teacher_dir, tmp_path, capsys):
    assert main(command(tmp_path, teacher_dir, tmp_path / "cache")) == 1
    assert "megatron-kd prepare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        (
            {
                "SLURM_ARRAY_TASK_ID": "5",
                "SLURM_ARRAY_TASK_MIN": "2",
                "SLURM_ARRAY_TASK_COUNT": "4",
            },
            (3, 4),
        ),
        (
            {
                "SLURM_ARRAY_TASK_ID": "30",
                "SLURM_ARRAY_TASK_MIN": "10",
                "SLURM_ARRAY_TASK_STEP": "10",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "RANK": "1",
                "WORLD_SIZE": "2",
            },
            (5, 6),
        ),
    ],
)
def test_workers_from_the_environment(environment, want):
    worker = Worker.from_environment(environment)
    assert (worker.index, worker.count) == want


def test_a_given_worker_is_shared_out_over_its_ranks():
    environment = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_ARRAY_TASK_ID": "7"}
    assert Worker.parse("3/4", environment) == Worker(7, 8)
    assert Worker.parse("3/4", environment, ranks=False) == Worker(3, 4)
    assert Worker.parse("3/4") == Worker(3, 4)


@pytest.mark.parametrize("text", ["3/3", "1", "-1/2", "a/b", "0/0"])
def test_senseless_workers_are_refused(text):
    with pytest.raises(EngineError):
        Worker.parse(text)

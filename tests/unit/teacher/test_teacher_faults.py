"""What goes wrong around a capture: lost shards, full disks, dead servers, bad teachers."""

import contextlib
import os
import signal
import subprocess

import numpy as np
import pytest
import torch
from model_servers import ModelServer
from prepared import command, random_sequences, shards_of, write_split
from tiny_teacher import VOCAB, full_logprobs, write_teacher
from transformers import LlamaForCausalLM

from megatron_kd.cache import CacheReader
from megatron_kd.cli import main
from megatron_kd.teacher.capture.job import CaptureJob
from megatron_kd.teacher.capture.shards import capture, recapture
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines import http_client
from megatron_kd.teacher.engines.base import EngineError, EngineUnavailable
from megatron_kd.teacher.engines.transformers_model import LoadedModel


@pytest.mark.parametrize("what", ["nan", "infinity", "hidden"])
def test_a_teacher_that_gives_no_numbers_is_refused(what, data, tmp_path, capsys):
    """Nothing of it may reach a cache: neither log-probabilities nor hidden states."""
    model = write_teacher(tmp_path / "teacher")
    with torch.no_grad():
        if what == "nan":
            model.lm_head.weight[5] = float("nan")
        elif what == "infinity":
            model.lm_head.weight[5] = float("inf")
        else:
            model.model.norm.weight[3] = float("inf")
            model.lm_head.weight[:, 3] = 0
    model.save_pretrained(tmp_path / "teacher")
    arguments = command(data, tmp_path / "teacher", tmp_path / "cache", "--hidden-dtype", "float32")
    assert main(arguments) == 1
    words = capsys.readouterr().err
    assert "NaN or infinity" in words or "not finite" in words
    assert not list((tmp_path / "cache").rglob("shard-*"))


def test_a_served_teacher_of_other_tokens_is_warned_of(teacher_dir, tmp_path, capsys):
    """A server does not show its tokenizer; its rows tell."""
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    rng = np.random.default_rng(3)
    sequences = []
    for _ in range(12):  # what this teacher would write
        tokens = [int(rng.integers(VOCAB))]
        for _ in range(32):
            best = full_logprobs(model, np.array(tokens))[-1].topk(4).indices
            tokens.append(int(best[rng.integers(4)]))
        mask = np.arange(33) < 32
        sequences.append((np.array(tokens, np.int32), mask, np.array([0, 33], np.int32)))
    permuted = rng.permutation(VOCAB).astype(np.int32)
    others = [(permuted[tokens], mask, bounds) for tokens, mask, bounds in sequences]
    for name, content, warned in (("own", sequences, False), ("other", others, True)):
        write_split(tmp_path / name / "train", content)
        more = ["--topk", "20", "--dtype", "float32", "--output", str(tmp_path / name / "cache")]
        where = ["--data", str(tmp_path / name), "--teacher", str(teacher_dir)]
        assert main(["capture", *where, *more]) == 0
        assert ("of the next tokens" in capsys.readouterr().err) is warned
    # So few candidates say nothing.
    more = ["--topk", "19", "--dtype", "float32", "--output", str(tmp_path / "few")]
    assert main(["capture", *where, *more]) == 0
    assert "of the next tokens" not in capsys.readouterr().err


def test_recapture_makes_the_given_shards_again(data, teacher_dir, tmp_path):
    assert main(command(data, teacher_dir, tmp_path / "cache")) == 0
    split = tmp_path / "cache" / "train"
    before = shards_of(split)
    shards = sorted(split.glob("shard-*.safetensors"))
    kept = shards[0].stat().st_mtime_ns
    damaged = bytearray(shards[2].read_bytes())
    damaged[-7] ^= 4
    shards[2].write_bytes(damaged)
    recapture(split, shards=[2])
    assert shards_of(split) == before and shards[0].stat().st_mtime_ns == kept
    shards[1].unlink()
    recapture(split)
    assert shards_of(split) == before
    with pytest.raises(ValueError):
        recapture(data / "train")


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
            recapture(tmp_path / "cache", shards=[0])
        assert len(server.keys) == asked
        (tmp_path / "cache" / "shard-000000.safetensors").unlink()
        assert capture({"train": (job, tmp_path / "cache")}, Worker()) == {"train": True}


def test_repair_runs_no_remote_code(data, teacher_dir, tmp_path):
    assert main(command(data, teacher_dir, tmp_path / "cache", "--trust-remote-code")) == 0
    with pytest.raises(EngineError, match="--trust-remote-code"):
        recapture(tmp_path / "cache" / "train", shards=[0])


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
    plain = LoadedModel.run

    def interrupted(model, documents):
        calls.append(0)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return plain(model, documents)

    monkeypatch.setattr(LoadedModel, "run", interrupted)
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

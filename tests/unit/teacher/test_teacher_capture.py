import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from prepared import command, random_sequences, shards_of, write_split
from tiny_teacher import VOCAB, full_logprobs, write_teacher
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM

from megatron_kd.cache import CacheReader
from megatron_kd.cli import main
from megatron_kd.data.dataset import DistillDataset, SampleOptions
from megatron_kd.models.fingerprint import tokenizer_of
from megatron_kd.teacher.capture.job import CaptureJob
from megatron_kd.teacher.capture.shards import capture
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines.base import EngineError


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
    # What the first caches recorded, neither more nor less: shards are bound to it.
    assert manifest["parameters"] == {
        "batch_tokens": 4096,
        "dtype": "float32",
        "shard_positions": 70,
    }
    words = capsys.readouterr()
    assert "estimate from" in words.err and "bytes/position" in words.err
    assert "validation: complete" in words.out


def test_the_license_is_what_the_model_card_says_or_is_given(data, tmp_path):
    write_teacher(tmp_path / "teacher")
    (tmp_path / "teacher" / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    for name, more, want in (
        ("card", [], "apache-2.0"),
        ("given", ["--license", "mit"], "mit"),
        ("spelled as before", ["--licence", "mit"], "mit"),
    ):
        output = tmp_path / name
        more = [*more, "--split", "validation"]
        assert main(command(data, tmp_path / "teacher", output, *more)) == 0
        assert CacheReader(output / "validation").manifest["licence"] == want


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

    monkeypatch.setattr("megatron_kd.teacher.engines.transformers_model.load_model", refuse)
    assert main(command(data, teacher_dir, two)) == 0


@pytest.mark.parametrize(
    "other",
    [["--topk", "9"], ["--codec", "fp16"], ["--top-p", "0.9"], ["--shard-positions", "71"]]
    + [["--dtype", "bfloat16"], ["--temperatures", "2"], ["--sampling", "random"]]
    + [["--attention", "eager"], ["--trust-remote-code"], ["--head-chunk-bytes", "5000"]],
    ids=" ".join,
)
def test_a_rerun_with_other_parameters_is_refused(other, data, teacher_dir, tmp_path, capsys):
    assert main(command(data, teacher_dir, tmp_path / "cache", "--worker", "0/2")) == 0
    assert main(command(data, teacher_dir, tmp_path / "cache", *other)) == 1
    assert "use the same settings, or another directory" in capsys.readouterr().err


def test_a_directory_emptied_by_hand_is_begun_anew(data, teacher_dir, tmp_path):
    """`rm -r cache/train/*` leaves the files whose names begin with a dot."""
    more = ["--split", "train", "--attention", "eager"]
    assert main(command(data, teacher_dir, tmp_path / "cache", *more, "--worker", "0/2")) == 0
    for path in (tmp_path / "cache" / "train").glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert list((tmp_path / "cache" / "train").iterdir())
    assert main(command(data, teacher_dir, tmp_path / "cache")) == 0


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
    longest = (np.zeros(257, np.int32), np.arange(257) < 256, np.array([0, 257], np.int32))
    write_split(tmp_path / "longest" / "train", [longest])
    assert main(command(tmp_path / "longest", teacher_dir, tmp_path / "longest-cache")) == 0


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


def test_normalizers_and_hidden_states_reach_the_cache(data, teacher_dir, tmp_path):
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


@pytest.mark.parametrize("kept", ["random", "top-p"])
def test_draws_and_cut_lists_reach_the_training_items(kept, data, teacher_dir, tmp_path):
    """One format for all three kinds of target, from the command to what the loss is given."""
    more = {"random": ["--sampling", "random"], "top-p": ["--top-p", "0.5"]}[kept]
    arguments = command(data, teacher_dir, tmp_path / "cache", "--codec", "fp16", *more)
    assert main(arguments) == 0
    reader = CacheReader(tmp_path / "cache" / "train")
    assert reader.spec.sampling_method == ("random" if kept == "random" else "topk")
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    items = DistillDataset(reader, SampleOptions(sequence_length=40), len(reader))
    used_slots = set()
    for index in range(len(reader)):
        item = items[index]
        length = len(reader[index].tokens) - 1
        logprobs = full_logprobs(model, reader[index].tokens)[:-1]
        for row in range(length):
            used = item["topk_ids"][row] >= 0
            assert bool(used.any()) == bool(item["loss_mask"][row])
            if not used.any():
                continue
            used_slots.add(int(used.sum()))
            ids = item["topk_ids"][row][used].long()
            given = item["topk_logprobs"][row][used].exp()
            assert torch.isinf(item["topk_logprobs"][row][~used]).all()
            true = logprobs[row][ids].exp()
            if kept == "random":  # 8 draws: shares are eighths, and all of the mass
                torch.testing.assert_close((given * 8).round() / 8, given, atol=1e-3, rtol=0)
                assert float(given.sum()) == pytest.approx(1.0, abs=2e-3)
            else:
                torch.testing.assert_close(given, true, atol=2e-3, rtol=0)
                if used.sum() < 8:
                    assert float(true.sum()) >= 0.5 - 1e-3 > float(true[:-1].sum()) - 2e-3
    assert len(used_slots) > 2


@pytest.mark.extended
def test_ranks_of_a_torchrun_share_the_shards_at_once(data, teacher_dir, tmp_path):
    """Three processes in one directory at the same time, as torchrun starts them."""
    assert main(command(data, teacher_dir, tmp_path / "one")) == 0
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "megatron_kd.cli"]
            + command(data, teacher_dir, tmp_path / "many"),
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    done = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], done
    assert sum("train: complete" in out for out, _ in done) >= 1
    assert shards_of(tmp_path / "one") == shards_of(tmp_path / "many")
    assert main(["verify", str(tmp_path / "many"), "--decode"]) == 0
    assert not list((tmp_path / "many").rglob("*.tmp"))


def test_padding_rows_of_a_wider_teacher_are_masked(tmp_path, capsys):
    model = write_teacher(tmp_path / "teacher", vocab=VOCAB + 5)
    data = write_split(tmp_path / "data" / "train", random_sequences(5, 3))
    job = CaptureJob(data=str(data), teacher=str(tmp_path / "teacher"), topk=VOCAB, codec="fp16")
    capture({"train": (job, tmp_path / "cache")}, Worker())
    sample = CacheReader(tmp_path / "cache")[0]
    ids = sample.topk_ids[sample.loss_mask]
    assert ids.max() == VOCAB - 1
    np.testing.assert_allclose(sample.mass[sample.loss_mask], 1.0, atol=1e-3)
    said = capsys.readouterr().err
    assert f"ids from {VOCAB} on, which no token has, get " in said
    told = [float(number) for number in re.findall(r"\d\.\d\de-\d\d", said)]
    assert 0 < told[0] < told[1] < 0.5  # five rows of 136 in a random model
    del model


def test_a_tokenizer_wider_than_the_teacher_is_explained(tmp_path):
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "narrow", vocab=VOCAB - 20)
    data = write_split(tmp_path / "data" / "train", random_sequences(5, 3))
    for teacher, words in {
        "teacher": f"uses none from {VOCAB} on, so capture with --vocab-size {VOCAB}",
        "narrow": "the data holds token",
    }.items():
        wide = CaptureJob(data=str(data), teacher=str(tmp_path / teacher), vocab_size=VOCAB + 1)
        with pytest.raises(EngineError, match=words):
            capture({"train": (wide, tmp_path / "wide")}, Worker())


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

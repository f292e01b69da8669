"""The teacher in Megatron-Bridge under tensor and pipeline parallelism, through the real command
and torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "teacher"))

from prepared import random_sequences, write_split
from tiny_teacher import VOCAB, write_teacher

from megatron_kd.cache import CacheReader
from megatron_kd.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.bridge]

ARGUMENTS = ["--topk", "9", "--codec", "fp16", "--shard-positions", "100", "--batch-tokens", "70"]
SPREADS = {"TP 1": [1, 1], "TP 2": [2, 1], "PP 2": [1, 2]}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_teacher(
        folder / "teacher", vocab=VOCAB + 1, layers=4
    )  # one padding row, so that TP 2 divides
    sequences = random_sequences(0, 12, documents=2)
    write_split(folder / "data" / "train", sequences, packing="block")
    return folder


def command(world, output, *more):
    where = ["--data", world / "data", "--teacher", world / "teacher", "--output", output]
    return ["capture", *map(str, where), *ARGUMENTS, *more]


def torchrun(ranks, arguments):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launch, "-m", "megatron_kd.cli", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(
    ("spread", "sampling"),
    [("TP 1", "topk"), ("TP 2", "topk"), ("PP 2", "topk"), ("TP 2", "random")],
)
def test_rows_equal_the_transformers_engine(spread, sampling, world, tmp_path):
    tensor, pipeline = SPREADS[spread]
    more = ["--sampling", sampling]
    if sampling == "topk":
        more += ["--temperatures", "2", "--hidden-dtype", "float32"]
    assert main(command(world, tmp_path / "transformers", *more)) == 0
    spreading = ["--tensor-parallel", str(tensor), "--pipeline-parallel", str(pipeline)]
    arguments = command(world, tmp_path / "megatron", "--engine", "megatron", *spreading, *more)
    done = torchrun(tensor * pipeline, arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "megatron/train: complete" in done.stdout
    one = CacheReader(tmp_path / "transformers" / "train")
    other = CacheReader(tmp_path / "megatron" / "train")
    assert len(one) == len(other) == 12
    moved = 0
    for index in range(12):
        want, got = one[index], other[index]
        mask = want.loss_mask
        np.testing.assert_array_equal(got.loss_mask, mask)
        if sampling == "random":  # a draw may fall on the other side of a boundary between two ids
            moved += int(
                (np.sort(got.topk_ids[mask]) != np.sort(want.topk_ids[mask])).any(-1).sum()
            )
            continue
        np.testing.assert_array_equal(np.sort(got.topk_ids[mask]), np.sort(want.topk_ids[mask]))
        np.testing.assert_allclose(got.topk_logprobs[mask], want.topk_logprobs[mask], atol=0.004)
        np.testing.assert_allclose(got.log_z[2.0][mask], want.log_z[2.0][mask], atol=1e-4)
        np.testing.assert_allclose(got.hidden[mask], want.hidden[mask], atol=1e-3)
    assert moved <= 2


def test_a_wrong_number_of_ranks_is_refused(world, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    more = ["--engine", "megatron", "--tensor-parallel", "2"]
    assert main(command(world, tmp_path / "cache", *more)) == 1
    assert "start torchrun with --nproc-per-node 2" in capsys.readouterr().err


def test_a_refused_capture_lets_the_followers_go(world, tmp_path):
    more = ["--engine", "megatron", "--tensor-parallel", "2", "--vocab-size", "500"]
    done = torchrun(2, command(world, tmp_path / "cache", *more))
    assert done.returncode != 0
    assert "capture with --vocab-size" in done.stderr

"""Captures and generations that are killed at random moments: a script, run by
test_teacher_kill.py.

Everything slow is imported once; each run is a forked child that dies by SIGKILL after a random
time. Prints one JSON object: kills made, and the moments that were hit (shards finished when the
child died).
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers.models.llama import modeling_llama  # noqa: F401

from megatron_kd.teacher.capture.job import CaptureJob
from megatron_kd.teacher.capture.shards import capture
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines import transformers_model  # noqa: F401
from megatron_kd.teacher.generate.job import GenerateJob, KeptRows, resolve
from megatron_kd.teacher.generate.shards import generate
from megatron_kd.teacher.generators import decoding  # noqa: F401
from megatron_kd.teacher.generators.base import Sampling


def capture_into(data, teacher, target):
    job = CaptureJob(data=data, teacher=teacher, topk=12, shard_positions=60)
    capture({"train": (job, target)}, Worker())


def generate_into(prompts, model, target):
    job = GenerateJob(
        prompts=(prompts,),
        model=model,
        sampling=Sampling(max_new_tokens=6, samples=2),
        shard_prompts=2,
        rows=KeptRows(topk=5, validation_fraction=0.3),
    )
    generate(resolve(job, print), target, Worker())


WORK = {"capture": capture_into, "generate": generate_into}


def start(work, data, model, target):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work(data, model, target)
        status = 0
    finally:
        os._exit(status)


def contents(folder):
    """What anybody reads. The manifests of a generation's caches say where they lie: left out."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and "parts" not in p.parts and "finished" not in p.parts
        if p.parent == folder or not p.name.startswith("manifest.")
    }


def check_leftovers(folder, reference):
    """What a kill leaves: shards are either whole or absent; only hidden files may be half
    written."""
    for name, data in contents(folder).items():
        if not name.split("/")[-1].startswith("."):
            assert data == reference[name], f"{name} differs after a kill"


def main(name, data, teacher, folder, kills, seed):
    work, folder = WORK[name], Path(folder)
    rng = np.random.default_rng(seed)
    began = time.monotonic()
    assert (
        os.waitstatus_to_exitcode(os.waitpid(start(work, data, teacher, folder / "whole"), 0)[1])
        == 0
    )
    whole_s = time.monotonic() - began
    reference = contents(folder / "whole")
    made, completed, moments = 0, 0, []
    target = folder / "killed"
    while made < kills or target.exists():
        child = start(work, data, teacher, target)
        deadline = time.monotonic() + (rng.uniform(0, 1.1 * whole_s) if made < kills else 60.0)
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.001)
        else:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            made += 1
            if target.exists():
                moments.append(len(list(target.rglob("shard-*.safetensors"))))
                check_leftovers(target, reference)
            continue
        assert code == 0, f"a {name} after {made} kills ended with {code}"
        assert contents(target) == reference, f"another result after {made} kills"
        completed += 1
        shutil.rmtree(target)
    assert completed
    print(
        json.dumps(
            {
                "kills": made,
                "completed": completed,
                "moments": moments,
                "shards": sum("shard-" in file for file in reference),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6]))

"""Captures that are killed at random moments: a script, run by test_teacher_kill.py.

Everything slow is imported once; each capture runs in a forked child that dies by SIGKILL after a
random time. Prints one JSON object: kills made, and the moments that were hit (shards finished when
the child died).
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


def start(jobs):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        capture(jobs, Worker())
        status = 0
    finally:
        os._exit(status)


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*")) if p.is_file()}


def check_leftovers(folder, reference):
    """What a kill leaves: shards are either whole or absent; only hidden files may be half
    written."""
    for name, data in contents(folder).items():
        if not name.startswith("."):
            assert data == reference[name], f"{name} differs after a kill"


def main(data, teacher, work, kills, seed):
    work = Path(work)
    rng = np.random.default_rng(seed)
    job = CaptureJob(data=data, teacher=teacher, topk=12, shard_positions=60)
    began = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(start({"train": (job, work / "whole")}), 0)[1]) == 0
    whole_s = time.monotonic() - began
    reference = contents(work / "whole")
    made, completed, moments = 0, 0, []
    target = work / "killed"
    while made < kills or target.exists():
        child = start({"train": (job, target)})
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
                moments.append(len(list(target.glob("shard-*"))))
                check_leftovers(target, reference)
            continue
        assert code == 0, f"a capture after {made} kills ended with {code}"
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
                "shards": len(reference) - 2,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))

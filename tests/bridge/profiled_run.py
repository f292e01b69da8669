"""A profiled run on a machine without CUDA: profiled_run.py RECIPE key=value …

The calls that would reach a CUDA profiler write down, line by line, at which iteration of the real
loop they came, in output_dir/calls.jsonl.
"""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def main() -> None:
    cpu_backend.activate()
    from megatron_kd.host import checks, train

    config = from_recipe(sys.argv[1], sys.argv[2:])
    folder = Path(config.output_dir)

    def note(what: str) -> None:
        metrics = folder / "metrics.jsonl"
        records = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
        finished = sum(record["kind"] == "train" for record in records)
        with (folder / "calls.jsonl").open("a") as calls:
            print(json.dumps([what, finished]), file=calls)

    def record(enabled="all", **_):
        note("stop" if enabled is None else "start")

    def dump(path: str) -> None:
        note("dump")
        Path(path).write_text("a snapshot")

    profiler = SimpleNamespace(
        cudaProfilerStart=lambda: note("start"), cudaProfilerStop=lambda: note("stop")
    )
    torch.cuda.memory._record_memory_history = record
    torch.cuda.memory._dump_snapshot = dump
    torch.cuda.cudart = lambda: profiler
    torch.cuda.check_error = lambda _: None
    torch.autograd.profiler.emit_nvtx = contextlib.nullcontext
    torch.cuda.nvtx.range_push = lambda name: note(name)
    check = checks.check
    checks.check = lambda *arguments, on_cpu, **more: check(*arguments, on_cpu=False, **more)
    train.run(config, train.prepare(config))


if __name__ == "__main__":
    main()

"""Run a function on several gloo ranks of this machine, for tests."""

import os
import pickle
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import nan_memory
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 120


def run_ranks(world_size, fn, *args):
    """Call fn(rank, *args) on world_size spawned ranks; return what they return, by rank.

    The default process group is gloo, met through a file (no port to collide on). fn must be
    importable (a module's function), its arguments and results picklable. The first rank that fails
    ends the others, and its traceback is in the exception raised here.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            mp.start_processes(
                _rank, (world_size, directory, fn, args), nprocs=world_size, start_method="spawn"
            )
        except Exception as error:
            reports = sorted(directory.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
            if not reports:
                raise
            first = reports[0]
            rank = first.name.removeprefix("error-")
            raise RuntimeError(
                f"rank {rank} of {world_size} failed:\n{first.read_text()}"
            ) from error
        return [
            pickle.loads((directory / f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


def _rank(rank, world_size, directory, fn, args):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    nan_memory.poison()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        result = fn(rank, *args)
        (directory / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (directory / f"error-{rank}").write_text(traceback.format_exc())
        raise

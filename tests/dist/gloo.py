"""Run a function on several ranks of this machine, for tests: `run_ranks`. Run as a script, this is
one rank. Ranks talk over gloo, or over NCCL with a GPU each (`backend`).
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

sys.path.append(str(Path(__file__).parents[1]))  # a rank starts in this file, without a conftest

import backend  # noqa: E402
import nan_memory  # noqa: E402

TIMEOUT_S = 120  # of one collective
LIMIT_S = 900  # of all ranks


def run_ranks(world_size, fn, *args, host: bool = False):
    """Call fn(rank, *args) on world_size new ranks; return what they return, by rank.

    The default process group is met through a file (no port to collide on). fn must be
    importable (a module's function), its arguments and results picklable. The first rank that fails
    ends the others, and its traceback is in the exception raised here.

    Args:
        host: The ranks have the training host imported and the CPU backend active.
    """
    if backend.ON_GPUS and world_size > backend.visible_gpus():
        import pytest

        pytest.skip(f"{world_size} ranks want a GPU each")
    from warm import warm_python  # not in a rank, which runs this file

    python = warm_python("host" if host else "torch")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        call = directory / "call"
        module = sys.modules[fn.__module__]
        call.write_bytes(pickle.dumps((str(Path(module.__file__).parent), sys.path)))
        with call.open("ab") as file:
            pickle.dump((fn, args), file)
        ranks = [
            subprocess.Popen(
                [python, __file__, str(rank), str(world_size), str(directory)], env=environment()
            )
            for rank in range(world_size)
        ]
        try:
            status = _end_of(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        reports = sorted(directory.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
        if reports:
            rank = reports[0].name.removeprefix("error-")
            raise RuntimeError(f"rank {rank} of {world_size} failed:\n{reports[0].read_text()}")
        if status:
            raise RuntimeError(f"a rank of {world_size} ended with status {status}")
        return [
            pickle.loads((directory / f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", backend.SWITCH: backend.BACKEND}


def _end_of(ranks: list[subprocess.Popen]) -> int:
    """The status of the rank that ended first with a fault; 0 when all ended well."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = [rank.poll() for rank in ranks]
        failed = [status for status in found if status]
        if failed or None not in found:
            return failed[0] if failed else 0
        time.sleep(0.005)
    raise TimeoutError(f"ranks have not ended after {LIMIT_S} s: {found}")


class DrawnOnCpu(TorchFunctionMode):
    """Random numbers come from the generator that a test made on the CPU, so that all ranks and
    the process of the tests draw alike; they are then brought to the default device.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != "cpu" or "device" in kwargs:
            return func(*args, **kwargs)
        return func(*args, **kwargs, device="cpu").to(torch.get_default_device())


def _rank(rank: int, world_size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    nan_memory.poison()
    try:
        with (directory / "call").open("rb") as call:
            folder, path = pickle.load(call)
            sys.path[:0] = [folder, *(entry for entry in path if entry not in sys.path)]
            fn, args = pickle.load(call)
        dist.init_process_group(
            backend.COLLECTIVES,
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        if backend.ON_GPUS:
            torch.cuda.set_device(rank)
            torch.set_default_device(torch.device("cuda", rank))
            with DrawnOnCpu():
                result = tree_map_only(torch.Tensor, torch.Tensor.cpu, fn(rank, *args))
        else:
            result = fn(rank, *args)
        (directory / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (directory / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # taking the modules down takes longer than most functions


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""Run one recipe on one rank and end at once: run_case.py RECIPE key=value …

`launch.run_cases` starts it on every rank, each a process of its own.
"""

import multiprocessing
import os
import sys
from pathlib import Path

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def main() -> None:
    cpu_backend.activate()
    sys.path.append(str(Path(__file__).parents[1]))
    import nan_memory
    import torch

    from megatron_kd.host import train as bridge

    nan_memory.poison()

    config = from_recipe(sys.argv[1], sys.argv[2:])
    bridge.run(config, bridge.prepare(config))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # the writer of checkpoints would stay behind
        child.kill()
    os._exit(0)  # taking thousands of modules down takes as long as the run


if __name__ == "__main__":
    main()

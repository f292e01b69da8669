"""Profile a short run: iterations 10 to 13 of 15, under Nsight Systems or as CUDA memory histories.

    nsys profile -c cudaProfilerApi --capture-range-end=stop -t cuda,nvtx … torchrun … profile=nsys

`nsys` starts and stops the profiler through the host and names our stages as NVTX ranges. `memory`
writes one snapshot per profiled iteration and rank, for https://pytorch.org/memory_viz.
"""

import os
from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ProfilingConfig

from megatron_kd.host.step import nvtx_ranges

ITERATIONS = 15
FIRST, LAST = 10, 13  # profiled, counted from 1
MEMORY_ENTRIES = 1_000_000


def configure(profile: str | None, container) -> None:
    """Make the host's configuration that of a short profiled run."""
    if profile is None:
        return
    container.train.train_iters = min(container.train.train_iters, ITERATIONS)
    container.train.eval_iters = 0
    container.checkpoint.save = container.checkpoint.load = None
    if profile == "nsys":
        ranks = list(range(int(os.environ.get("WORLD_SIZE", "1"))))
        container.profiling = ProfilingConfig(
            use_nsys_profiler=True,
            # The host starts before step `start` and stops before step `end`, counted from 0.
            profile_step_start=FIRST - 1,
            profile_step_end=LAST,
            profile_ranks=ranks,
        )


def callbacks(profile: str | None, directory: str | Path) -> list[Callback]:
    """What a profiled run adds to training."""
    nvtx_ranges.switch(profile == "nsys")
    return [MemoryHistory(directory)] if profile == "memory" else []


class MemoryHistory(Callback):
    """Record allocations of each profiled iteration; one snapshot per iteration and rank.

    Args:
        directory: The run's output_dir; snapshots go into its folder `memory`.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory) / "memory"

    def on_train_step_start(self, context: CallbackContext) -> None:
        if FIRST <= context.state.train_state.step + 1 <= LAST:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)

    def on_train_step_end(self, context: CallbackContext) -> None:
        iteration = context.state.train_state.step + 1
        if FIRST <= iteration <= LAST:
            self.directory.mkdir(parents=True, exist_ok=True)
            rank = torch.distributed.get_rank()
            path = self.directory / f"iteration_{iteration:03d}_rank_{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)

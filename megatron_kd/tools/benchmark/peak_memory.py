"""Peak memory of one call, exactly: what the allocator gave out and did not get back.

CUDA: `torch.cuda.max_memory_allocated`. CPU: the same sum from PyTorch's allocator events, as the
profiler records them. Resident memory would measure the C library's caching as well, and misses
what is allocated but untouched. Scratch that a library takes for itself is in neither.
"""

import contextlib
import os
import resource

import torch
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports every start and stop

MEASURES = {"cpu": "allocator events", "cuda": "max_memory_allocated"}


def peak_bytes(call, device: torch.device) -> int:
    """Most bytes alive at once during call(), above those at its start."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _unlimited_address_space():  # the records of a long call are themselves large
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            call()
        events = [e for e in recording.profiler.kineto_results.events() if e.name() == "[memory]"]
        alive = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; the CPU allocator has no exception type for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    signs = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def limit_address_space(growth_bytes: int) -> None:
    """Let this process's address space grow by no more than growth_bytes; then allocation fails."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + growth_bytes, hard))


@contextlib.contextmanager
def _unlimited_address_space():
    limit, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

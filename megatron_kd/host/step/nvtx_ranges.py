"""Name the stages of a step in Nsight Systems."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_are_on = False


def switch(on: bool) -> None:
    """Turn the ranges of this process on or off; they start off."""
    global _are_on
    _are_on = on


@contextmanager
def stage(name: str) -> Iterator[None]:
    """An NVTX range around one of our stages while ranges are on; otherwise nothing."""
    if not _are_on:
        yield
        return
    torch.cuda.nvtx.range_push(f"megatron_kd {name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()

"""Copies of a micro-batch to this rank's device that the host does not wait for.

CUDA copies from pageable memory in step with everything before it on the stream; from pinned memory
it copies behind the host's back. The data loader pins what it hands over; what a step makes of that
in host memory (a context-parallel rank's part, the supervised rows) is pinned here.
"""

import torch

from megatron_kd.host.cpu import backend as cpu_backend


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory, on this rank's device; ready for what the stream runs next."""
    return _pinned(tensor).cuda(non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch keeps pinned blocks for reuse, and this one until its copy has run."""
    if cpu_backend.is_active() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()

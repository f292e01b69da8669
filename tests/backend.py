"""Where tests of ranks and of the host run, and how near equal runs must then be.

`MEGATRON_KD_BACKEND=cuda` in the environment of pytest takes a GPU per rank, NCCL and bf16:

    MEGATRON_KD_BACKEND=cuda pytest tests/bridge/test_equality.py tests/dist

Otherwise ranks are CPU processes, which talk over gloo and compute in fp32.
`MEGATRON_KD_TESTS_DTYPE=bfloat16` takes bf16 on a CPU too, to try the bounds.
"""

import os
from typing import NamedTuple

SWITCH = "MEGATRON_KD_BACKEND"
BACKEND = "cuda" if os.environ.get(SWITCH) == "cuda" else "cpu"
ON_GPUS = BACKEND == "cuda"
COLLECTIVES = "nccl" if ON_GPUS else "gloo"
DTYPE = os.environ.get("MEGATRON_KD_TESTS_DTYPE", "bfloat16" if ON_GPUS else "float32")


class Tolerance(NamedTuple):
    """Relative bounds on two runs that must be equal."""

    loss: float
    norm: float
    """of gradients."""
    weight: float
    """of a trained tensor, relative to what training changed in it (`comparison`)."""
    rounding: float
    """of a weight itself: a few units in its last place."""


TOLERANCES = {
    "float32": Tolerance(loss=1e-5, norm=1e-4, weight=1e-4, rounding=2.0**-22),
    "bfloat16": Tolerance(loss=1e-2, norm=2e-2, weight=0.1, rounding=2.0**-7),
}
if DTYPE not in TOLERANCES:
    raise ValueError(f"MEGATRON_KD_TESTS_DTYPE is {DTYPE!r}; take one of {', '.join(TOLERANCES)}")
TOLERANCE = TOLERANCES[DTYPE]
PRECISION = [] if DTYPE == "float32" else ["bridge.mixed_precision=bf16_mixed"]
"""Overrides of a recipe."""


def visible_gpus() -> int:
    """How many ranks tests may start on GPUs."""
    import torch

    return torch.cuda.device_count()

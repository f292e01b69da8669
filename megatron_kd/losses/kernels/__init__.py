"""The work between the matrix products: two passes over a chunk's logits, without a copy of them.

- `max_and_sums` reads: the row maximum m and, per temperature, sum_v exp((z_v - m) / tau).
- `to_gradient_` writes z_v <- sum_t scale_t * exp((z_v - m) / tau_t) where z stood.

With a `LogitTransform` a chunk holds x, the output layer's product, in the place of logits: each
pass forms z of x as it reads, and the second multiplies by dz/dx.

Entries cut out beforehand (-inf) count for nothing in the first and become 0 in the second.

The exponential is the costly part of both. Where they follow each other, at one temperature and in
full precision, `exponentials_` reads and leaves z_v <- exp((z_v - m) / tau); what remains of the
second pass is a multiplication by row.

Three backends do the same: `kernels.eager` anywhere and always; `kernels.compiled` (torch.compile)
on a CPU whose chunk is large enough to pay for compiling; `kernels.triton` on CUDA where Triton
builds them. The eager one is the twin that the others are tested against.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import TypeAlias

import torch

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.kernels import compiled, eager, triton
from megatron_kd.losses.kernels.eager import FARTHEST_NATS, NEG_INF, accumulation_dtype
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.losses.objectives import Objective

__all__ = [
    "FARTHEST_NATS",
    "NEG_INF",
    "accumulation_dtype",
    "exponentials_",
    "full_gradient_",
    "full_sums",
    "keeps_exponentials",
    "max_and_sums",
    "to_gradient_",
    "use_backend",
]

Transforms: TypeAlias = tuple[LogitTransform | None, LogitTransform | None]

BACKENDS = {
    "eager": eager,
    "compiled": compiled,
    "triton": triton,
}
# Smaller chunks are done before the compiler would have started.
LEAST_COMPILED_ELEMENTS = 1 << 21
_forced: list[str] = []


def max_and_sums(
    z: torch.Tensor, inverse_taus: tuple[float, ...], transform: LogitTransform | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maximum m [n] and sums [t, n] of z [n, vp]; -inf and 0 where nothing is left of a row.

    They are fp32, and fp64 for fp64.
    """
    return _backend(z).max_and_sums(z, inverse_taus, transform)


def keeps_exponentials(
    z: torch.Tensor, inverse_taus: tuple[float, ...], transform: LogitTransform | None = None
) -> bool:
    """Whether `exponentials_` can be used: 16-bit logits would store a rounded factor, and the
    slope of a transform is not to be had from an exponential.
    """
    full = z.dtype == accumulation_dtype(z.dtype) and transform is None
    return full and len(inverse_taus) == 1 and _backend(z) is not triton


def exponentials_(z: torch.Tensor, inverse_tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `max_and_sums` at one temperature; z [n, vp] becomes exp((z - m) / tau)."""
    return _backend(z).exponentials_(z, inverse_tau)


def to_gradient_(
    z: torch.Tensor,
    m: torch.Tensor,
    scales: torch.Tensor,
    inverse_taus: tuple[float, ...],
    transform: LogitTransform | None = None,
) -> torch.Tensor:
    """z [n, vp] becomes the sum over t of scales [t, n] * exp((z - m) / tau); m [n] is finite.

    With a transform, times dz/dx.
    """
    return _backend(z).to_gradient_(z, m, scales, inverse_taus, transform)


def full_sums(
    z: torch.Tensor,
    y: torch.Tensor,
    student: tuple[torch.Tensor, torch.Tensor],
    teacher: tuple[torch.Tensor, ...],
    inverse_tau: float,
    objective: Objective,
    divergence: Divergence,
    transforms: Transforms = (None, None),
) -> torch.Tensor:
    """The sums [objective.sums, n] of objective.row_sums over a chunk pair z, y [n, vp].

    student, teacher: (m, log_sum) [n] each, of which the log-probabilities are made;
        transforms: the student's and the teacher's.
    """
    return _backend(z, full=True).full_sums(
        z, y, student, teacher, inverse_tau, objective, divergence, transforms
    )


def full_gradient_(
    z: torch.Tensor,
    y: torch.Tensor,
    student: tuple[torch.Tensor, ...],
    teacher: tuple[torch.Tensor, ...],
    sums: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    inverse_tau: float,
    objective: Objective,
    divergence: Divergence,
    transforms: Transforms = (None, None),
) -> torch.Tensor:
    """z [n, vp] becomes the gradient by z of weights[0] * divergence + weights[1] * log Z at tau 1.

    student: (m, log_sum, log_sum at temperature 1); sums [objective.sums, n] of `full_sums`;
        weights [n], [n] or None; transforms as for `full_sums`: with one of the student's the
        gradient is the one by x.
    """
    kernels = _backend(z, full=True)
    return kernels.full_gradient_(
        z, y, student, teacher, sums, weights, inverse_tau, objective, divergence, transforms
    )


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend, for tests and measurements: eager, compiled or triton."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def _backend(z: torch.Tensor, full: bool = False) -> ModuleType:
    """full: a pass over a pair of chunks; where Triton is used the compiler writes its kernel."""
    if z.numel() == 0:
        return eager
    if _forced:
        forced = BACKENDS[_forced[-1]]
        return compiled if full and forced is triton else forced
    if z.is_cuda and not full:
        return triton if triton.available() else eager
    large = z.device.type in ("cpu", "cuda") and z.numel() >= LEAST_COMPILED_ELEMENTS
    return compiled if large and compiled.available(z.device.type) else eager


def describe(device: torch.device) -> str:
    """The name of the backend that large chunks on this device get."""
    if device.type == "cuda":
        return "triton" if triton.available() else "eager"
    return "compiled" if device.type == "cpu" and compiled.available("cpu") else "eager"

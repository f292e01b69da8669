"""The work between the matrix products: two passes over a chunk's logits, without a copy of them.

- `max_and_sums` reads: the row maximum m and, per temperature, sum_v exp((z_v - m) / tau).
- `to_gradient_` writes z_v <- sum_t scale_t * exp((z_v - m) / tau_t) where z stood.

Entries cut out beforehand (-inf) count for nothing in the first and become 0 in the second.

Three backends do the same: `eager_kernels` anywhere and always; `compiled_kernels` (torch.compile)
    on
a CPU whose chunk is large enough to pay for compiling; `triton_kernels` on CUDA where Triton is
installed. The eager one is the twin that the others are tested against.

Letters: n rows, Vp this rank's vocabulary, T temperatures.
"""

import contextlib

import torch

from megatron_kd.losses import compiled_kernels, eager_kernels, triton_kernels
from megatron_kd.losses.eager_kernels import NEG_INF, accumulation_dtype

__all__ = ["NEG_INF", "accumulation_dtype", "max_and_sums", "to_gradient_", "use_backend"]

BACKENDS = {
    "eager": eager_kernels,
    "compiled": compiled_kernels,
    "triton": triton_kernels,
}
# Smaller chunks are done before the compiler would have started.
LEAST_COMPILED_ELEMENTS = 1 << 21
_forced: list[str] = []


def max_and_sums(z, inverse_taus):
    """z [n, Vp] -> m [n], sums [T, n], fp32 (fp64 for fp64); -inf and 0 where nothing is left."""
    return _backend(z).max_and_sums(z, inverse_taus)


def to_gradient_(z, m, scales, inverse_taus):
    """z [n, Vp] in place; m [n] finite, scales [T, n]."""
    return _backend(z).to_gradient_(z, m, scales, inverse_taus)


def full_sums(z, y, student, teacher, inverse_tau, options):
    """z, y [n, Vp]; student, teacher: (m, log_sum) [n] each -> [2, n] divergence and KL(q || m)."""
    return _backend(z, full=True).full_sums(z, y, student, teacher, inverse_tau, options)


def full_gradient_(z, y, student, teacher, sums, weights, inverse_tau, options):
    """z [n, Vp] becomes the gradient of weights[0] * divergence + weights[1] * log Z at tau 1.

    student: (m, log_sum, log_sum at temperature 1); sums [2, n] of `full_sums`; weights [n], [n] or
        None.
    """
    kernels = _backend(z, full=True)
    return kernels.full_gradient_(z, y, student, teacher, sums, weights, inverse_tau, options)


@contextlib.contextmanager
def use_backend(name: str):
    """Force a backend, for tests and measurements: eager, compiled or triton."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def _backend(z, full=False):
    """full: a pass over a pair of chunks; where Triton is used the compiler writes its kernel."""
    if z.numel() == 0:
        return eager_kernels
    if _forced:
        forced = BACKENDS[_forced[-1]]
        return compiled_kernels if full and forced is triton_kernels else forced
    if z.is_cuda and not full:
        return triton_kernels if triton_kernels.available() else eager_kernels
    large = z.device.type in ("cpu", "cuda") and z.numel() >= LEAST_COMPILED_ELEMENTS
    return compiled_kernels if large and compiled_kernels.available() else eager_kernels


def describe(device: torch.device) -> str:
    """The backend that large chunks on this device get."""
    if device.type == "cuda":
        return "triton" if triton_kernels.available() else "eager"
    return "compiled" if device.type == "cpu" and compiled_kernels.available() else "eager"

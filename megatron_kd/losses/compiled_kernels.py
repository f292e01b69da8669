"""`elementwise` through torch.compile: one vectorised loop per row and pass, on CPUs.

Letters: n rows, Vp this rank's vocabulary, T temperatures.
"""

import functools
import logging
import os

import torch

from megatron_kd.losses.eager_kernels import NEG_INF, accumulation_dtype

logger = logging.getLogger(__name__)


def max_and_sums(z, inverse_taus):
    m = None
    sums = []
    for inverse_tau in inverse_taus:
        m, total = _compiled().read(z, _scalar(inverse_tau, z))
        sums.append(total)
    return m, torch.stack(sums)


def to_gradient_(z, m, scales, inverse_taus):
    factors = [_scalar(x, z) for x in inverse_taus]
    if len(factors) == 1:
        _compiled().write_one(z, m, scales[0], factors[0])
    else:
        _compiled().write_two(z, m, scales[0], scales[1], *factors)
    return z


@functools.cache
def available() -> bool:
    """Whether the compiler is allowed and works here. Asked once; the answer no is logged with its reason."""
    disabled = [
        name
        for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
        if os.environ.get(name, "0") not in ("", "0")
    ]
    if disabled:
        logger.info("elementwise work is eager: %s is set", disabled[0])
        return False
    example = torch.zeros(2, 3)
    try:
        _compiled().read(example, torch.ones(()))
    except Exception as error:  # whatever a broken tool chain raises: the eager twin does the work
        logger.warning(
            "elementwise work is eager, torch.compile does not work here: %s",
            str(error).strip().splitlines()[0],
        )
        return False
    return True


class _Compiled:
    def __init__(self):
        # One graph for every number of rows and every vocabulary.
        self.read = torch.compile(_read, dynamic=True, fullgraph=True)
        self.write_one = torch.compile(_write_one, dynamic=True, fullgraph=True)
        self.write_two = torch.compile(_write_two, dynamic=True, fullgraph=True)


@functools.cache
def _compiled() -> _Compiled:
    return _Compiled()


@functools.cache
def _factor(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def _scalar(value, z):
    """A tensor, as a Python number would be compiled in and make a graph per temperature."""
    return _factor(value, accumulation_dtype(z.dtype))


def _read(z, inverse_tau):
    z = z.to(inverse_tau.dtype)
    m = z.amax(-1)
    shift = torch.where(m == NEG_INF, 0.0, m).unsqueeze(-1)
    return m, ((z - shift) * inverse_tau).exp().sum(-1)


def _write_one(z, m, scale, inverse_tau):
    shifted = z.to(m.dtype) - m.unsqueeze(-1)
    z.copy_((shifted * inverse_tau).exp() * scale.unsqueeze(-1))


def _write_two(z, m, scale, other_scale, inverse_tau, other_inverse_tau):
    shifted = z.to(m.dtype) - m.unsqueeze(-1)
    first = (shifted * inverse_tau).exp() * scale.unsqueeze(-1)
    z.copy_(first + (shifted * other_inverse_tau).exp() * other_scale.unsqueeze(-1))

"""The kernels through torch.compile: one vectorised loop per row and pass, on CPUs.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.kernels import eager
from megatron_kd.losses.kernels.eager import NEG_INF, accumulation_dtype, log_probability
from megatron_kd.losses.objectives import Objective, RowSums

logger = logging.getLogger(__name__)

# The compiler would form every exponential twice, for the sum and for what is stored.
exponentials_ = eager.exponentials_


def _compiler_errors() -> tuple[Any, ...]:
    """Imported only when something is raised: the compiler takes seconds to import."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, getattr(exc, "FailOnRecompileLimitHit", ())


def _or_eager(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The eager twin where the compiler gives up (too many variants, no tool chain), said once."""
    twin = getattr(eager, function.__name__)
    given_up = []

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if given_up:
            return twin(*args)
        try:
            return function(*args)
        except _compiler_errors() as error:  # raised before anything runs: no chunk is half written
            given_up.append(error)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("%s is eager from here on: %s", function.__name__, reason)
            return twin(*args)

    return call


@_or_eager
def max_and_sums(
    z: torch.Tensor, inverse_taus: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = []
    for inverse_tau in inverse_taus:
        m, total = _compiled().read(z, _scalar(inverse_tau, z))
        sums.append(total)
    return m, torch.stack(sums)


@_or_eager
def to_gradient_(
    z: torch.Tensor, m: torch.Tensor, scales: torch.Tensor, inverse_taus: tuple[float, ...]
) -> torch.Tensor:
    factors = [_scalar(x, z) for x in inverse_taus]
    memory = z.detach()  # the compiler refuses a view of logits that autograd has seen change
    if len(factors) == 1:
        _compiled().write_one(memory, m, scales[0], factors[0])
    else:
        _compiled().write_two(memory, m, scales[0], scales[1], *factors)
    return z


@_or_eager
def full_sums(
    z: torch.Tensor,
    y: torch.Tensor,
    student: tuple[torch.Tensor, torch.Tensor],
    teacher: tuple[torch.Tensor, ...],
    inverse_tau: float,
    objective: Objective,
    divergence: Divergence,
) -> torch.Tensor:
    factor = _scalar(inverse_tau, z)
    return _compiled().full_read(z, y, *student, *teacher, factor, objective.row_sums, divergence)


@_or_eager
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
) -> torch.Tensor:
    kd, ce = weights
    rest = (tuple(sums), kd, _scalar(inverse_tau, z), objective.gradient, divergence)
    if ce is None:
        _compiled().full_write(z, y, *student[:2], *teacher, *rest)
    else:
        _compiled().full_write_mixed(z, y, *student[:2], *teacher, *rest, student[2], ce)
    return z


@functools.cache
def available() -> bool:
    """Whether the compiler is allowed and works here; asked once, a no is logged."""
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
    """The compiled functions; none is compiled before it is called."""

    def __init__(self) -> None:
        # One graph for every number of rows and every vocabulary.
        self.read = torch.compile(_read, dynamic=True, fullgraph=True)
        self.write_one = torch.compile(_write_one, dynamic=True, fullgraph=True)
        self.write_two = torch.compile(_write_two, dynamic=True, fullgraph=True)
        self.full_read = torch.compile(_full_read, dynamic=True, fullgraph=True)
        self.full_write = torch.compile(_full_write, dynamic=True, fullgraph=True)
        self.full_write_mixed = torch.compile(_full_write_mixed, dynamic=True, fullgraph=True)


@functools.cache
def _compiled() -> _Compiled:
    return _Compiled()


@functools.cache
def _factor(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _scalar(value: float, z: torch.Tensor) -> torch.Tensor:
    """A tensor, as a Python number would be compiled in and make a graph per temperature."""
    return _factor(value, accumulation_dtype(z.dtype), z.device)


def _read(z: torch.Tensor, inverse_tau: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = z.to(inverse_tau.dtype)
    m = z.amax(-1)
    shift = torch.where(m == NEG_INF, 0.0, m).unsqueeze(-1)
    return m, ((z - shift) * inverse_tau).exp().sum(-1)


def _write_one(
    z: torch.Tensor, m: torch.Tensor, scale: torch.Tensor, inverse_tau: torch.Tensor
) -> None:
    shifted = z.to(m.dtype) - m.unsqueeze(-1)
    z.copy_((shifted * inverse_tau).exp() * scale.unsqueeze(-1))


def _write_two(
    z: torch.Tensor,
    m: torch.Tensor,
    scale: torch.Tensor,
    other_scale: torch.Tensor,
    inverse_tau: torch.Tensor,
    other_inverse_tau: torch.Tensor,
) -> None:
    shifted = z.to(m.dtype) - m.unsqueeze(-1)
    first = (shifted * inverse_tau).exp() * scale.unsqueeze(-1)
    z.copy_(first + (shifted * other_inverse_tau).exp() * other_scale.unsqueeze(-1))


def _full_read(
    z: torch.Tensor,
    y: torch.Tensor,
    m: torch.Tensor,
    log_sum: torch.Tensor,
    teacher_m: torch.Tensor,
    teacher_log_sum: torch.Tensor,
    inverse_tau: torch.Tensor,
    row_sums: RowSums,
    divergence: Divergence,
) -> torch.Tensor:
    log_q = log_probability(z, m, log_sum, inverse_tau)
    log_p = log_probability(y, teacher_m, teacher_log_sum, inverse_tau)
    return torch.stack(row_sums(log_q, log_p, divergence))


def _full_total(
    z: torch.Tensor,
    y: torch.Tensor,
    m: torch.Tensor,
    log_sum: torch.Tensor,
    teacher_m: torch.Tensor,
    teacher_log_sum: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    sums, kd, inverse_tau, gradient, divergence = rest
    log_q = log_probability(z, m, log_sum, inverse_tau)
    log_p = log_probability(y, teacher_m, teacher_log_sum, inverse_tau)
    return gradient(log_q, log_p, sums, divergence) * kd.unsqueeze(-1)


def _full_write(z: torch.Tensor, *rest: Any) -> None:
    z.copy_(_full_total(z, *rest))


def _full_write_mixed(z: torch.Tensor, y: torch.Tensor, m: torch.Tensor, *rest: Any) -> None:
    *rest, log_sum_at_one, ce = rest
    softmax = log_probability(z, m, log_sum_at_one, 1.0).exp()
    z.copy_(_full_total(z, y, m, *rest) + softmax * ce.unsqueeze(-1))

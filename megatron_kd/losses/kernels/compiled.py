"""The kernels through torch.compile: one vectorised loop per row and pass, on CPUs.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.kernels import eager
from megatron_kd.losses.kernels.eager import NEG_INF, accumulation_dtype, log_probability
from megatron_kd.losses.logit_transform import LogitTransform, logits_of, slopes_of
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
    z: torch.Tensor, inverse_taus: tuple[float, ...], transform: LogitTransform | None
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = []
    for inverse_tau in inverse_taus:
        m, total = _compiled().read(z, _scalar(inverse_tau, z), *_factors(transform, z))
        sums.append(total)
    return m, torch.stack(sums)


@_or_eager
def to_gradient_(
    z: torch.Tensor,
    m: torch.Tensor,
    scales: torch.Tensor,
    inverse_taus: tuple[float, ...],
    transform: LogitTransform | None,
) -> torch.Tensor:
    factors = [_scalar(x, z) for x in inverse_taus]
    memory = z.detach()  # the compiler refuses a view of logits that autograd has seen change
    if len(factors) == 1:
        _compiled().write_one(memory, m, scales[0], factors[0], *_factors(transform, z))
    else:
        rest = (*scales, *factors, *_factors(transform, z))
        _compiled().write_two(memory, m, *rest)
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
    transforms: tuple[LogitTransform | None, LogitTransform | None],
) -> torch.Tensor:
    scaled = _Pair(_scalar(inverse_tau, z), *(_factors(t, z) for t in transforms))
    return _compiled().full_read(z, y, *student, *teacher, scaled, objective.row_sums, divergence)


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
    transforms: tuple[LogitTransform | None, LogitTransform | None],
) -> torch.Tensor:
    kd, ce = weights
    scaled = _Pair(_scalar(inverse_tau, z), *(_factors(t, z) for t in transforms))
    rest = (tuple(sums), kd, scaled, objective.gradient, divergence)
    if ce is None:
        _compiled().full_write(z, y, *student[:2], *teacher, *rest)
    else:
        _compiled().full_write_mixed(z, y, *student[:2], *teacher, *rest, student[2], ce)
    return z


@functools.cache
def available(device_type: str) -> bool:
    """Whether the compiler is allowed and works for this kind of device ("cpu", "cuda").

    Each kind has a tool chain of its own, and is asked once, by compiling for it. A no is logged.
    """
    disabled = [
        name
        for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
        if os.environ.get(name, "0") not in ("", "0")
    ]
    if disabled:
        logger.info("elementwise work is eager: %s is set", disabled[0])
        return False
    try:
        example = torch.zeros(2, 3, device=device_type)
        _compiled().read(example, torch.ones((), device=device_type), None, None)
    except Exception as error:  # whatever a broken tool chain raises: the eager twin does the work
        logger.warning(
            "elementwise work on a %s is eager, torch.compile fails here: %s",
            device_type,
            (str(error).strip() or type(error).__name__).splitlines()[0],
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


Factors: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]
"""The scale of a transform (None without one) and its cap (None where there is none)."""


class _Pair(NamedTuple):
    """What makes the logits of both models of what a chunk holds."""

    inverse_tau: torch.Tensor
    student: Factors
    teacher: Factors


def _factors(transform: LogitTransform | None, z: torch.Tensor) -> Factors:
    if transform is None:
        return None, None
    softcap = None if transform.softcap is None else _scalar(transform.softcap, z)
    return _scalar(transform.scale, z), softcap


def _logits(
    x: torch.Tensor, scale: torch.Tensor | None, softcap: torch.Tensor | None
) -> torch.Tensor:
    return x if scale is None else logits_of(x, scale, softcap)


def _times_slopes(
    dz: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, softcap: torch.Tensor | None
) -> torch.Tensor:
    return dz if scale is None else dz * slopes_of(x.to(dz.dtype), scale, softcap)


def _read(
    z: torch.Tensor,
    inverse_tau: torch.Tensor,
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    z = _logits(z.to(inverse_tau.dtype), scale, softcap)
    m = z.amax(-1)
    shift = torch.where(m == NEG_INF, 0.0, m).unsqueeze(-1)
    return m, ((z - shift) * inverse_tau).exp().sum(-1)


def _write_one(
    z: torch.Tensor, m: torch.Tensor, weight: torch.Tensor, inverse_tau: torch.Tensor, *factors: Any
) -> None:
    shifted = _logits(z.to(m.dtype), *factors) - m.unsqueeze(-1)
    dz = (shifted * inverse_tau).exp() * weight.unsqueeze(-1)
    z.copy_(_times_slopes(dz, z, *factors))


def _write_two(
    z: torch.Tensor,
    m: torch.Tensor,
    weight: torch.Tensor,
    other_weight: torch.Tensor,
    inverse_tau: torch.Tensor,
    other_inverse_tau: torch.Tensor,
    *factors: Any,
) -> None:
    shifted = _logits(z.to(m.dtype), *factors) - m.unsqueeze(-1)
    first = (shifted * inverse_tau).exp() * weight.unsqueeze(-1)
    dz = first + (shifted * other_inverse_tau).exp() * other_weight.unsqueeze(-1)
    z.copy_(_times_slopes(dz, z, *factors))


def _full_read(
    z: torch.Tensor,
    y: torch.Tensor,
    m: torch.Tensor,
    log_sum: torch.Tensor,
    teacher_m: torch.Tensor,
    teacher_log_sum: torch.Tensor,
    scaled: _Pair,
    row_sums: RowSums,
    divergence: Divergence,
) -> torch.Tensor:
    log_q = _log_probability(z, m, log_sum, scaled.inverse_tau, scaled.student)
    log_p = _log_probability(y, teacher_m, teacher_log_sum, scaled.inverse_tau, scaled.teacher)
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
    sums, kd, scaled, gradient, divergence = rest
    log_q = _log_probability(z, m, log_sum, scaled.inverse_tau, scaled.student)
    log_p = _log_probability(y, teacher_m, teacher_log_sum, scaled.inverse_tau, scaled.teacher)
    return gradient(log_q, log_p, sums, divergence) * kd.unsqueeze(-1)


def _full_write(z: torch.Tensor, *rest: Any) -> None:
    z.copy_(_times_slopes(_full_total(z, *rest), z, *_pair_of(rest).student))


def _full_write_mixed(z: torch.Tensor, y: torch.Tensor, m: torch.Tensor, *rest: Any) -> None:
    *rest, log_sum_at_one, ce = rest
    factors = _pair_of(rest).student
    softmax = _log_probability(z, m, log_sum_at_one, 1.0, factors).exp()
    total = _full_total(z, y, m, *rest) + softmax * ce.unsqueeze(-1)
    z.copy_(_times_slopes(total, z, *factors))


def _pair_of(rest: Sequence[Any]) -> _Pair:
    return rest[-3]


def _log_probability(
    x: torch.Tensor,
    m: torch.Tensor,
    log_sum: torch.Tensor,
    inverse_tau: torch.Tensor | float,
    factors: Factors,
) -> torch.Tensor:
    return log_probability(_logits(x.to(m.dtype), *factors), m, log_sum, inverse_tau)

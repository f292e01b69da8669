"""The kernels in Triton, on CUDA: each pass touches a chunk's logits once.

Triton is no requirement, and a kernel is built before it first runs on a kind of logits. Where that
fails (Triton is absent, there is no C compiler for its launcher, its assembler does not know the
device) nothing has run yet, so the eager twins do the work from there on, which is said once.

n rows of a chunk, vp = v/tp this rank's vocabulary, t temperatures (one or two).
"""

import functools
import importlib
import importlib.util
import logging

import torch

from megatron_kd.losses.kernels import eager
from megatron_kd.losses.logit_transform import LogitTransform

logger = logging.getLogger(__name__)

SOURCE = "megatron_kd.losses.kernels.triton_source"
READ_BLOCK, WRITE_BLOCK = 4096, 2048
WARPS = 8

_built: set[tuple] = set()
_refusals: list[str] = []


def available() -> bool:
    """Whether Triton is installed, and has built every kernel that it was asked for."""
    return _installed() and not _refusals


def refusal() -> str | None:
    """Why a kernel could not be built; None where none was refused."""
    return _refusals[0] if _refusals else None


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def max_and_sums(
    z: torch.Tensor, inverse_taus: tuple[float, ...], transform: LogitTransform | None
) -> tuple[torch.Tensor, torch.Tensor]:
    n, temperatures = z.shape[0], len(inverse_taus)
    m = z.new_empty(n, dtype=torch.float32)
    sums = z.new_empty(temperatures, n, dtype=torch.float32)
    if _launch("read_rows", (n,), z, inverse_taus, transform, m, sums, READ_BLOCK):
        return m, sums
    return eager.max_and_sums(z, inverse_taus, transform)


def to_gradient_(
    z: torch.Tensor,
    m: torch.Tensor,
    scales: torch.Tensor,
    inverse_taus: tuple[float, ...],
    transform: LogitTransform | None,
) -> torch.Tensor:
    grid = (z.shape[0], -(-z.shape[1] // WRITE_BLOCK))
    m, scales = m.contiguous(), scales.contiguous()
    if _launch("write_rows", grid, z, inverse_taus, transform, m, scales, WRITE_BLOCK):
        return z
    return eager.to_gradient_(z, m, scales, inverse_taus, transform)


def _launch(
    name: str,
    grid: tuple[int, ...],
    z: torch.Tensor,
    inverse_taus: tuple[float, ...],
    transform: LogitTransform | None,
    per_row: torch.Tensor,
    per_temperature: torch.Tensor,
    block: int,
) -> bool:
    """Whether the kernel `name` ran; false, with nothing done, where it cannot.

    per_row is [n], per_temperature [t, n]; block is how many columns are taken at a time.
    """
    if z.dtype == torch.float64 or _refusals:  # the kernels compute in fp32
        return False
    columns, row_stride = z.shape[1], z.stride(0)
    arguments = (
        z,
        row_stride,
        inverse_taus[0],
        inverse_taus[-1],
        per_row,
        per_temperature,
        z.shape[0],
        *_factors(transform),
    )
    constants = {
        "COLUMNS": columns,
        "TEMPERATURES": len(inverse_taus),
        "TRANSFORM": _kind(transform),
        "BLOCK": block,
        "num_warps": WARPS,
    }
    # What Triton makes a variant of its own for: it knows strides and addresses that 16 divides.
    addresses = (x.data_ptr() % 16 for x in (z, per_row, per_temperature))
    kind = (name, z.dtype, z.device, row_stride, *addresses, *constants.values())
    try:
        kernel = getattr(importlib.import_module(SOURCE), name)
        if kind not in _built:
            # Compiles and runs nothing; asking for `run` builds the launcher and loads the kernel.
            getattr(kernel.warmup(*arguments, grid=grid, **constants), "run", None)
            _built.add(kind)
    except Exception as error:  # whatever a broken Triton raises: a compiler's, a driver's, its own
        _give_up(error)
        return False
    kernel[grid](*arguments, **constants)
    return True


def _kind(transform: LogitTransform | None) -> int:
    """The kernels' TRANSFORM: 0 identity, 1 scaled, 2 capped."""
    return 0 if transform is None else 1 if transform.softcap is None else 2


def _factors(transform: LogitTransform | None) -> tuple[float, float]:
    """The kernels' `factor` and `softcap`."""
    if transform is None:
        return 1.0, 1.0
    if transform.softcap is None:
        return float(transform.scale), 1.0
    return transform.scale / transform.softcap, float(transform.softcap)


def _give_up(error: Exception) -> None:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    _refusals.append(reason)
    logger.warning(
        "Triton cannot build the losses' kernels here, PyTorch's own operations take their place "
        "from here on: %s",
        reason,
    )

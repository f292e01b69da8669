"""Time and peak memory of one case on this rank; a case with a wrong result is not timed.

Shapes: s sequence, h hidden, v vocabulary, vp = v / tp.
"""

import contextlib
import time

import torch
import torch.distributed as dist

from megatron_kd.losses import kernels
from megatron_kd.tools.benchmark.cases import DTYPES, Case
from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS, REFERENCES, Implementation
from megatron_kd.tools.benchmark.inputs import Inputs
from megatron_kd.tools.benchmark.peak_memory import peak_bytes

# The comparison runs on the first positions, in chunks that do not divide them.
CHECK_TOKENS, CHECK_CHUNK_TOKENS = 160, 64
# Largest difference from the reference, relative to the reference's largest entry.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


class WrongResult(Exception):
    """An implementation does not compute what the others of its quantity compute."""


def make_inputs(case: Case, group=None, **changes) -> Inputs:
    device = torch.device(case.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    shape = dict(
        seq_tokens=case.seq_tokens,
        hidden=case.hidden,
        vocab=case.vocab,
        topk=case.topk,
        chunk_tokens=case.chunk_tokens,
    )
    return Inputs(**(shape | changes), dtype=DTYPES[case.dtype], device=device, group=group)


def step(implementation: Implementation, inputs: Inputs):
    """Run one forward and backward pass; returns the loss [], or None where there is none."""
    inputs.clear_gradients()
    backend = implementation.backend
    with kernels.use_backend(backend) if backend else contextlib.nullcontext():
        loss = implementation.mean_loss(inputs)
        if loss is not None:
            loss.backward()
    return loss


def check(implementation: Implementation, inputs: Inputs) -> None:
    """Compare loss, dH and dW with the reference of the quantity.

    Raises:
        WrongResult: They differ by more than rounding.
    """
    if implementation.quantity not in REFERENCES:
        return
    reference = IMPLEMENTATIONS[REFERENCES[implementation.quantity]]
    results = []
    for each in (reference, implementation):
        loss = step(each, inputs).detach()
        results.append({"loss": loss, "dH": inputs.hidden.grad, "dW": inputs.weight.grad})
    inputs.clear_gradients()
    for name, want in results[0].items():
        want, got = want.double(), results[1][name].double()
        error = ((got - want).abs().max() / want.abs().max()).item()
        limit = TOLERANCES[inputs.dtype]
        if not error <= limit:
            raise WrongResult(
                f"{name} of {implementation.title} differs from {reference.title} by {error:.1e} "
                f"of its largest entry, more than {limit:.0e}"
            )


def check_case(case: Case, group=None) -> None:
    tokens = min(case.seq_tokens, CHECK_TOKENS)
    chunk = min(case.chunk_tokens or CHECK_CHUNK_TOKENS, CHECK_CHUNK_TOKENS)
    inputs = make_inputs(case, group, seq_tokens=tokens, chunk_tokens=chunk)
    check(IMPLEMENTATIONS[case.implementation], inputs)


def timed_step_ms(implementation: Implementation, inputs: Inputs) -> float:
    """Time of one step that all ranks start together, the device idle before and after it."""
    if inputs.group is not None:
        dist.barrier(inputs.group)
    _wait(inputs.device)
    start = time.perf_counter()
    step(implementation, inputs)
    _wait(inputs.device)
    return (time.perf_counter() - start) * 1e3


def step_peak_bytes(implementation: Implementation, inputs: Inputs) -> int:
    inputs.clear_gradients()
    return peak_bytes(lambda: step(implementation, inputs), inputs.device)


def transient_bytes(peak: int, inputs: Inputs) -> int:
    """The part of a step's peak that is neither dH nor dW nor the loss [s, 1] in fp32, nor the fp32
    sum that dW is rounded from where the dtype is narrower.
    """
    size, width = inputs.dtype.itemsize, inputs.hidden_size
    weights = (inputs.stop - inputs.start) * width
    gradients = (inputs.seq_tokens * width + weights) * size
    return peak - gradients - 4 * inputs.seq_tokens - (4 * weights if size < 4 else 0)


def measure(case: Case, group=None) -> dict:
    """Measure a case over a fixed number of iterations, each the maximum over ranks.

    Returns:
        times_ms, peak_memory_bytes, transient_memory_bytes.
    """
    check_case(case, group)
    implementation, inputs = IMPLEMENTATIONS[case.implementation], make_inputs(case, group)
    for _ in range(case.warm_up_iterations):
        step(implementation, inputs)
    times = [timed_step_ms(implementation, inputs) for _ in range(case.iterations)]
    # Last: a case that outgrows its memory limit has failed by now, and the recording has none.
    peak = step_peak_bytes(implementation, inputs)
    values = torch.tensor([peak, *times], dtype=torch.float64, device=inputs.device)
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    peak, *times = values.tolist()
    return {
        "times_ms": times,
        "peak_memory_bytes": int(peak),
        "transient_memory_bytes": transient_bytes(int(peak), inputs),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

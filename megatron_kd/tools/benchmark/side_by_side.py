"""All implementations in turn in one warm process: their ratios, on a machine that others use.

Within a round everything runs once, so a slow spell hits neighbours alike; a ratio is the median
over rounds of the ratio to that round's bare products. The order changes from round to round. With
one thread the ratio of processor times says the same without the time spent waiting for a core.
"""

import random
import time

import torch

from megatron_kd.tools.benchmark.cases import Case
from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS
from megatron_kd.tools.benchmark.measure import (
    WrongResult,
    check_case,
    make_inputs,
    step,
    step_peak_bytes,
    timed_step_ms,
    transient_bytes,
)
from megatron_kd.tools.benchmark.peak_memory import is_out_of_memory

ORDER_SEED = 0


def measure_side_by_side(cases: list[Case], chunk_tokens: int) -> list[tuple[Case, dict]]:
    """Measure cases of one shape in turn; returns each with an outcome as `measure` gives it."""
    inputs = make_inputs(cases[0], chunk_tokens=chunk_tokens)
    outcomes = {case: _prepare(case, inputs) for case in cases}
    running = [case for case in cases if outcomes[case]["status"] == "ok"]
    order = random.Random(ORDER_SEED)
    for _ in range(cases[0].iterations):
        order.shuffle(running)
        for case in running:
            cpu_start_s = time.process_time()
            time_ms = timed_step_ms(IMPLEMENTATIONS[case.implementation], inputs)
            outcomes[case]["times_ms"].append(time_ms)
            outcomes[case]["cpu_times_ms"].append((time.process_time() - cpu_start_s) * 1e3)
    return list(outcomes.items())


def _prepare(case: Case, inputs) -> dict:
    """Compare a case with its reference, warm it up and measure its memory.

    Returns:
        An outcome as `measure` gives it, its lists of times still empty.
    """
    implementation = IMPLEMENTATIONS[case.implementation]
    missing = implementation.missing(torch.device(case.device))
    if missing:
        return {"status": "not_available", "note": missing}
    try:
        check_case(case)
        for _ in range(case.warm_up_iterations):
            step(implementation, inputs)
        peak = step_peak_bytes(implementation, inputs)
    except WrongResult as error:
        return {"status": "wrong_result", "note": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "out_of_memory", "note": str(error).strip().splitlines()[0][:200]}
    return {
        "status": "ok",
        "note": "",
        "times_ms": [],
        "cpu_times_ms": [],
        "peak_memory_bytes": peak,
        "transient_memory_bytes": transient_bytes(peak, inputs),
    }

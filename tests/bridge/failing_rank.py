"""scripts/distill.py with a fault: rank 1 fails at the start of its third step, with an error of a
type that bad input raises too.
"""

import atexit
import os
import runpy
import sys
import time
from pathlib import Path

from megatron_kd.host.cpu import backend as cpu_backend

DISTILL = Path(__file__).parents[2] / "scripts" / "distill.py"
FAULT = "rank 1 was told to fail"
LATER_S = 3


def main():
    cpu_backend.activate()
    from megatron_kd.host.callbacks.metrics import RunMetrics

    start_step = RunMetrics.on_train_step_start

    def fail_in_rank_1(self, context):
        if os.environ["RANK"] == "1" and context.state.train_state.step == 2:
            raise ValueError(FAULT)
        start_step(self, context)

    if os.environ["RANK"] == "0":
        # It loses its connection and fails as well. torchrun names the rank that it saw end first,
        # and on a busy machine that could be this one.
        atexit.register(time.sleep, LATER_S)
    RunMetrics.on_train_step_start = fail_in_rank_1
    sys.argv[0] = str(DISTILL)
    runpy.run_path(str(DISTILL), run_name="__main__")


if __name__ == "__main__":
    main()

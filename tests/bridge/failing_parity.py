"""scripts/distill.py with a fault: rank 1 cannot make its shrunken copy, and rank 0 is already
waiting for it in a collective.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from megatron_kd.host.cpu import backend as cpu_backend

DISTILL = Path(__file__).parents[2] / "scripts" / "distill.py"
FAULT = "rank 1 has no room for it"
LATER_S = 3


def main():
    cpu_backend.activate()
    from megatron_kd.host.parity import shrunken

    write = shrunken.write_configuration

    def fail_in_rank_1(*args, **kwargs):
        if os.environ["RANK"] == "1":
            time.sleep(LATER_S)
            raise OSError(FAULT)
        return write(*args, **kwargs)

    shrunken.write_configuration = fail_in_rank_1
    sys.argv[0] = str(DISTILL)
    runpy.run_path(str(DISTILL), run_name="__main__")


if __name__ == "__main__":
    main()

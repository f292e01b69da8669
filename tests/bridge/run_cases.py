"""Run several recipes one after another in one group of ranks: torchrun run_cases.py CASES.json

CASES.json holds a list of {"config": path, "overrides": [...]}. Importing the host takes longer
than a small run, so tests share a launch. Each case writes its metrics to its own output_dir.
"""

import json
import sys
import traceback
from pathlib import Path

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def main() -> int:
    cpu_backend.activate()
    import torch
    from megatron.bridge.training.utils import checkpoint_utils

    from megatron_kd.host import train as bridge

    # The host destroys a group that it made itself, and torchrun's store does not survive a second
    # one.
    torch.distributed.init_process_group("gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        config = from_recipe(case["config"], case["overrides"])
        # The host remembers a checkpoint's progress by file name, and counts on in what it recalls.
        checkpoint_utils.read_train_state.cache_clear()
        try:
            bridge.run(config, bridge.prepare(config))
        except BaseException:
            traceback.print_exc()
            print(f"case failed: {case}", file=sys.stderr)
            return 1
        destroy_subgroups()
    torch.distributed.destroy_process_group()
    return 0


def destroy_subgroups() -> None:
    """End every group but the default one. A run makes dozens, the host only forgets them, and
    each keeps a thread of gloo's polling: after ten cases they would take most of the processor.
    """
    from torch.distributed import GroupMember, destroy_process_group, distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        if group is not GroupMember.WORLD:
            destroy_process_group(group)


if __name__ == "__main__":
    sys.exit(main())

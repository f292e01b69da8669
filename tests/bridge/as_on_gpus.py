"""Check recipes as on GPUs, with nothing of the CPU backend in their configuration: as_on_gpus.py
RECIPE, lists of overrides as JSON on standard input. Prints one line of JSON per list: what the
precision of model and optimizer would be, or the refusal.
"""

import json
import sys

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def main() -> None:
    cpu_backend.activate()
    from megatron_kd.host import checks, train
    from megatron_kd.host.container import build_container

    for overrides in json.load(sys.stdin):
        config = from_recipe(sys.argv[1], overrides)
        try:
            train.rehearse(config)
            ran = checks.by_host.as_started(build_container(config, on_cpu=False), 1)
            answer = [ran.model.bf16, ran.optimizer.bf16, ran.ddp.grad_reduce_in_fp32]
        except ValueError as error:
            answer = str(error)
        print(f"ANSWER {json.dumps(answer)}")


if __name__ == "__main__":
    main()

"""Prepare one recipe with several lists of overrides, read as JSON from standard input, and start
nothing: prints one line of JSON per list, "accepted" or the refusal.
"""

import json
import sys

import torch

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def main() -> None:
    cpu_backend.activate()
    from megatron_kd.host import train as bridge

    for overrides in json.load(sys.stdin):
        try:
            bridge.prepare(from_recipe(sys.argv[1], overrides))
            answer = "accepted"
        except (ValueError, OSError) as error:
            answer = str(error)
        print(f"ANSWER {json.dumps(answer)}")
    assert not torch.distributed.is_initialized()


if __name__ == "__main__":
    main()

"""Prepare one recipe with several lists of overrides, read as JSON from standard input, and start
nothing: prints one line of JSON per list, "accepted" or the refusal. A list that begins with
"start" is checked as for a run that would start next, in this process alone.
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
        starts = overrides[:1] == ["start"]
        try:
            config = from_recipe(sys.argv[1], overrides[1:] if starts else overrides)
            bridge.prepare(config, starts=starts)
            answer = "accepted"
        except (ValueError, OSError) as error:
            answer = str(error)
        print(f"ANSWER {json.dumps(answer)}")
    assert not torch.distributed.is_initialized()


if __name__ == "__main__":
    main()

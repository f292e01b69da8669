"""Whether the losses that come with the host compute what ours do: peers_agree.py NAME … prints
"ANSWER " and JSON per name: null, or why it is missing. A wrong result raises.
"""

import json
import sys

from megatron_kd.host.cpu import backend


def main() -> None:
    backend.activate()
    import torch

    from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS
    from megatron_kd.tools.benchmark.inputs import Inputs
    from megatron_kd.tools.benchmark.measure import check

    shape = dict(seq_tokens=50, hidden=16, vocab=120, topk=12, chunk_tokens=16)
    inputs = Inputs(**shape, dtype=torch.float32, device=torch.device("cpu"))
    for name in json.load(sys.stdin):
        peer = IMPLEMENTATIONS[name]
        missing = peer.missing(inputs.device)
        if missing is None:
            check(peer, inputs)
        print(f"ANSWER {json.dumps(missing)}")


if __name__ == "__main__":
    main()

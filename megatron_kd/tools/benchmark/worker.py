"""One rank of one case, in a fresh process: `python -m … CASE RANK FOLDER`.

CASE is JSON. The outcome is written to FOLDER/result-RANK.json, whole or not at all.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_kd.tools.benchmark.cases import Case
from megatron_kd.tools.benchmark.implementations import IMPLEMENTATIONS
from megatron_kd.tools.benchmark.measure import WrongResult, measure
from megatron_kd.tools.benchmark.peak_memory import is_out_of_memory, limit_address_space

RENDEZVOUS_TIMEOUT = timedelta(minutes=30)


def outcome_of(case: Case, rank: int, folder: Path) -> dict:
    torch.set_num_threads(case.threads)
    device = torch.device(case.device)
    missing = IMPLEMENTATIONS[case.implementation].missing(device)
    if missing:
        return {"status": "not_available", "note": missing}
    group = None
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    if case.tp > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=case.tp,
            timeout=RENDEZVOUS_TIMEOUT,
        )
        group = dist.group.WORLD
    if device.type == "cpu" and case.memory_limit_bytes:
        limit_address_space(case.memory_limit_bytes)
    try:
        return {"status": "ok", "note": "", **measure(case, group)}
    except WrongResult as error:
        return {"status": "wrong_result", "note": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "out_of_memory", "note": str(error).strip().splitlines()[0][:200]}


def main() -> int:
    case, rank, folder = Case(**json.loads(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    outcome = outcome_of(case, rank, folder)
    partial = folder / f"partial-{rank}"
    partial.write_text(json.dumps(outcome))
    partial.rename(folder / f"result-{rank}.json")
    sys.stdout.flush()
    if outcome["status"] == "ok" and dist.is_initialized():
        dist.destroy_process_group()
        return 0
    os._exit(0)  # other ranks may wait in a collective: no orderly end with them


if __name__ == "__main__":
    sys.exit(main())

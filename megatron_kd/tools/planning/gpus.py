"""The accelerators a run can be planned for: memory as PyTorch reports it, vendor's dense peaks."""

import difflib
from dataclasses import dataclass

# Kept free of plan: CUDA context, NCCL and cuBLAS workspaces, fragmentation.
RESERVED_SHARE = 0.05


@dataclass(frozen=True)
class GPU:
    name: str
    memory_gib: float
    bf16_tflops: float
    """Dense matrix products, no sparsity."""

    bandwidth_gb_s: float
    link_gb_s: float
    """Bandwidth of the link to one other GPU of the node, in one direction."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (1 - RESERVED_SHARE))


GPUS = {
    "a100-40": GPU("A100 40 GB", 39.4, 312, 1555, 300),
    "a100": GPU("A100 80 GB", 79.2, 312, 2039, 300),
    "h100": GPU("H100 80 GB", 79.1, 989, 3350, 450),
    "h200": GPU("H200", 139.8, 989, 4800, 450),
    "b200": GPU("B200", 178.4, 2250, 8000, 900),
    "l40s": GPU("L40S", 44.4, 362, 864, 32),
    "rtx4090": GPU("RTX 4090", 23.5, 165, 1008, 32),
}


def gpu(name: str) -> GPU:
    key = name.lower().replace("_", "-").replace(" ", "")
    if key not in GPUS:
        near = difflib.get_close_matches(key, GPUS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"--gpu {name} is not known; choose from {', '.join(GPUS)}{hint}")
    return GPUS[key]

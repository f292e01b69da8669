"""Run one recipe on one rank of simulated GPUs: run_as_on_gpus.py RECIPE key=value …

The configuration is the one that a GPU gets: its precision, optimizer, overlaps and fusions. Of
what the CPU backend sets, only what a CPU has no other answer to is kept (`NEEDED`), so what fails
on a GPU for its configuration fails here. `--bare-precision` first takes the chosen precision out
again: a fault that must be seen.
"""

import os
import sys

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend

# Field of the provider: why a CPU cannot do without. For all others Core has a way in plain
# PyTorch, or the backend has a stand-in (the fused weight gradient).
NEEDED = {
    "transformer_layer_spec": "Transformer Engine's layers",
    "transformer_impl": "Transformer Engine's layers",
    "persist_layer_norm": "a kernel of Apex or Transformer Engine",
    "masked_softmax_fusion": "an extension of Apex",
    "apply_rope_fusion": "a kernel of Transformer Engine",
    "moe_grouped_gemm": "a kernel of Transformer Engine",
    "moe_permute_fusion": "a kernel of Transformer Engine",
    "moe_router_fusion": "a kernel of Transformer Engine",
    "deallocate_pipeline_outputs": "what is being sent must stay until it is there",
}


def main() -> None:
    cpu_backend.activate()
    import torch

    from megatron_kd.host import checks, train
    from megatron_kd.host.container import build_container

    bare = sys.argv[1] == "--bare-precision"
    recipe, *overrides = sys.argv[1 + bare :]
    config = from_recipe(recipe, overrides)
    container = build_container(config, on_cpu=False)
    if bare:
        container.mixed_precision = None
    else:
        checks.check(config, container, on_cpu=False, starts=True)
    settings = cpu_backend.provider_settings()
    for name in NEEDED:
        setattr(container.model, name, settings[name])
    # The host turns it on where it finds the kernel, for which the backend has a stand-in.
    if "gradient_accumulation_fusion" not in config.bridge.get("model", {}):
        container.model.gradient_accumulation_fusion = True
    container.dist.distributed_backend = "gloo"
    container.dist.use_gloo_process_groups = True
    container.dataset.pin_memory = False
    train.run(config, container)
    if int(os.environ["RANK"]) == 0:
        ran = container.model
        report = [ran.bf16, container.optimizer.bf16, ran.gradient_accumulation_fusion]
        print(f"RAN {report}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking thousands of modules down takes as long as the run


if __name__ == "__main__":
    main()

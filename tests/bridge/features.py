"""Features of the host that must not change a run: how each is switched on, and what it equals."""

from dataclasses import dataclass
from pathlib import Path

ADAM = [
    "bridge.optimizer.optimizer=adam",
    "bridge.optimizer.lr=1e-3",
    "bridge.optimizer.min_lr=1e-3",
]
DISTRIBUTED = [*ADAM, "bridge.ddp.use_distributed_optimizer=true"]
OVERLAP_GRADS = "bridge.ddp.overlap_grad_reduce=true"
FUSION = "bridge.model.gradient_accumulation_fusion=true"
DENSE = "loss.impl=dense"
RESIDENT = ["mode=online", "teacher.hf_path={world}/teacher", "data.path={world}/data"]
DEEP = ["student.hf_path={world}/deep"]  # four layers, for two stages of two chunks
PP2 = "bridge.model.pipeline_model_parallel_size=2"
VPP = [
    PP2,
    "bridge.model.virtual_pipeline_model_parallel_size=2",
    "bridge.model.overlap_p2p_comm=true",
    "bridge.model.batch_p2p_comm=false",
]
FULL_RECOMPUTE = [
    "bridge.model.recompute_granularity=full",
    "bridge.model.recompute_method=uniform",
    "bridge.model.recompute_num_layers=1",
]
SELECTIVE_RECOMPUTE = ["bridge.model.recompute_granularity=selective"]
BLOCK = ["cache.path={world}/block/cache", "data.shuffle=false"]

# Heads for multi-token prediction have no weights in a Llama directory: they start at random, so
# other layouts continue from a checkpoint of the first. (The host cannot resume SGD.)
HEADS = [
    *ADAM,
    "student.load_weights=false",
    "bridge.model.mtp_num_layers=1",
    "bridge.model.mtp_loss_scaling_factor=0.3",
]
HEADS_SAVE = [
    "bridge.checkpoint.save={world}/heads",
    "bridge.checkpoint.save_interval=2",
    "bridge.checkpoint.load={world}/heads",
]
HEADS_CONTINUE = ["bridge.checkpoint.load={world}/heads", "bridge.checkpoint.ckpt_step=2"]

# Auxiliary losses large enough to be most of the gradient.
ROUTER = [
    "student.hf_path={world}/moe",
    "bridge.model.moe_aux_loss_coeff=0.5",
    "bridge.model.moe_z_loss_coeff=0.05",
]
NO_ROUTER_LOSS = ["student.hf_path={world}/moe", "bridge.model.moe_aux_loss_coeff=0"]


@dataclass(frozen=True)
class Feature:
    """One run; `equals` names the run it must equal, `since` its first iteration to compare;
    `core`: the core of the tests runs it.
    """

    ranks: int
    overrides: tuple[str, ...]
    equals: str | None = None
    since: int = 1
    core: bool = False

    def resolved(self, world: Path) -> list[str]:
        return [override.replace("{world}", str(world)) for override in self.overrides]


def _feature(ranks, *parts, **options) -> Feature:
    flat = [x for part in parts for x in ([part] if isinstance(part, str) else part)]
    return Feature(ranks, tuple(flat), **options)


PLAIN, BLOCK_PLAIN = "student-plain-fused-1", "student-block-fused-1"

FEATURES = {
    "adam": _feature(1, ADAM, core=True),
    "deep": _feature(1, DEEP),
    "heads": _feature(1, HEADS, HEADS_SAVE, core=True),
    "router losses": _feature(1, ROUTER),
    "no router loss": _feature(1, NO_ROUTER_LOSS),
    "distributed optimizer": _feature(2, DISTRIBUTED, equals="adam", core=True),
    "recompute full": _feature(1, FULL_RECOMPUTE, equals=PLAIN),
    "recompute selective": _feature(1, SELECTIVE_RECOMPUTE, equals=PLAIN),
    "recompute full, block": _feature(1, BLOCK, FULL_RECOMPUTE, equals=BLOCK_PLAIN),
    "recompute selective, block": _feature(1, BLOCK, SELECTIVE_RECOMPUTE, equals=BLOCK_PLAIN),
    "fusion": _feature(1, FUSION, equals=PLAIN),
    "fusion, dense": _feature(1, FUSION, DENSE, equals=PLAIN),
    "fusion, distributed optimizer": _feature(2, DISTRIBUTED, FUSION, equals="adam"),
    "overlap of gradient reduction": _feature(2, OVERLAP_GRADS, equals=PLAIN),
    "overlap of gradients and parameters": _feature(
        2, DISTRIBUTED, OVERLAP_GRADS, "bridge.ddp.overlap_param_gather=true", equals="adam"
    ),
    "virtual pipeline": _feature(2, DEEP, VPP, equals="deep"),
    "deep, block": _feature(1, DEEP, BLOCK),
    "deep, block, PP 4": _feature(  # stages that are neither first nor last
        4, DEEP, BLOCK, "bridge.model.pipeline_model_parallel_size=4", equals="deep, block"
    ),
    "heads, dense": _feature(1, HEADS, DENSE, equals="heads"),
    "heads, fusion": _feature(1, HEADS, FUSION, equals="heads", core=True),
    "heads, fusion, dense": _feature(1, HEADS, FUSION, DENSE, equals="heads"),
    "heads, online": _feature(1, HEADS, RESIDENT, "loss.impl=fused_online"),
    "heads, online, dense": _feature(1, HEADS, RESIDENT, DENSE, equals="heads, online"),
    "heads, online, fusion": _feature(
        1, HEADS, RESIDENT, "loss.impl=fused_online", FUSION, equals="heads, online"
    ),
    "heads, DP 2": _feature(2, HEADS, HEADS_CONTINUE, equals="heads", since=3),
    "heads, CP 2": _feature(
        2,
        HEADS,
        HEADS_CONTINUE,
        "bridge.model.context_parallel_size=2",
        equals="heads",
        since=3,
    ),
    "heads, TP 2 + SP": _feature(
        2,
        HEADS,
        HEADS_CONTINUE,
        "bridge.model.tensor_model_parallel_size=2",
        "bridge.model.sequence_parallel=true",
        equals="heads",
        since=3,
    ),
    "heads, PP 2": _feature(2, HEADS, HEADS_CONTINUE, PP2, equals="heads", since=3),
    "router losses, DP 2": _feature(2, ROUTER, equals="router losses"),
    "router losses, EP 2": _feature(
        2, ROUTER, "bridge.model.expert_model_parallel_size=2", equals="router losses"
    ),
    "router losses, TP 2 + SP": _feature(
        2,
        ROUTER,
        "bridge.model.tensor_model_parallel_size=2",
        "bridge.model.sequence_parallel=true",
        equals="router losses",
    ),
    "router losses, CP 2": _feature(
        2, ROUTER, "bridge.model.context_parallel_size=2", equals="router losses"
    ),
}

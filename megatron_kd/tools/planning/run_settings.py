"""What of a recipe decides memory and time: sizes, ranks, precision, recompute mode, loss."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_kd.config import DistillConfig, LoraConfig, LossConfig
from megatron_kd.tools.planning.model_shape import ModelShape

RECOMPUTE = ("none", "selective", "full")
# Optimizers by name: fp32 state tensors per parameter.
STATES = {"adam": 2, "sgd": 1}


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Megatron-Core's activation recomputation."""

    mode: str = "none"
    modules: tuple[str, ...] = ("core_attn",)
    method: str = "uniform"
    layers: int = 1
    """uniform: layers per checkpoint; block: checkpointed layers per stage."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    sequence_length: int
    micro_batch: int = 1
    global_batch: int = 1
    train_iters: int = 0
    ranks: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    sequence_parallel: bool = False
    sixteen_bit: bool = True
    """Weights and activations in bf16 or fp16 beside fp32 main weights; otherwise all in fp32."""

    fp16: bool = False
    """The sixteen bits are fp16."""

    gradient_bytes: int = 4
    state_bytes: int = 12
    """The optimizer's bytes per parameter: fp32 main weights and states."""

    distributed_optimizer: bool = False
    vocab_divisor: int = 128
    recompute: Recompute = Recompute()
    mode: str = "offline"
    loss: LossConfig = field(default_factory=LossConfig)
    topk: int = 100
    lora: LoraConfig | None = None
    """Adapters are trained and all else is frozen; None trains everything."""

    uncounted_freeze: str | None = None
    """The recipe's key that freezes a part which is counted as trained all the same."""

    def __post_init__(self):
        replica = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if self.ranks % replica:
            raise ValueError(
                f"{self.ranks} ranks cannot hold replicas of {replica} (tensor "
                f"{self.tensor_parallel} × pipeline {self.pipeline_parallel} × context "
                f"{self.context_parallel}); give --ranks a multiple of {replica}"
            )
        if self.global_batch % (self.micro_batch * self.data_parallel):
            raise ValueError(
                f"bridge.train.global_batch_size={self.global_batch} is not a multiple of "
                f"micro_batch_size {self.micro_batch} × {self.data_parallel} data-parallel replicas"
            )
        experts = self.expert_parallel * self.expert_tensor_parallel * self.pipeline_parallel
        if self.ranks % experts:
            raise ValueError(
                f"{self.ranks} ranks cannot hold experts over {experts} (expert "
                f"{self.expert_parallel} × expert tensor {self.expert_tensor_parallel} × pipeline "
                f"{self.pipeline_parallel}); give --ranks a multiple of {experts}"
            )

    @property
    def data_parallel(self) -> int:
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def value_bytes(self) -> int:
        return 2 if self.sixteen_bit else 4

    @property
    def loss_recomputes(self) -> bool:
        """What `loss.gradient` comes to: recompute, or (False) in_forward. Left to itself the loss
        recomputes in fp16 alone, whose scaled gradients it cannot form ahead."""
        if self.loss.gradient == "auto":
            return self.fp16
        return self.loss.gradient == "recompute"

    @property
    def positions(self) -> int:
        """Positions of one micro-batch that one rank computes."""
        return -(-self.sequence_length // self.context_parallel) * self.micro_batch


def from_config(
    config: DistillConfig, student: ModelShape, *, ranks: int | None, topk: int | None
) -> RunSettings:
    """The settings of a recipe; what it leaves open has the host's defaults.

    Raises:
        ValueError: A setting the plan does not cover, or sizes that do not fit each other.
    """
    model, train = _section(config, "model"), _section(config, "train")
    ddp, optimizer = _section(config, "ddp"), _section(config, "optimizer")
    _refuse(config, model, ddp, optimizer)
    tensor = model.get("tensor_model_parallel_size") or 1
    pipeline = model.get("pipeline_model_parallel_size") or 1
    context = model.get("context_parallel_size") or 1
    expert = model.get("expert_model_parallel_size") or 1
    expert_tensor = model.get("expert_tensor_parallel_size") or tensor  # as the host fills it in
    precision = _precision(config, model, student)
    sixteen = precision != "fp32"
    manifest = split_manifest(config) or {}
    return RunSettings(
        sequence_length=_sequence_length(config, model),
        micro_batch=train.get("micro_batch_size") or 1,
        global_batch=train.get("global_batch_size") or 1,
        train_iters=train.get("train_iters") or 0,
        ranks=ranks
        or config.launch.ranks
        or math.lcm(tensor * context, expert * expert_tensor) * pipeline,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline=model.get("virtual_pipeline_model_parallel_size") or 1,
        context_parallel=context,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
        sequence_parallel=bool(model.get("sequence_parallel")) and tensor > 1,
        sixteen_bit=sixteen,
        fp16=precision == "fp16",
        gradient_bytes=2 if sixteen and not _fp32_reduction(config, ddp) else 4,
        state_bytes=_state_bytes(optimizer, sixteen),
        distributed_optimizer=bool(
            ddp.get("use_distributed_optimizer") or optimizer.get("use_distributed_optimizer")
        ),
        vocab_divisor=model.get("make_vocab_size_divisible_by") or 128,
        recompute=_recompute(model),
        mode=config.mode,
        loss=config.loss,
        topk=topk or manifest.get("topk") or 100,
        lora=None if student.experts else config.student.lora,
        uncounted_freeze=_uncounted_freeze(config, student),
    )


def _uncounted_freeze(config: DistillConfig, student: ModelShape) -> str | None:
    if config.student.lora is not None and student.experts:
        return "student.lora"
    return "student.train_only" if config.student.train_only else None


def split_manifest(config: DistillConfig, split: str = "train") -> dict | None:
    """The manifest of the cache or else of the prepared data, where it is there already."""
    for root in (config.cache.path if config.mode == "offline" else None, config.data.path):
        file = Path(root or "", split, "manifest.json")
        if root and "://" not in str(root) and file.is_file():
            return json.loads(file.read_text())
    return None


def _section(config: DistillConfig, name: str) -> Mapping:
    section = config.bridge.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"bridge.{name} must be a mapping, not {section!r}")
    return section


def _refuse(config, model, ddp, optimizer) -> None:
    """Refuse settings that the plan does not cover and whose numbers would be silently wrong."""
    dist = _section(config, "dist")
    uncovered = {
        "bridge.ddp.use_megatron_fsdp": ddp.get("use_megatron_fsdp"),
        "bridge.dist.use_megatron_fsdp": dist.get("use_megatron_fsdp"),
        "bridge.dist.use_torch_fsdp2": dist.get("use_torch_fsdp2"),
        "bridge.model.cpu_offloading": model.get("cpu_offloading"),
        "bridge.optimizer.optimizer_cpu_offload": optimizer.get("optimizer_cpu_offload"),
    }
    for key, value in uncovered.items():
        if value:
            raise ValueError(f"{key} is not covered by the plan; plan without it")


def _sequence_length(config: DistillConfig, model: Mapping) -> int:
    length = model.get("seq_length")
    if length is None:
        manifest = split_manifest(config) or {}
        for entry in (manifest, manifest.get("data") or {}):
            if isinstance(entry, Mapping) and entry.get("seq_length"):
                length = entry["seq_length"]
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            f"bridge.model.seq_length must be a positive number of tokens, not {length!r}; no "
            "prepared data or cache says it either: append bridge.model.seq_length=…"
        )
    return length


def _precision(config: DistillConfig, model: Mapping, student: ModelShape) -> str:
    """bf16, fp16 or fp32."""
    precision = config.bridge.get("mixed_precision")
    if isinstance(precision, str):
        if "fp8" in precision or "fp4" in precision:
            raise ValueError(
                f"bridge.mixed_precision={precision}: the plan covers bf16, fp16 and fp32; plan "
                "with bf16_mixed for an upper bound"
            )
        return next((kind for kind in ("bf16", "fp16") if kind in precision), "fp32")
    for section in (precision or {}, model):
        for kind in ("bf16", "fp16"):
            if section.get(kind):
                return kind
    return {"bfloat16": "bf16", "float16": "fp16"}.get(student.dtype, "fp32")


def _fp32_reduction(config: DistillConfig, ddp: Mapping) -> bool:
    precision = config.bridge.get("mixed_precision")
    if isinstance(precision, str):  # a named one sets it, whatever the ddp section says
        return True
    if precision and "grad_reduce_in_fp32" in precision:
        return bool(precision["grad_reduce_in_fp32"])
    return bool(ddp.get("grad_reduce_in_fp32", True))


def _state_bytes(optimizer: Mapping, sixteen: bool) -> int:
    name = optimizer.get("optimizer") or "adam"
    if name not in STATES:
        raise ValueError(
            f"bridge.optimizer.optimizer={name} is not covered by the plan; it knows "
            f"{', '.join(STATES)}"
        )
    if not optimizer.get("use_precision_aware_optimizer"):
        return 4 * STATES[name] + (4 if sixteen else 0)
    main = _bytes_of(optimizer.get("main_params_dtype")) if sixteen else 0
    moments = ("exp_avg_dtype", "exp_avg_sq_dtype")[: STATES[name]]
    return main + sum(_bytes_of(optimizer.get(key)) for key in moments)


def _bytes_of(dtype) -> int:
    name = str(dtype or "float32").removeprefix("torch.")
    if name.startswith(("fp8", "float8", "uint8")):
        return 1
    return 2 if "16" in name else 4


def _recompute(model: Mapping) -> Recompute:
    mode = model.get("recompute_granularity") or "none"
    if mode not in RECOMPUTE:
        raise ValueError(
            f"bridge.model.recompute_granularity must be full, selective or null, not {mode}"
        )
    return Recompute(
        mode=mode,
        modules=tuple(model.get("recompute_modules") or ("core_attn",)),
        method=model.get("recompute_method") or "uniform",
        layers=model.get("recompute_num_layers") or 1,
    )

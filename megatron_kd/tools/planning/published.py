"""The published figures beside this plan's estimates of the same runs.

Single H200; Llama-3.1-8B teacher, 3.23B student; micro-batch 1 of a global batch of 32; bf16 mixed
precision with fp32 gradients (arXiv 2608.03796). Two things the figures at hand do not say are
assumptions here: "GB" is read as 2**30 bytes, which is what PyTorch's tools print, and the
recompute mode is taken per length (`PublishedPoint.recompute`).

Everything is counted but for one constant, `DENSE_FP32_COPIES`: the published dense loss is not
this library's (which holds one fp32 copy of the logits), and its code is not at hand to be counted.
"""

from dataclasses import dataclass, replace

import torch

from megatron_kd.config import LossConfig
from megatron_kd.tools.planning.gpus import GPU, GPUS
from megatron_kd.tools.planning.loss_memory import LossMemory, loss_memory, rank_vocab
from megatron_kd.tools.planning.memory import StageMemory, plan_memory, rank_parameters
from megatron_kd.tools.planning.model_shape import ModelShape, shape_of_config
from megatron_kd.tools.planning.settings import Recompute, Settings
from megatron_kd.tools.planning.time_cost import StepTime, step_time

SOURCE_GPU: GPU = GPUS["h200"]

# fp32 tensors of the logits' size that the published dense loss holds at its peak. The one fitted
# constant: the whole number with the smallest largest error over the three dense points.
DENSE_FP32_COPIES = 6
# Of the teacher's logits, online: their fp32 copy and its softmax.
TEACHER_FP32_COPIES = 2


@dataclass(frozen=True)
class PublishedPoint:
    label: str
    sequence_length: int
    impl: str
    published_gib: float
    recompute: str
    """Assumed; the source's figures do not say it."""

    step_s: float | None = None


POINTS = (
    PublishedPoint("online", 8192, "online_dense", 103, "full", 25.9),
    PublishedPoint("offline dense", 8192, "dense", 78, "full", 18.5),
    PublishedPoint("forward-chunked (sparse_chunked)", 8192, "sparse_chunked", 62, "full"),
    PublishedPoint("fused (fused_chunked)", 8192, "fused_chunked", 58, "full"),
    PublishedPoint("offline dense", 32768, "dense", 250, "none"),
    PublishedPoint("fused (fused_chunked)", 32768, "fused_chunked", 128, "none"),
)


def shapes() -> tuple[ModelShape, ModelShape]:
    """(student, teacher)"""
    from transformers import LlamaConfig

    common = dict(
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    student = LlamaConfig(hidden_size=2816, intermediate_size=7168, num_hidden_layers=28, **common)
    teacher = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, **common)
    return shape_of_config(student, "3.23B student"), shape_of_config(teacher, "Llama-3.1-8B")


def settings(point: PublishedPoint, recompute: str | None = None) -> Settings:
    """recompute: in place of the point's own."""
    return Settings(
        sequence_length=point.sequence_length,
        micro_batch=1,
        global_batch=32,
        recompute=Recompute(mode=recompute or point.recompute),
        mode="online" if point.impl == "online_dense" else "offline",
        loss=LossConfig(impl=point.impl.removeprefix("online_")),
    )


def estimate(
    point: PublishedPoint,
    student: ModelShape,
    teacher: ModelShape,
    *,
    recompute: str | None = None,
    fp32_copies: int = DENSE_FP32_COPIES,
) -> StageMemory:
    run, size = settings(point, recompute), SOURCE_GPU.memory_bytes
    loss = None
    if point.impl in ("dense", "online_dense"):
        loss = _dense(
            loss_memory(point.impl, student, run, size, teacher), student, run, fp32_copies
        )
    (stage,) = plan_memory(
        student, run, impl=point.impl, gpu_bytes=size, teacher=teacher, loss=loss
    )
    return stage


def estimated_step(point: PublishedPoint, student: ModelShape, teacher: ModelShape) -> StepTime:
    run = settings(point)
    parameters = sum(rank_parameters(student, run, 0))
    resident = teacher if point.impl == "online_dense" else None
    return step_time(
        student,
        run,
        impl=point.impl,
        gpu=SOURCE_GPU,
        trained_parameters=parameters,
        teacher=resident,
    )


def _dense(own: LossMemory, student: ModelShape, run: Settings, copies: int) -> LossMemory:
    """The published dense loss: this library's, with that code's copies of the logits."""
    fp32 = 4 * run.positions * rank_vocab(student, run)
    teacher = own.teacher_bytes and own.teacher_bytes + TEACHER_FP32_COPIES * fp32
    return replace(own, loss_bytes=copies * fp32, teacher_bytes=teacher)

"""Published figures of six runs that the plan is compared with in docs/memory.md.

One H200; Llama-3.1-8B teacher, 3.23B student; micro-batch 1 of a global batch of 32; bf16 mixed
precision with fp32 gradients. The figures do not say whether "GB" is 10**9 or 2**30 bytes (read as
2**30, which PyTorch's tools print), nor which layers were recomputed.

Source: arXiv 2608.03796.
"""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from megatron_kd.config import LossConfig
from megatron_kd.tools.planning.gpus import GPUS
from megatron_kd.tools.planning.model_shape import ModelShape, shape_of_config
from megatron_kd.tools.planning.run_settings import Recompute, RunSettings
from megatron_kd.tools.planning.stage_memory import peak_bytes, rank_parameters
from megatron_kd.tools.planning.time_cost import StepTime, step_time

SOURCE_GPU = GPUS["h200"]
GIB = 1 << 30


@dataclass(frozen=True)
class PublishedRun:
    label: str
    sequence_length: int
    impl: str
    peak_gib: float
    step_s: float | None = None


RUNS = (
    PublishedRun("online, dense", 8192, "online_dense", 103, 25.9),
    PublishedRun("offline, dense", 8192, "dense", 78, 18.5),
    PublishedRun("forward-chunked (`sparse_chunked`)", 8192, "sparse_chunked", 62),
    PublishedRun("fused (`fused_chunked`)", 8192, "fused_chunked", 58),
    PublishedRun("offline, dense", 32768, "dense", 250),
    PublishedRun("fused (`fused_chunked`)", 32768, "fused_chunked", 128),
)


def shapes() -> tuple[ModelShape, ModelShape]:
    """(student, teacher)"""
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


def settings_of(run: PublishedRun, recompute: str) -> RunSettings:
    return RunSettings(
        sequence_length=run.sequence_length,
        micro_batch=1,
        global_batch=32,
        recompute=Recompute(mode=recompute),
        mode="online" if run.impl == "online_dense" else "offline",
        loss=LossConfig(impl=run.impl.removeprefix("online_")),
    )


def planned_gib(run: PublishedRun, student: ModelShape, teacher: ModelShape, recompute: str):
    return (
        peak_bytes(
            student,
            settings_of(run, recompute),
            impl=run.impl,
            gpu_bytes=SOURCE_GPU.memory_bytes,
            teacher=teacher,
        )
        / GIB
    )


def planned_step(run: PublishedRun, student: ModelShape, teacher: ModelShape) -> StepTime:
    settings = settings_of(run, "full")
    return step_time(
        student,
        settings,
        impl=run.impl,
        gpu=SOURCE_GPU,
        trained_parameters=sum(rank_parameters(student, settings, 0)),
        teacher=teacher if run.impl == "online_dense" else None,
    )

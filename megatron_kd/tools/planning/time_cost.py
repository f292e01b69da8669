"""Time of a step, of capturing the teacher once, and the size of the cache.

A matrix product of m × k × n counts 2mkn; causal attention half of the full square. The time is

    (products / EFFICIENCY of the peak + bytes of logits moved + optimizer's bytes + tensor-parallel
    messages) / share of time that the pipeline is full

Data- and context-parallel messages are taken as hidden behind the products.
"""

from dataclasses import dataclass

from megatron_kd.tools.planning.gpus import GPU
from megatron_kd.tools.planning.loss_memory import LOSSES, rank_vocab
from megatron_kd.tools.planning.model_shape import ModelShape
from megatron_kd.tools.planning.run_settings import RunSettings

# Share of the peak that products, attention and the elementwise work between them reach together.
EFFICIENCY = 0.45


@dataclass(frozen=True)
class StepTime:
    products_s: float
    logits_s: float
    optimizer_s: float
    messages_s: float
    pipeline_share: float
    model_flops: float
    """Floating point operations of the student's forward and backward pass, nothing recomputed."""

    @property
    def total_s(self) -> float:
        busy = self.products_s + self.logits_s + self.messages_s
        return busy / self.pipeline_share + self.optimizer_s


def forward_flops(shape: ModelShape, sequence_length: int) -> float:
    """Floating point operations of one token's forward pass through the layers, without the output
    matrix.
    """
    attention = 2 * sequence_length * shape.heads * shape.head_dim
    return sum(2 * shape.active_parameters(layer) + attention for layer in shape.layers)


def step_time(
    student: ModelShape,
    settings: RunSettings,
    *,
    impl: str,
    gpu: GPU,
    trained_parameters: float,
    teacher: ModelShape | None = None,
    efficiency: float = EFFICIENCY,
) -> StepTime:
    """Time of one training step of all micro-batches.

    Args:
        impl: A name in `LOSSES`.
        trained_parameters: Parameters with gradients on the rank that has most of them.
        teacher: The teacher's shape where its forward pass is part of the step.
        efficiency: Share of the GPU's peak that products and attention reach.

    Raises:
        KeyError: There is no such implementation.
    """
    tokens = settings.sequence_length * settings.global_batch
    body = forward_flops(student, settings.sequence_length)
    head = 2 * student.vocab_size * student.hidden_size
    loss = LOSSES[impl]
    student_products, teacher_products = loss.products, loss.teacher_products
    if loss.heeds_gradient and settings.loss_recomputes:
        student_products += 1
        teacher_products += loss.online
    passes = 3
    if settings.lora is not None:  # frozen matrices have no weight gradients
        passes, student_products = passes - 1, student_products - 1
    flops = body * (passes + _recomputed_share(student, settings)) + head * student_products
    if teacher is not None and teacher_products:
        flops += forward_flops(teacher, settings.sequence_length)
        flops += 2 * teacher.vocab_size * teacher.hidden_size * teacher_products
    peak = gpu.bf16_tflops * 1e12 * efficiency * (1 if settings.sixteen_bit else 0.5)
    bandwidth = gpu.bandwidth_gb_s * 1e9
    rank_positions = settings.positions * settings.micro_batches
    logits = loss.logit_traffic * rank_positions * rank_vocab(student, settings)
    optimizer = trained_parameters * (2 * settings.state_bytes + settings.gradient_bytes + 2)
    full = settings.micro_batches * settings.virtual_pipeline
    return StepTime(
        products_s=tokens * flops / (settings.ranks * peak),
        logits_s=logits / bandwidth,
        optimizer_s=optimizer / bandwidth,
        messages_s=_tensor_messages(student, settings, rank_positions) / (gpu.link_gb_s * 1e9),
        pipeline_share=full / (full + settings.pipeline_parallel - 1),
        model_flops=tokens * passes * (body + head),
    )


def capture_seconds(
    teacher: ModelShape, tokens: int, sequence_length: int, gpu: GPU, efficiency: float = EFFICIENCY
) -> float:
    """One GPU's time for one forward pass of the teacher over the data, in bf16."""
    flops = forward_flops(teacher, sequence_length) + 2 * teacher.vocab_size * teacher.hidden_size
    return tokens * flops / (gpu.bf16_tflops * 1e12 * efficiency)


def _recomputed_share(student: ModelShape, settings: RunSettings) -> float:
    """Share of the layers' forward pass that the backward pass repeats."""
    recompute = settings.recompute
    if recompute.mode == "full":
        if recompute.method == "uniform":
            return 1.0
        each = len(student.layers) / settings.pipeline_parallel
        return min(1.0, recompute.layers / each)
    if recompute.mode == "selective":
        attention = (
            2 * settings.sequence_length * student.heads * student.head_dim * len(student.layers)
        )
        whole = forward_flops(student, settings.sequence_length)
        share = attention / whole if "core_attn" in recompute.modules else 0.0
        if {"mlp", "moe"} & set(recompute.modules):
            up = 3 if student.gated else 2
            wide = student.expert_ffn_size * student.experts_per_token + student.shared_ffn_size
            ffn = wide if student.experts else student.ffn_size
            share += 2 * up * ffn * student.hidden_size * len(student.layers) / whole
        return share
    return 0.0


def _tensor_messages(student: ModelShape, settings: RunSettings, rank_positions: int) -> float:
    """Bytes that a ring all-reduce of the layers' outputs sends over one link in a step."""
    tensor = settings.tensor_parallel
    if tensor == 1:
        return 0.0
    per_layer = 4 + (2 if settings.recompute.mode == "full" else 0)
    layers = len(student.layers) / settings.pipeline_parallel
    size = settings.value_bytes * rank_positions * student.hidden_size
    return per_layer * layers * size * 2 * (tensor - 1) / tensor

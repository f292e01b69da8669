"""What logits and loss take on the last stage at their peak, by implementation.

Counted from `megatron_kd.losses` as it runs on CUDA, where the fused kernels need no temporaries of
a chunk's size and gradients are summed into the host's buffers::

    dense            the host's logits and their fp32 copy, which becomes the gradient
    sparse_chunked   the host's logits, into which the gradient is written, and a copy of one chunk
    fused_chunked    dH beside one chunk of logits. in_forward also holds the gradient of the output
                     matrix, dW, in fp32; recompute adds it to the host's buffer
    online dense     as dense, and the teacher's logits
    fused_online     as fused_chunked, with a chunk of both models, and the teacher's hidden states

Both fused losses end with a tensor like the output matrix, which autograd gets in place of the
gradient that went to the host's buffer.

Shapes: n = s * b positions of a micro-batch, v vocabulary, vp = v / tp, h hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_kd.losses.chunking import (
    BYTES_PER_LOGIT,
    DEFAULT_BUDGET_BYTES,
    DEVICE_SHARE,
    SPARSE_CHUNK,
    pick_rows,
)
from megatron_kd.tools.planning.model_shape import ModelShape
from megatron_kd.tools.planning.run_settings import RunSettings


@dataclass(frozen=True)
class LossMemory:
    logits_bytes: float
    """Whole logits of the student in the model's dtype, and hidden states at the output layer."""

    loss_bytes: float
    """The loss's own copies, chunks and gradients."""

    teacher_bytes: float = 0.0
    """The teacher's logits or hidden states."""

    @property
    def total(self) -> float:
        return self.logits_bytes + self.loss_bytes + self.teacher_bytes


def loss_memory(
    impl: str,
    student: ModelShape,
    settings: RunSettings,
    gpu_bytes: int,
    teacher: ModelShape | None = None,
) -> LossMemory:
    """Bytes that logits and loss take on each rank of the last stage.

    Args:
        impl: A name in `LOSSES`.
        gpu_bytes: The GPU's memory, of which an automatic chunk takes a share.
        teacher: The teacher's shape; the two online losses need it.

    Raises:
        KeyError: There is no such implementation.
    """
    return LOSSES[impl].memory(student, settings, gpu_bytes, teacher)


def _dense(student, settings, gpu_bytes, teacher) -> LossMemory:
    logits = _logits_bytes(student, settings)
    fp32 = 4 * settings.positions * rank_vocab(student, settings)
    return LossMemory(_hidden_bytes(student, settings) + logits, fp32)


def _online_dense(student, settings, gpu_bytes, teacher) -> LossMemory:
    offline = _dense(student, settings, gpu_bytes, None)
    return replace(offline, teacher_bytes=_logits_bytes(student, settings))


def _sparse_chunked(student, settings, gpu_bytes, teacher) -> LossMemory:
    chunk = SPARSE_CHUNK if settings.loss.chunk_size == "auto" else settings.loss.chunk_size
    rows = min(settings.positions, chunk * settings.micro_batch)
    whole = _hidden_bytes(student, settings) + _logits_bytes(student, settings)
    return LossMemory(whole, settings.value_bytes * rows * rank_vocab(student, settings))


def _fused_chunked(student, settings, gpu_bytes, teacher) -> LossMemory:
    width, vocab = student.hidden_size, rank_vocab(student, settings)
    loss = _fused_bytes(settings, width, vocab, 0, gpu_bytes)
    return LossMemory(_hidden_bytes(student, settings), loss)


def _fused_online(student, settings, gpu_bytes, teacher) -> LossMemory:
    vocab, teacher_vocab = rank_vocab(student, settings), rank_vocab(teacher, settings)
    loss = _fused_bytes(settings, student.hidden_size, vocab, teacher_vocab, gpu_bytes)
    teacher_hidden = _hidden_bytes(teacher, settings) / 2  # what its output layer reads alone
    return LossMemory(_hidden_bytes(student, settings), loss, teacher_hidden)


@dataclass(frozen=True, kw_only=True)
class PlannedLoss:
    """What the plan knows of one implementation of the loss."""

    memory: Callable[[ModelShape, RunSettings, int, ModelShape | None], LossMemory]
    """(student, settings, the GPU's bytes, teacher) -> what it takes on each rank of the last
    stage."""

    online: bool = False
    """The teacher is in memory too."""

    products: int = 3
    """Matrix products with the student's output matrix per micro-batch."""

    teacher_products: int = 0
    """Those with the teacher's."""

    heeds_gradient: bool = False
    """`loss.gradient` is its option: recompute costs one product more, online one of each model."""

    logit_traffic: int
    """Bytes per logit that its elementwise passes read and write, in 16 bits."""


LOSSES = {
    "dense": PlannedLoss(memory=_dense, logit_traffic=24),
    "sparse_chunked": PlannedLoss(memory=_sparse_chunked, logit_traffic=30),
    "fused_chunked": PlannedLoss(memory=_fused_chunked, heeds_gradient=True, logit_traffic=10),
    "online_dense": PlannedLoss(
        memory=_online_dense, online=True, teacher_products=1, logit_traffic=32
    ),
    "fused_online": PlannedLoss(
        memory=_fused_online,
        online=True,
        teacher_products=1,
        heeds_gradient=True,
        logit_traffic=24,
    ),
}
"""Name → what is planned for it, in the order of the plan's columns. `online_dense` is `dense` in
mode online."""


def _hidden_bytes(shape: ModelShape, settings: RunSettings) -> float:
    """Of the last norm's input and output."""
    split = settings.tensor_parallel if settings.sequence_parallel else 1
    return 2 * settings.value_bytes * settings.positions * shape.hidden_size / split


def _logits_bytes(student: ModelShape, settings: RunSettings) -> int:
    return settings.value_bytes * settings.positions * rank_vocab(student, settings)


def _fused_bytes(
    settings: RunSettings, width: int, vocab: int, teacher_vocab: int, gpu_bytes: int
) -> int:
    """Peak of a fused loss: in its forward pass, in its backward pass, or as it hands dW over.

    Args:
        width: h of the student.
        vocab: vp of the student.
        teacher_vocab: vp of the teacher; 0 offline.
    """
    value_bytes = settings.value_bytes
    rows = _chunk_rows(settings, vocab + teacher_vocab, gpu_bytes)
    chunk, teacher_chunk = (value_bytes * rows * size for size in (vocab, teacher_vocab))
    # With sequence_parallel dH lies where the gathered hidden states lay.
    d_hidden = value_bytes * settings.positions * width
    scattered = d_hidden / settings.tensor_parallel if settings.sequence_parallel else 0
    at_once = chunk + teacher_chunk
    trained = settings.lora is None  # adapters leave the output matrix as it is
    handed_over = value_bytes * vocab * width * trained
    if settings.loss_recomputes:
        return d_hidden + max(at_once, scattered + handed_over)
    d_weight = 4 * vocab * width * trained
    return d_weight + max(d_hidden + max(at_once, scattered), (scattered or d_hidden) + handed_over)


def rank_vocab(student: ModelShape, settings: RunSettings) -> int:
    padded = student.padded_vocab(settings.vocab_divisor, settings.tensor_parallel)
    return padded // settings.tensor_parallel


def _chunk_rows(settings: RunSettings, width: int, gpu_bytes: int) -> int:
    """Positions per chunk. width: logits per position, of all models."""
    size, positions = settings.value_bytes, settings.positions
    if settings.loss.chunk_size == "auto":
        budget = min(DEFAULT_BUDGET_BYTES["cuda"], int(gpu_bytes * DEVICE_SHARE))
        return pick_rows(positions, width * size, budget, strict=False)
    return min(positions, settings.loss.chunk_size * settings.micro_batch * BYTES_PER_LOGIT // size)

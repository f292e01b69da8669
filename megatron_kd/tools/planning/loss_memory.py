"""What logits and loss take on the last stage at their peak, by implementation.

Counted from `megatron_kd.losses` as it runs on CUDA, where the fused kernels need no temporaries of
a chunk's size and gradients are summed into the host's buffers::

    dense            the host's logits and their fp32 copy, which becomes the gradient
    sparse_chunked   the host's logits, into which the gradient is written, and a copy of one chunk
    fused_chunked    dH beside one chunk of logits. in_forward also holds the gradient of the output
                     matrix, dW, in fp32; recompute adds it to the host's buffer
    online dense     as dense, and the teacher's logits
    fused_online     as fused_chunked with recompute, a chunk of both models, and the teacher's
                     hidden states

Both fused losses end with a tensor like the output matrix, which autograd gets in place of the
gradient that went to the host's buffer.

Shapes: n = s * b positions of a micro-batch, v vocabulary, vp = v / tp, h hidden.
"""

from dataclasses import dataclass

from megatron_kd.losses.chunking import (
    BYTES_PER_LOGIT,
    DEFAULT_BUDGET_BYTES,
    DEVICE_SHARE,
    pick_rows,
)
from megatron_kd.tools.planning.model_shape import ModelShape
from megatron_kd.tools.planning.run_settings import RunSettings

SPARSE_CHUNK = 1024  # sequence positions: the default of `sparse_chunked_kd_loss`


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
    impl: str, student: ModelShape, settings: RunSettings, gpu_bytes: int, teacher=None
) -> LossMemory:
    """Bytes that logits and loss take on each rank of the last stage.

    Args:
        impl: `dense`, `sparse_chunked`, `fused_chunked`, `online_dense` or `fused_online`.
        gpu_bytes: The GPU's memory, of which an automatic chunk takes a share.
        teacher: The teacher's shape; the two online losses need it.
    """
    value_bytes, positions = settings.value_bytes, settings.positions
    vocab, width = rank_vocab(student, settings), student.hidden_size
    split = settings.tensor_parallel if settings.sequence_parallel else 1
    hidden = 2 * value_bytes * positions * width / split  # the last norm's input and output
    logits = value_bytes * positions * vocab
    if impl == "dense":
        return LossMemory(hidden + logits, 4 * positions * vocab)
    if impl == "online_dense":
        return LossMemory(hidden + logits, 4 * positions * vocab, logits)
    if impl == "sparse_chunked":
        chunk = SPARSE_CHUNK if settings.loss.chunk_size == "auto" else settings.loss.chunk_size
        rows = min(positions, chunk * settings.micro_batch)
        return LossMemory(hidden + logits, value_bytes * rows * vocab)
    if impl == "fused_chunked":
        return LossMemory(hidden, _fused_bytes(settings, width, vocab, 0, gpu_bytes))
    teacher_hidden = value_bytes * positions * teacher.hidden_size / split
    teacher_vocab = rank_vocab(teacher, settings)
    loss = _fused_bytes(settings, width, vocab, teacher_vocab, gpu_bytes)
    return LossMemory(hidden, loss, teacher_hidden)


def _fused_bytes(
    settings: RunSettings, width: int, vocab: int, teacher_vocab: int, gpu_bytes: int
) -> int:
    """Peak of a fused loss: in its forward pass, in its backward pass, or as it hands dW over.

    Args:
        width: h of the student.
        vocab: vp of the student.
        teacher_vocab: vp of the teacher; 0 offline. The online loss always recomputes.
    """
    value_bytes = settings.value_bytes
    rows = _chunk_rows(settings, vocab + teacher_vocab, gpu_bytes)
    chunk, teacher_chunk = (value_bytes * rows * size for size in (vocab, teacher_vocab))
    d_hidden = gathered = value_bytes * settings.positions * width
    if not settings.sequence_parallel:
        gathered = 0
    trained = settings.lora is None  # adapters leave the output matrix as it is
    handed_over = value_bytes * vocab * width * trained
    if teacher_vocab or settings.loss.gradient == "recompute":
        return chunk + teacher_chunk + d_hidden + gathered + handed_over
    d_weight = 4 * vocab * width * trained
    return d_hidden + d_weight + max(chunk + gathered, handed_over)


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

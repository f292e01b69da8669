"""What logits and loss take on the last stage at their peak, by implementation.

Counted from `megatron_kd.losses` as it runs on CUDA, where the fused kernels need no temporaries of
a chunk's size:

    dense            the host's logits and their fp32 copy, which becomes the gradient
    sparse_chunked   the host's logits, into which the gradient is written, and a copy of one chunk
    fused_chunked    one chunk; dH; the output matrix's gradient dW in fp32, unless recompute adds
                     it to the host's buffer
    online dense     as dense, and the teacher's logits
    fused_online     a chunk of both models; dH; the teacher's hidden states; dW as above

Letters: N positions of a micro-batch, V vocabulary rows of this rank, D hidden size.
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
    """impl: `dense`, `sparse_chunked`, `fused_chunked`, `online_dense` or `fused_online`."""
    e, n = settings.value_bytes, settings.positions
    vocab = rank_vocab(student, settings)
    width = student.hidden_size
    split = settings.tensor_parallel if settings.sequence_parallel else 1
    hidden = 2 * e * n * width / split  # the last norm's input and output
    logits = e * n * vocab
    if impl == "dense":
        return LossMemory(hidden + logits, 4 * n * vocab)
    if impl == "online_dense":
        return LossMemory(hidden + logits, 4 * n * vocab, logits)
    if impl == "sparse_chunked":
        chunk = SPARSE_CHUNK if settings.loss.chunk_size == "auto" else settings.loss.chunk_size
        rows = min(n, chunk * settings.micro_batch)
        return LossMemory(hidden + logits, e * rows * vocab)
    models = 2 if impl == "fused_online" else 1
    in_forward = impl == "fused_online" or settings.loss.gradient != "recompute"
    own_gradient = in_forward and settings.lora is None
    loss = _chunk_bytes(settings, vocab * models, n, gpu_bytes) + e * n * width
    loss += 4 * vocab * width * own_gradient
    if settings.sequence_parallel:
        loss += e * n * width  # the gathered sequence
    teacher_hidden = e * n * teacher.hidden_size / split if impl == "fused_online" else 0
    return LossMemory(hidden, loss, teacher_hidden)


def rank_vocab(student: ModelShape, settings: RunSettings) -> int:
    padded = student.padded_vocab(settings.vocab_divisor, settings.tensor_parallel)
    return padded // settings.tensor_parallel


def _chunk_bytes(settings: RunSettings, width: int, rows: int, gpu_bytes: int) -> int:
    """width: logits per position, of all models; rows: positions."""
    size = settings.value_bytes
    if settings.loss.chunk_size == "auto":
        budget = min(DEFAULT_BUDGET_BYTES["cuda"], int(gpu_bytes * DEVICE_SHARE))
        rows = pick_rows(rows, width * size, budget, strict=False)
    else:
        wanted = settings.loss.chunk_size * settings.micro_batch * (BYTES_PER_LOGIT // size)
        rows = min(rows, wanted)
    return rows * width * size

"""Inputs that every implementation shares: seeded, and under TP shards of one weight.

Shapes: s sequence, h hidden, v vocabulary, vp = v / tp, k support. The micro-batch is 1.
"""

from functools import cached_property

import torch
import torch.distributed as dist

from megatron_kd.losses import TopKTarget

# Rows are drawn in blocks with a seed each, so that a rank draws its own alone.
BLOCK_ROWS = 1024
# Seeds stay below 2**32: the CPU's generator drops higher bits.
MOST_BLOCKS = 1 << 24
HIDDEN, WEIGHT, TEACHER_HIDDEN, TEACHER_WEIGHT, IDS, LOGPROBS, LABELS = range(7)
# Mass the teacher keeps: exp(-0.1), about 90 %.
LOST_NATS = 0.1


class Inputs:
    """Tensors made on first use, so that a case holds only what its implementation reads."""

    def __init__(
        self,
        *,
        seq_tokens: int,
        hidden: int,
        vocab: int,
        topk: int,
        dtype: torch.dtype,
        device: torch.device,
        chunk_tokens: int | None,
        group=None,
    ):
        self.seq_tokens, self.hidden_size, self.vocab, self.topk = seq_tokens, hidden, vocab, topk
        self.dtype, self.device, self.chunk_tokens, self.group = dtype, device, chunk_tokens, group
        rank = 0 if group is None else dist.get_rank(group)
        rows = vocab if group is None else vocab // dist.get_world_size(group)
        self.start, self.stop = rank * rows, (rank + 1) * rows

    @cached_property
    def hidden(self):  # [s, 1, h]
        return self._normal(HIDDEN, 0, self.seq_tokens).unsqueeze(1).requires_grad_()

    @cached_property
    def weight(self):  # [vp, h]; logits of variance one
        return self._scaled_weight(WEIGHT).requires_grad_()

    @cached_property
    def teacher_hidden(self):  # [s, 1, h]
        return self._normal(TEACHER_HIDDEN, 0, self.seq_tokens).unsqueeze(1)

    @cached_property
    def teacher_weight(self):  # [vp, h]
        return self._scaled_weight(TEACHER_WEIGHT)

    @cached_property
    def target(self) -> TopKTarget:
        """One id from each of k equal parts of the vocabulary, so they are distinct."""
        part = self.vocab // self.topk
        shape = (self.seq_tokens, self.topk)
        ids = torch.randint(part, shape, generator=self._generator(IDS, 0), device=self.device)
        ids += torch.arange(self.topk, device=self.device) * part
        scores = torch.randn(shape, generator=self._generator(LOGPROBS, 0), device=self.device)
        logprobs = torch.log_softmax(2 * scores, -1) - LOST_NATS
        return TopKTarget(ids.unsqueeze(1), logprobs.unsqueeze(1))  # [s, 1, k] twice

    @cached_property
    def labels(self):  # [s, 1]
        shape = (self.seq_tokens, 1)
        generator = self._generator(LABELS, 0)
        return torch.randint(self.vocab, shape, generator=generator, device=self.device)

    @cached_property
    def token_weights(self):  # [s, 1]
        return torch.ones(self.seq_tokens, 1, device=self.device)

    def clear_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def _generator(self, name: int, block: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(name * MOST_BLOCKS + block)

    def _normal(self, name: int, start: int, stop: int):
        """Rows start to stop of an endless matrix [., h] of standard normal numbers."""
        out = torch.empty(stop - start, self.hidden_size, dtype=self.dtype, device=self.device)
        for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
            first = block * BLOCK_ROWS
            rows = torch.randn(
                BLOCK_ROWS,
                self.hidden_size,
                generator=self._generator(name, block),
                device=self.device,
            )
            low, high = max(start, first), min(stop, first + BLOCK_ROWS)
            out[low - start : high - start] = rows[low - first : high - first]
        return out

    def _scaled_weight(self, name: int):
        return self._normal(name, self.start, self.stop).mul_(self.hidden_size**-0.5)

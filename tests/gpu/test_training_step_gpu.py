"""A few bf16 training steps of a small student under every head: the same course, time and memory.

Run with `pytest tests/gpu/test_training_step_gpu.py -s`; milliseconds and GiB are printed.
`MEGATRON_KD_GPU_TESTS_ON=cpu` rehearses it on a CPU, with a smaller student.

Letters: S sequence, B micro-batch, D hidden, V vocabulary, K support.
"""

import os
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megatron_kd.losses import (
    TopKTarget,
    dense_kd_loss,
    fused_chunked_kd_loss,
    sparse_chunked_kd_loss,
)

DEVICE = torch.device(os.environ.get("MEGATRON_KD_GPU_TESTS_ON", "cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]


@dataclass(frozen=True)
class Shape:
    seq_tokens: int = 8192
    hidden: int = 2048
    vocab: int = 131072
    topk: int = 100
    layers: int = 2
    steps: int = 6


class Student(nn.Module):
    """Embedding, causal layers, norm; the output layer's weight belongs to the loss."""

    def __init__(self, shape: Shape):
        super().__init__()
        d = shape.hidden
        self.embedding = nn.Embedding(shape.vocab, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d, d // 64, 4 * d, dropout=0.0, norm_first=True, batch_first=False
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(d)
        self.output_weight = nn.Parameter(torch.randn(shape.vocab, d) * d**-0.5)

    def forward(self, tokens):  # [S, B] -> [S, B, D]
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens), device=tokens.device)
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.norm(hidden)


def kd_loss(head, hidden, weight, target, weights):
    if head in ("recompute", "in_forward"):
        return fused_chunked_kd_loss(hidden, weight, target, gradient=head, token_weights=weights)
    logits = nn.functional.linear(hidden, weight)
    if head == "dense":
        return dense_kd_loss(logits, target)
    return sparse_chunked_kd_loss(logits, target, reuse_logits=True)


def train(head, shape: Shape, device):
    """Losses in nats per supervised token, ms per step (the first left out), peak bytes."""
    torch.manual_seed(0)
    student = Student(shape).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (shape.seq_tokens, 1), generator=make).to(device)
    part = shape.vocab // shape.topk
    ids = torch.randint(part, (shape.seq_tokens, 1, shape.topk), generator=make)
    ids = (ids + torch.arange(shape.topk) * part).to(device)
    scores = 2 * torch.randn(shape.seq_tokens, 1, shape.topk, generator=make)
    target = TopKTarget(ids, torch.log_softmax(scores, -1).to(device) - 0.1)
    weights = (torch.rand(shape.seq_tokens, 1, generator=make) < 0.7).float().to(device)
    losses, times_ms = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(shape.steps):
        _wait(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            hidden = student(tokens)
            per_token = kd_loss(head, hidden, student.output_weight, target, weights)
        loss = (per_token * weights).sum() / weights.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        _wait(device)
        times_ms.append((time.perf_counter() - start) * 1e3)
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return torch.stack(losses).tolist(), sorted(times_ms[1:])[len(times_ms) // 2 - 1], peak_bytes


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_courses(shape: Shape, device):
    courses = {}
    for head in ("dense", "sparse_chunked", "recompute", "in_forward"):
        courses[head], step_ms, peak_bytes = train(head, shape, device)
        print(f"\n{head}: {step_ms:.1f} ms per step, peak {peak_bytes / 2**30:.2f} GiB")
    dense = courses.pop("dense")
    assert dense[-1] < dense[0]  # it learns
    for head, losses in courses.items():
        assert losses == pytest.approx(dense, rel=5e-3), head


def test_heads_train_alike():
    small = Shape(seq_tokens=64, hidden=64, vocab=512, topk=16)
    check_courses(Shape() if DEVICE.type == "cuda" else small, DEVICE)

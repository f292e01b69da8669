"""Chunk sizes, and what a fused loss allocates above its inputs, gradients and one fp32 dW."""

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_kd.losses import (
    TopKTarget,
    fused_chunked_kd_loss,
    kernels,
    sparse_chunked_kd_loss,
)
from megatron_kd.losses.chunking import LEAST_ROWS, chunk_rows, pick_rows

D, V, K = 8, 32768, 20


def peak_bytes(run):
    """Largest sum of what the allocator gave out and did not get back, from the start of run()."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        keep = run()
    live = peak = 0
    for event in recording.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del keep
    return peak


def make_inputs(positions, dtype):
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, 1, D, generator=make).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=make).to(dtype).requires_grad_()
    ids = torch.randint(0, V // K, (positions, 1, K), generator=make) + torch.arange(K) * (V // K)
    return hidden, weight, TopKTarget(ids, torch.full((positions, 1, K), -4.0))


def fused_peak(positions, chunk_size, dtype, gradient):
    hidden, weight, target = make_inputs(positions, dtype)
    weights = torch.ones(positions, 1)

    def run():
        loss = fused_chunked_kd_loss(
            hidden,
            weight,
            target,
            chunk_size=chunk_size,
            gradient=gradient,
            token_weights=weights,
        )
        loss.sum().backward()
        return loss

    with kernels.use_backend("eager"):
        peak = peak_bytes(run)
    size = hidden.element_size()
    gradients = (positions + V) * D * size
    return peak - gradients - 4 * V * D


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
@pytest.mark.parametrize("dtype, factor", [(torch.float32, 1.3), (torch.bfloat16, 2.0)], ids=str)
def test_transient_memory_is_one_chunk(dtype, factor, gradient):
    chunk = 4 * 256 * V
    peak = fused_peak(1024, 256, dtype, gradient)
    assert 0.5 * chunk < peak <= factor * chunk


def test_memory_does_not_grow_with_the_sequence():
    """Four times the positions: only per-position tensors grow, and they are small."""
    short, long = (fused_peak(n, 64, torch.float32, "in_forward") for n in (256, 1024))
    assert long - short <= 0.15 * 4 * 64 * V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lent_logits_are_the_only_tensor_of_their_size(dtype):
    """Above the logits: one chunk, and a gradient of their size only where none may be lent."""
    positions, chunk_size = 512, 32
    _, _, target = make_inputs(positions, torch.float32)
    leaf = torch.randn(positions, 1, V).to(dtype).requires_grad_()
    whole = leaf.numel() * leaf.element_size()

    def peak(reuse):
        logits = leaf * 1

        def run():
            loss = sparse_chunked_kd_loss(logits, target, chunk_size=chunk_size, reuse_logits=reuse)
            return torch.autograd.grad(loss.sum(), logits)

        with kernels.use_backend("eager"):
            return peak_bytes(run)

    chunk = 4 * chunk_size * V
    # the eager passes take scratch of half a chunk, and a 16-bit block is widened
    assert peak(True) <= 1.8 * chunk
    assert whole <= peak(False) <= whole + 1.1 * chunk


def options(**more):
    device = torch.device("cpu")
    base = dict(rows=4096, batch=2, width=32768, dtype=torch.float32, device=device)
    return dict(base, **more)


def test_chunk_size_in_positions():
    assert chunk_rows(256, **options()) == 512
    # narrower logits: twice the rows in the same bytes
    assert chunk_rows(256, **options(dtype=torch.bfloat16)) == 1024
    assert chunk_rows(256, **options(dtype=torch.float64)) == 512
    for wrong in (0, -1, 1.5, "big", None):
        with pytest.raises(ValueError, match='"auto"'):
            chunk_rows(wrong, **options())


def test_auto_keeps_the_budget_and_says_what_it_picked(caplog, monkeypatch):
    monkeypatch.setattr("megatron_kd.losses.chunking._logged", set())
    with caplog.at_level(logging.INFO, logger="megatron_kd.losses.chunking"):
        for _ in range(2):
            picked = chunk_rows("auto", **options(budget_bytes=64 << 20))
    assert picked * 32768 * 4 <= 64 << 20 and picked >= 256
    assert len(caplog.records) == 1
    assert "512 of 4096 rows" in caplog.text
    with pytest.raises(ValueError, match="memory_budget_bytes"):
        chunk_rows("auto", **options(budget_bytes=-1))


@pytest.mark.parametrize("rows", [1, 5, 128, 1000, 4097, 262144])
@pytest.mark.parametrize("budget_rows", [1, 3, 130, 4096])
def test_picked_rows(rows, budget_rows):
    strict = pick_rows(rows, 1000, budget_rows * 1000 + 999, strict=True)
    assert 1 <= strict <= min(rows, budget_rows)
    # no more chunks than the budget makes necessary, but for rounding to whole blocks
    assert -(-rows // strict) <= -(-rows // min(rows, budget_rows)) * 1.05 + 1
    lenient = pick_rows(rows, 1000, budget_rows * 1000, strict=False)
    assert min(rows, LEAST_ROWS) <= lenient <= max(budget_rows, LEAST_ROWS)


def test_auto_gives_the_same_result():
    hidden, weight, target = make_inputs(37, torch.float32)
    small = fused_chunked_kd_loss(
        hidden, weight, target, chunk_size="auto", memory_budget_bytes=4 * 5 * V
    )
    torch.testing.assert_close(small, fused_chunked_kd_loss(hidden, weight, target))

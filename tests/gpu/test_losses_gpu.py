"""The losses on a CUDA device: right against fp64, no synchronisation, and within memory.

Run with `pytest tests/gpu/test_losses_gpu.py -s`; speed and memory at full size are printed.
`MEGATRON_KD_GPU_TESTS_ON=cpu` rehearses what can be on a CPU.
"""

import os

import pytest
import torch

from megatron_kd.losses import (
    Divergence,
    TopKTarget,
    fused_chunked_kd_loss,
    fused_online_kd_loss,
    kernels,
    reference,
    sparse_chunked_kd_loss,
)

DEVICE = torch.device(os.environ.get("MEGATRON_KD_GPU_TESTS_ON", "cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
on_cuda_alone = pytest.mark.skipif(DEVICE.type != "cuda", reason="of a CUDA device")

S, B, D, V, K = 67, 2, 96, 5003, 20  # an odd vocabulary: no row but the first is aligned


def skip_without(backend: str) -> None:
    if backend == "triton" and not (DEVICE.type == "cuda" and kernels.triton.available()):
        pytest.skip("Triton's kernels are for CUDA")


def make_inputs(dtype, device=DEVICE):
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, D, generator=make).bfloat16().to(device, dtype)
    weight = (torch.randn(V, D, generator=make) / 4).bfloat16().to(device, dtype)
    teacher = torch.log_softmax(torch.randn(S, B, V - 3, generator=make) * 3, -1)
    logprobs, ids = teacher.topk(K)
    labels = torch.randint(0, V - 3, (S, B), generator=make)
    tempered = torch.logsumexp(teacher / 2, -1)
    target = TopKTarget(ids.to(device), logprobs.to(device), tempered.to(device))
    return hidden, weight, target, labels.to(device)


def gradients(loss_of, hidden, weight, upstream):
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    loss = loss_of(hidden, weight)
    (loss * upstream.to(loss.dtype)).sum().backward()
    return [x.double() for x in (loss.detach(), hidden.grad, weight.grad)]


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("head", ["sparse", "recompute", "in_forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_against_fp64(temperature, dtype, head, backend):
    skip_without(backend)
    if head == "in_forward" and dtype == torch.float16:
        pytest.skip("refused: loss scaling would overflow what is stored unscaled")
    divergence = Divergence(tail="bucket", temperature=temperature, ce_weight=0.2)
    upstream = torch.rand(S, B, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    upstream[3] = 0
    hidden, weight, target, labels = make_inputs(torch.float64)

    def plain(h, w):
        logits = h @ w.T if h.dtype == torch.float64 else (h @ w.T).float()
        return reference.topk_loss(logits, target, divergence, labels, V - 3)

    def ours(h, w):
        more = dict(divergence=divergence, labels=labels, vocab_size=V - 3, chunk_size=16)
        if head == "sparse":
            return sparse_chunked_kd_loss(h @ w.T, target, reuse_logits=True, **more)
        weights = upstream if head == "in_forward" else None
        return fused_chunked_kd_loss(h, w, target, gradient=head, token_weights=weights, **more)

    truth = gradients(plain, hidden, weight, upstream)
    yardstick = gradients(plain, hidden.to(dtype), weight.to(dtype), upstream)
    with kernels.use_backend(backend):
        got = gradients(ours, hidden.to(dtype), weight.to(dtype), upstream)
    for mine, plainly, want in zip(got, yardstick, truth, strict=True):
        bound = 4 * (plainly - want).abs().max() + 8 * torch.finfo(dtype).eps * want.abs().max()
        assert (mine - want).abs().max() <= bound


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_online_against_fp64(objective, backend):
    if backend == "compiled" and not kernels.compiled.available(DEVICE.type):
        pytest.skip("nothing compiles here")
    hidden, weight, _, labels = make_inputs(torch.float64)
    teacher, teacher_weight = hidden * 0.7, weight.roll(1, 0)
    divergence = Divergence(objective=objective, temperature=2.0, ce_weight=0.2)
    upstream = torch.rand(S, B, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def plain(h, w):
        y = teacher @ teacher_weight.T
        logits = h @ w.T if h.dtype == torch.float64 else (h @ w.T).float()
        return reference.full_loss(logits, y.to(logits.dtype), divergence, labels)

    def ours(h, w):
        teacher_inputs = teacher.to(h.dtype), teacher_weight.to(h.dtype)
        return fused_online_kd_loss(
            h, w, *teacher_inputs, labels=labels, chunk_size=16, divergence=divergence
        )

    truth = gradients(plain, hidden, weight, upstream)
    yardstick = gradients(plain, hidden.bfloat16(), weight.bfloat16(), upstream)
    with kernels.use_backend(backend):
        got = gradients(ours, hidden.bfloat16(), weight.bfloat16(), upstream)
    for mine, plainly, want in zip(got, yardstick, truth, strict=True):
        bound = 4 * (plainly - want).abs().max() + 8 * 2**-8 * want.abs().max()
        assert (mine - want).abs().max() <= bound


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_no_supervised_row_gives_nothing(gradient):
    hidden, weight, target, _ = make_inputs(torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = fused_chunked_kd_loss(
        hidden,
        weight,
        target,
        gradient=gradient,
        token_weights=torch.zeros(S, B, device=DEVICE),
        supervised_index=torch.empty(0, dtype=torch.int64, device=DEVICE),
    )
    (loss * 0.0).sum().backward()
    assert not loss.any() and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_the_fused_weight_gradient_is_added_to_what_is_there(gradient):
    """As a host's optimizer keeps it, in fp32."""
    hidden, weight, target, _ = make_inputs(torch.bfloat16)
    weights = torch.ones(S, B, device=DEVICE)
    found = {}
    for fusion in (False, True):
        leaf = weight.clone().requires_grad_()
        leaf.main_grad, leaf.grad_added_to_main_grad = torch.ones_like(leaf).float(), False
        loss = fused_chunked_kd_loss(
            hidden,
            leaf,
            target,
            gradient=gradient,
            token_weights=weights,
            chunk_size=16,
            gradient_accumulation_fusion=fusion,
        )
        loss.sum().backward()
        assert leaf.grad_added_to_main_grad is fusion
        found[fusion] = leaf.main_grad - 1 if fusion else leaf.grad.float()
    bound = 2**-6 * found[False].abs().max()
    assert (found[True] - found[False]).abs().max() <= bound


@on_cuda_alone
@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_no_synchronisation(gradient):
    hidden, weight, target, labels = make_inputs(torch.bfloat16)
    weight.requires_grad_()
    weights = torch.ones(S, B, device="cuda")
    index = torch.arange(0, S * B, 3, device="cuda")

    def step():
        loss = fused_chunked_kd_loss(
            hidden,
            weight,
            target,
            labels=labels,
            divergence=Divergence(ce_weight=0.1),
            gradient=gradient,
            token_weights=weights.flatten().scatter(0, index, 1.0).view(S, B),
            supervised_index=index,
        )
        loss.sum().backward()

    step()  # kernels are built in the first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda_alone
@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
@pytest.mark.parametrize("positions", [32768, 262144])
def test_full_size(positions, gradient):
    """One rank of two: D 4096, 65,536 rows, K 100, bf16. Prints it/s and GiB; holds the memory."""
    limit_gib = {32768: 3, 262144: 7}[positions]
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    hidden = torch.randn(positions, 1, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.randn(65536, 4096, device=device, dtype=torch.bfloat16).mul_(1 / 64)
    hidden.requires_grad_(), weight.requires_grad_()
    ids = torch.randint(0, 655, (positions, 1, 100), device=device, dtype=torch.int32)
    ids += torch.arange(100, device=device, dtype=torch.int32) * 655
    target = TopKTarget(ids, torch.full(ids.shape, -5.0, device=device))
    weights = torch.ones(positions, 1, device=device)

    def step():
        hidden.grad = weight.grad = None
        loss = fused_chunked_kd_loss(
            hidden, weight, target, gradient=gradient, token_weights=weights
        )
        (loss * weights).sum().backward()

    for _ in range(2):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        step()
    end.record()
    end.synchronize()
    per_second = 5000 / start.elapsed_time(end)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    print(f"\n{positions} tokens, {gradient}: {per_second:.2f} it/s, peak {peak_gib:.2f} GiB")
    assert peak_gib <= limit_gib

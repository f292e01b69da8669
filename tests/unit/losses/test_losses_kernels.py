"""The passes between the products: eager in blocks, and compiled. Triton: test_triton_kernels."""

import pytest
import torch

from megatron_kd.losses import (
    Divergence,
    TopKTarget,
    fused_chunked_kd_loss,
    kernels,
    sparse_chunked_kd_loss,
)
from megatron_kd.losses.divergence import objective_unit
from megatron_kd.losses.fused_loop import Projection, row_gap
from megatron_kd.losses.kernels import compiled, eager
from megatron_kd.losses.kernels.eager import log_probability
from megatron_kd.losses.positions import Positions
from megatron_kd.losses.vocab_parallel import VocabShard

TEMPERATURES = [(1.0,), (2.0,), (20.0, 1.0)]


def make_logits(dtype, columns, rows=9):
    """Rows with nothing left, with a late start, far from zero, and beyond exp's range."""
    make = torch.Generator().manual_seed(columns)
    z = torch.randn(rows, columns, generator=make) * 5
    z[:, :7] = float("-inf")
    z[3] = float("-inf")
    z[4, : columns - 3] = float("-inf")
    z[5] += 1e4
    z[6] *= 2000
    return z.to(dtype)


def check_against_definition(backend, dtype, columns, inverse_taus):
    z = make_logits(dtype, columns)
    m, sums = backend.max_and_sums(z, inverse_taus, None)
    exact = z.double()
    assert torch.equal(m.double(), exact.amax(-1))
    shift = torch.where(m == float("-inf"), 0.0, m).double().unsqueeze(-1)
    scales = torch.linspace(-1, 1, len(inverse_taus) * 9).view(len(inverse_taus), 9)
    want = torch.zeros_like(exact)
    for t, inverse_tau in enumerate(inverse_taus):
        terms = ((exact - shift) * inverse_tau).exp()
        torch.testing.assert_close(sums[t].double(), terms.sum(-1), rtol=1e-5, atol=0)
        want += scales[t].double().unsqueeze(-1) * terms
    backend.to_gradient_(z, shift.squeeze(-1).to(m.dtype), scales.to(m.dtype), inverse_taus, None)
    rtol = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(z.double(), want, rtol=rtol, atol=1e-6)


def check_exponentials(backend, dtype, columns, inverse_tau):
    z = make_logits(dtype, columns)
    exact = z.to(torch.float64, copy=True)
    m, sums = backend.exponentials_(z, inverse_tau)
    assert torch.equal(m.double(), exact.amax(-1))
    shift = torch.where(m == float("-inf"), 0.0, m).double().unsqueeze(-1)
    want = ((exact - shift) * inverse_tau).exp()
    torch.testing.assert_close(z.double(), want, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(sums.double(), want.sum(-1).unsqueeze(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("inverse_tau", [1.0, 2.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_eager_exponentials(dtype, inverse_tau, monkeypatch):
    for block_bytes in (1, 100_000, 1 << 30):
        monkeypatch.setattr(eager, "CPU_BLOCK_BYTES", block_bytes)
        check_exponentials(eager, dtype, 4999, inverse_tau)


def test_rows_of_a_chunk_are_kept_apart_where_they_would_collide():
    cpu = torch.device("cpu")
    assert row_gap(32768, torch.float32, cpu) == 64
    assert row_gap(1024, torch.float64, cpu) == 32
    assert row_gap(32767, torch.float32, cpu) == 0
    assert row_gap(32768, torch.bfloat16, cpu) == 0
    assert row_gap(32768, torch.float32, torch.device("cuda")) == 0


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_rows_of_an_odd_vocabulary_begin_at_whole_loads_on_a_device(device):
    for columns in (50257, 65536, 397, 151936 // 2):
        width = columns + row_gap(columns, torch.bfloat16, torch.device(device))
        assert width % 64 == 0 and width - columns < 64
    hidden, weight = torch.empty(5, 8, device="meta"), torch.empty(397, 8, device="meta")
    shard = VocabShard.of(397, None, None)
    project = Projection(hidden, weight, None, Positions(5), shard, torch.float32, 3)
    _, z = project(slice(0, 3))
    assert z.shape == (3, 397) and z.stride() == (448, 1)


def test_exponentials_are_kept_only_where_they_are_exact():
    assert kernels.keeps_exponentials(torch.zeros(2, 3), (0.5,))
    assert not kernels.keeps_exponentials(torch.zeros(2, 3), (0.5, 1.0))
    assert not kernels.keeps_exponentials(torch.zeros(2, 3, dtype=torch.bfloat16), (1.0,))
    with kernels.use_backend("triton"):
        assert not kernels.keeps_exponentials(torch.zeros(2, 3), (1.0,))


@pytest.mark.parametrize("inverse_taus", TEMPERATURES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eager(dtype, inverse_taus, monkeypatch):
    for block_bytes in (1, 100_000, 1 << 30):  # one row, a few, all of them
        monkeypatch.setattr(eager, "CPU_BLOCK_BYTES", block_bytes)
        check_against_definition(eager, dtype, 4999, inverse_taus)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(dtype):
    if not compiled.available("cpu"):
        pytest.skip("torch.compile is disabled or has no tool chain here")
    for inverse_taus in TEMPERATURES:
        check_against_definition(compiled, dtype, 4999, inverse_taus)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_compiled_pair(objective):
    """The passes over both models' logits, compiled, against the formulas in fp64."""
    if not compiled.available("cpu"):
        pytest.skip("torch.compile is disabled or has no tool chain here")
    make = torch.Generator().manual_seed(0)
    z, y = torch.randn(5, 3001, generator=make), torch.randn(5, 3001, generator=make)
    options, unit = Divergence(objective=objective, beta=0.3), objective_unit(objective)
    m, sums = eager.max_and_sums(z, (0.5, 1.0), None)
    teacher_m, teacher_sums = eager.max_and_sums(y, (0.5,), None)
    student, teacher = (m, *sums.log()), (teacher_m, teacher_sums[0].log())
    kd, ce = torch.linspace(-1, 1, 5), torch.linspace(0, 1, 5)
    double = [x.double() for x in (*student, *teacher)]
    log_q = log_probability(z, double[0], double[1], 0.5)
    log_p = log_probability(y, double[3], double[4], 0.5)
    totals = torch.stack(unit.row_sums(log_q, log_p, options))
    got = compiled.full_sums(z, y, student[:2], teacher, 0.5, unit, options, (None, None))
    torch.testing.assert_close(got.double(), totals, rtol=1e-5, atol=1e-6)
    want = unit.gradient(log_q, log_p, tuple(totals), options) * kd.unsqueeze(-1)
    for weights, more in (((kd, None), 0), ((kd, ce), 1)):
        dz = z.clone()
        compiled.full_gradient_(
            dz, y, student, teacher, totals.float(), weights, 0.5, unit, options, (None, None)
        )
        softmax = log_probability(z, double[0], double[2], 1.0).exp() * ce.unsqueeze(-1)
        torch.testing.assert_close(dz.double(), want + more * softmax, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
def test_the_heads_stay_compiled(monkeypatch, caplog):
    """Views of logits that autograd has seen change are written to like any other memory."""
    if not compiled.available("cpu"):
        pytest.skip("torch.compile is disabled or has no tool chain here")
    monkeypatch.setattr(kernels, "LEAST_COMPILED_ELEMENTS", 1)
    make = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(12, 1, 8, generator=make), torch.randn(50, 8, generator=make)
    ids = torch.stack([torch.randperm(50, generator=make)[:4] for _ in range(12)])[:, None]
    target = TopKTarget(ids, torch.full((12, 1, 4), 0.2).log())
    gradients = {}
    for backend in ("eager", "compiled"):
        w = weight.clone().requires_grad_()
        with kernels.use_backend(backend), caplog.at_level("WARNING"):
            loss = sparse_chunked_kd_loss(hidden @ w.T, target, chunk_size=5, reuse_logits=True)
            (loss * torch.linspace(1, 2, 12)[:, None]).sum().backward()
        gradients[backend] = w.grad
    torch.testing.assert_close(gradients["compiled"], gradients["eager"])
    assert not caplog.records


def fresh_availability(monkeypatch):
    compiled.available.cache_clear()
    monkeypatch.setattr(kernels, "LEAST_COMPILED_ELEMENTS", 1)


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_disabled_compiler_means_eager(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    fresh_availability(monkeypatch)
    assert kernels._backend(torch.zeros(4, 4)) is eager
    assert kernels.describe(torch.device("cpu")) == "eager"
    compiled.available.cache_clear()


def test_broken_compiler_means_eager_and_is_said(monkeypatch, caplog):
    class Broken:
        def read(self, *_):
            raise RuntimeError("no C++ compiler found\nlong story")

    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(compiled, "_compiled", Broken)
    fresh_availability(monkeypatch)
    with caplog.at_level("WARNING"):
        assert kernels._backend(torch.zeros(4, 4)) is eager
        assert kernels._backend(torch.zeros(4, 4)) is eager
    assert [record.getMessage() for record in caplog.records] == [
        "elementwise work on a cpu is eager, torch.compile fails here: no C++ compiler found"
    ]
    compiled.available.cache_clear()


def test_no_cpu_kernel_is_compiled_to_decide_about_a_device(monkeypatch):
    devices = []

    class Recorder:
        def read(self, example, inverse_tau, *_):
            devices.append((example.device.type, inverse_tau.device.type))

    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(compiled, "_compiled", Recorder)
    fresh_availability(monkeypatch)
    assert kernels.compiled.available("meta")
    assert devices == [("meta", "meta")]
    compiled.available.cache_clear()


def test_backend_can_be_forced():
    with kernels.use_backend("eager"):
        assert kernels._backend(torch.zeros(4000, 4000)) is eager
    with pytest.raises(ValueError, match="eager, compiled, triton"):
        with kernels.use_backend("cuda"):
            pass


@pytest.mark.extended
def test_large_chunks_work_whatever_backend_is_picked():
    """More elements than LEAST_COMPILED_ELEMENTS, through the default choice and the eager twin."""
    make = torch.Generator().manual_seed(0)
    rows = kernels.LEAST_COMPILED_ELEMENTS // 4096 + 1
    hidden = torch.randn(rows, 1, 2, generator=make)
    weight = torch.randn(4096, 2, generator=make).requires_grad_()
    from megatron_kd.losses import TopKTarget

    target = TopKTarget(torch.arange(3).expand(rows, 1, 3), torch.full((rows, 1, 3), -2.0))
    results = []
    for force in (False, True):
        weight.grad = None
        if force:
            with kernels.use_backend("eager"):
                loss = fused_chunked_kd_loss(hidden, weight, target, chunk_size=rows)
                loss.sum().backward()
        else:
            loss = fused_chunked_kd_loss(hidden, weight, target, chunk_size=rows)
            loss.sum().backward()
        results.append((loss.detach(), weight.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-4)

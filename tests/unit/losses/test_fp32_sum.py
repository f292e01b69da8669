"""The fp32 sum of 16-bit products: each form right, and the first chosen that a device takes."""

import pytest
import torch

from megatron_kd.losses import fp32_sum
from megatron_kd.losses.fp32_sum import PRODUCTS, add_product_, first_that_works

CPU = torch.device("cpu")


def widened(a, b, *, out_dtype):
    """torch.mm(out_dtype=), which PyTorch has on GPUs alone."""
    return a.to(out_dtype) @ b.to(out_dtype)


def widened_within(total, a, b, *, out_dtype, beta, out):
    """torch.addmm(out_dtype=) of current PyTorch on GPUs."""
    product = widened(a, b, out_dtype=out_dtype)
    out.copy_(product if beta == 0 else beta * total + product)


def strict_within(total, a, b, **_):
    """torch.addmm(out_dtype=) of builds of autumn 2025."""
    if total.dtype != b.dtype:
        raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")


def rounded_within(total, a, b, *, out_dtype, beta, out):
    """A build that takes the call and ignores what it asks for."""
    out.copy_(a @ b)


@pytest.mark.parametrize(
    ("within", "product", "chosen"),
    [
        (widened_within, widened, "summed within"),
        (strict_within, widened, "slices in fp32"),
        (rounded_within, widened, "slices in fp32"),
        (strict_within, None, "rounded slices"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_first_that_a_device_gets_right(monkeypatch, within, product, chosen, dtype):
    monkeypatch.setattr(torch, "addmm", within)
    if product is not None:
        plain = torch.mm
        monkeypatch.setattr(
            torch, "mm", lambda *a, **k: product(*a, **k) if "out_dtype" in k else plain(*a, **k)
        )
    assert first_that_works(CPU, dtype, PRODUCTS) == chosen
    make = torch.Generator().manual_seed(1)
    monkeypatch.setattr(fp32_sum, "CPU_SLICE_BYTES", 4 * 11 * 3)  # slices of 3, the last of 1
    dz = torch.randn(5, 10, generator=make).to(dtype)
    h = torch.randn(5, 11, generator=make).to(dtype)
    before = torch.randn(10, 11, generator=make)
    for beta, total in ((1.0, before.clone()), (0.0, torch.full((10, 11), float("nan")))):
        PRODUCTS[chosen](total, dz, h, beta)
        want = dz.double().T @ h.double() + (before.double() if beta else 0)
        tolerance = 2e-2 if chosen == "rounded slices" else 1e-5
        torch.testing.assert_close(total.double(), want, rtol=tolerance, atol=tolerance)


def test_a_device_that_takes_none_is_refused_with_what_each_raised():
    def refuses(total, dz, h, beta):
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="mine: no kernel"):
        first_that_works(CPU, torch.bfloat16, {"mine": refuses})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_many_products_stay_exact(dtype):
    make = torch.Generator().manual_seed(2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total, want = (
        torch.full((7, 9), float("nan"), dtype=wide),
        torch.zeros(7, 9, dtype=torch.float64),
    )
    for number in range(64):
        dz = torch.randn(6, 7, generator=make).to(dtype)
        h = torch.randn(6, 9, generator=make).to(dtype)
        add_product_(total, dz, h, beta=float(number > 0))
        want += dz.double().T @ h.double()
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    assert (total - want).abs().max() < bound

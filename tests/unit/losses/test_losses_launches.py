"""How many operations a chunk costs beside its products, counted on the meta device along the path
that CUDA takes: on a GPU each is a launch, and a chunk of ten milliseconds has time for few.
"""

import collections
import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_kd.losses import Divergence, TopKTarget, fused_chunked_kd_loss, kernels
from megatron_kd.losses.kernels import triton

# Operations that launch nothing: views, and memory that is not written.
NO_LAUNCH = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute"),
    *("select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
PRODUCTS = {"mm", "addmm"}
FEW, MANY = 2, 5  # chunks


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in NO_LAUNCH:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def on_meta(monkeypatch):
    """PyTorch's autocast does not know the meta device, on which Triton's kernels do not run."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda kind, enabled: contextlib.nullcontext())


def launches(monkeypatch, chunks: int, gradient: str, *, host: bool, **options):
    """Of a loss and its gradient, in bf16. host: with labels and an index, as a run has them."""
    rows, h, v, k = 16, 64, 500, 10
    s = rows * chunks

    def empty(*shape, dtype=torch.float32, **more):
        return torch.empty(*shape, dtype=dtype, device="meta", **more)

    hidden = empty(s, 1, h, dtype=torch.bfloat16, requires_grad=True)
    weight = empty(v, h, dtype=torch.bfloat16, requires_grad=True)
    target = TopKTarget(empty(s, 1, k, dtype=torch.int32), empty(s, 1, k))
    token_weights = empty(s, 1)
    with Launches() as seen, kernels.use_backend("triton"):

        def launch(name, *args):
            seen.counts[name] += 1
            return True

        monkeypatch.setattr(triton, "_launch", launch)
        loss = fused_chunked_kd_loss(
            hidden,
            weight,
            target,
            chunk_size=rows // 2,  # of 16-bit logits twice as many rows are taken
            gradient=gradient,
            token_weights=token_weights,
            supervised_index=empty(s, dtype=torch.int64) if host else None,
            labels=empty(s, 1, dtype=torch.int64) if host else None,
            divergence=Divergence(**options),
        )
        (loss * token_weights).sum().backward()
    return seen.counts


def per_chunk(monkeypatch, gradient: str, **options) -> dict[str, float]:
    """Operations that each further chunk adds, by name."""
    _, few, many = (  # what is tried or made once is in the first
        launches(monkeypatch, chunks, gradient, **options) for chunks in (FEW, FEW, MANY)
    )
    added = {name: (many[name] - few[name]) / (MANY - FEW) for name in many}
    return {name: count for name, count in added.items() if count}


MIXED = dict(tail="bucket", ce_weight=0.2)


@pytest.mark.parametrize(
    "gradient, options, most",
    [
        # Before they were counted: 176, 209, 139; 284 and 222.
        ("in_forward", dict(host=True), 79),
        ("in_forward", dict(host=True, **MIXED), 125),
        ("in_forward", dict(host=False), 69),
        ("recompute", dict(host=True), 123),
        ("recompute", dict(host=False), 106),
    ],
)
def test_small_launches_of_a_chunk(monkeypatch, gradient, options, most):
    added = per_chunk(monkeypatch, gradient, **options)
    passes = 1 if gradient == "in_forward" else 2
    assert sum(added[name] for name in PRODUCTS) == 2 + passes
    assert added["read_rows"] == added["write_rows"] == 1
    small = {name: count for name, count in added.items() if name not in PRODUCTS}
    assert sum(small.values()) <= most, small


@pytest.mark.parametrize("gradient", ["in_forward", "recompute"])
def test_no_number_is_made_on_the_device_for_a_chunk(monkeypatch, gradient):
    """`torch.where(condition, x, 0.0)` fills a tensor with its number first, each time."""
    made = {"arange", "fill", "fill_", "full", "full_like", "scalar_tensor", "zeros", "ones"}
    assert not made & set(per_chunk(monkeypatch, gradient, host=True))

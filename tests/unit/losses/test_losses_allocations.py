"""Every allocation of a fused loss at the paper's shapes, counted on the meta device: nothing is
computed, so a sequence of 262,144 tokens takes a moment.

Counted with what the loss is given: hidden states, weight, the teacher's rows, and main_grad where
the host has one. The kernels are the eager ones, whose scratch of 128 MiB Triton's do without.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_kd.losses import TopKTarget, fused_chunked_kd_loss, kernels

D, V, K, CHUNK = 4096, 65536, 100, 4096  # V: rows of the output layer on one rank
GIB = 1 << 30


class Allocations(TorchDispatchMode):
    """The bytes of all storages made under it that are alive, and the largest sum of them."""

    def __init__(self):
        super().__init__()
        self.alive = {}  # reference → bytes
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if tensor(x)}
        out = func(*args, **(kwargs or {}))
        for ref in [ref for ref in self.alive if ref.expired()]:
            del self.alive[ref]
        for x in filter(tensor, tree_leaves(out)):
            storage = x.untyped_storage()
            if storage._cdata not in known:
                self.alive.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(self.alive.values()))
        return out


def tensor(x):
    return isinstance(x, torch.Tensor)


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch):
    """PyTorch's autocast does not know the meta device, and no loss is run under it here."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda kind, enabled: contextlib.nullcontext())


@pytest.fixture
def two_ranks():
    """A group of two ranks that only takes the calls."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def peak_gib(positions, gradient, *, main_grad=False, group=None):
    meta = dict(device="meta")
    local = positions if group is None else positions // 2
    hidden = torch.empty(local, 1, D, dtype=torch.bfloat16, **meta).requires_grad_()
    weight = torch.nn.Parameter(torch.empty(V, D, dtype=torch.bfloat16, **meta))
    target = TopKTarget(
        torch.empty(positions, 1, K, dtype=torch.int32, **meta),
        torch.empty(positions, 1, K, dtype=torch.float32, **meta),
    )
    weights = torch.empty(positions, 1, **meta)
    if main_grad:
        weight.main_grad = torch.empty(V, D, dtype=torch.float32, **meta)
        weight.grad_added_to_main_grad = False
    given = [hidden, weight, target.ids, target.logprobs, weights]
    if main_grad:
        given.append(weight.main_grad)
    with Allocations() as counted, kernels.use_backend("eager"):
        loss = fused_chunked_kd_loss(
            hidden,
            weight,
            target,
            chunk_size=CHUNK // 2,  # 16-bit logits come in twice the rows
            gradient=gradient,
            token_weights=weights,
            sequence_parallel=group is not None,
            gradient_accumulation_fusion=main_grad,
            tp_group=group,
        )
        loss.sum().backward()
    return (counted.peak_bytes + sum(x.nbytes for x in given)) / GIB


LONG = 262144  # seconds to count


@pytest.mark.parametrize(
    ("positions", "gradient", "most_gib"),
    [
        (32768, "in_forward", 3.0),
        pytest.param(LONG, "in_forward", 6.5, marks=pytest.mark.extended),
        pytest.param(LONG, "recompute", 6.7, marks=pytest.mark.extended),
    ],
)
def test_one_rank_alone(positions, gradient, most_gib):
    assert peak_gib(positions, gradient) <= most_gib


@pytest.mark.parametrize(
    ("positions", "gradient", "most_gib"),
    [
        (32768, "in_forward", 3.6),
        pytest.param(LONG, "in_forward", 6.9, marks=pytest.mark.extended),
        pytest.param(LONG, "recompute", 6.0, marks=pytest.mark.extended),
    ],
)
def test_two_ranks_that_share_the_sequence_with_a_gradient_buffer(
    two_ranks, positions, gradient, most_gib
):
    """dH takes the place of the gathered hidden states, and is reduced beside no chunk."""
    assert peak_gib(positions, gradient, main_grad=True, group=two_ranks) <= most_gib

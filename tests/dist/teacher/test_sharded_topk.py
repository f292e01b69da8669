"""The top-K merged over vocabulary shards is the top-K of the whole, ties, draws and normalizers
included."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from megatron_kd.teacher.engines.base import EngineError, RowRequest
from megatron_kd.teacher.engines.draws import draws_of
from megatron_kd.teacher.engines.sharded_topk import select_sharded
from megatron_kd.teacher.engines.topk import select

ROWS = 37
CASES = {
    # name: (columns, request); columns beyond vocab_size are padding, spread over the last shards
    "plain": (96, dict(topk=7, vocab_size=96)),
    "padding": (96, dict(topk=7, vocab_size=61)),
    "a shard of padding only": (96, dict(topk=7, vocab_size=20)),
    "more than a shard holds": (96, dict(topk=50, vocab_size=90)),
    "everything": (96, dict(topk=90, vocab_size=90)),
    "temperatures": (96, dict(topk=3, vocab_size=61, temperatures=(0.5, 4.0))),
    "top_p": (96, dict(topk=20, vocab_size=96, top_p=0.6)),
    "random": (96, dict(topk=30, vocab_size=61, sampling="random")),
}


def logits_of(columns, levels, vocab_size):
    """[ROWS, columns] in few levels, so that there are ties within and between shards; the padding
    has about a quarter of each row's mass, as much of it as possible in one column.
    """
    generator = torch.Generator().manual_seed(columns + levels)
    logits = torch.randn(ROWS, columns, generator=generator) * 3
    logits[:, vocab_size:] = -30.0
    if vocab_size < columns:
        logits[:, -1] = logits[:, :vocab_size].logsumexp(-1) - 1.1
    return (logits * levels).round() / levels


def all_cases(rank):
    found = {}
    world = dist.get_world_size()
    for name, (columns, fields) in CASES.items():
        for levels in (1, 1000):
            request = RowRequest(**fields)
            part = columns // world
            whole = logits_of(columns, levels, request.vocab_size)
            local = whole[:, rank * part : (rank + 1) * part]
            uniforms = draws_of(np.arange(ROWS + 1, dtype=np.int32), np.arange(ROWS), request)
            labels = np.arange(ROWS) * 7 % request.vocab_size
            got = select_sharded(local, rank * part, request, uniforms, dist.group.WORLD, labels)
            found[name, levels] = *got, request.beyond
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equal_to_the_whole_vocabulary(world):
    ranks = run_ranks(world, all_cases)
    for (name, levels), (ids, logprobs, log_z, label_logprobs, beyond) in ranks[0].items():
        columns, fields = CASES[name]
        request = RowRequest(**fields)
        uniforms = draws_of(np.arange(ROWS + 1, dtype=np.int32), np.arange(ROWS), request)
        labels = np.arange(ROWS) * 7 % request.vocab_size
        whole = logits_of(columns, levels, request.vocab_size)
        want_ids, want_logprobs, want_z, want_labels = select(whole, request, uniforms, labels)
        torch.testing.assert_close(label_logprobs, want_labels, atol=1e-5, rtol=0)
        assert beyond.largest == pytest.approx(request.beyond.largest, rel=1e-5)
        assert beyond.total == pytest.approx(request.beyond.total, rel=1e-5)
        assert (beyond.largest > 0.1) == (request.vocab_size < columns)
        assert ids.tolist() == want_ids.tolist(), (name, levels)
        torch.testing.assert_close(logprobs, want_logprobs, atol=1e-5, rtol=0)
        assert log_z.keys() == want_z.keys()
        for tau in log_z:
            torch.testing.assert_close(log_z[tau], want_z[tau], atol=1e-5, rtol=0)
        for other in ranks[1:]:
            assert torch.equal(other[name, levels][0], ids)
            assert torch.equal(other[name, levels][1], logprobs)


def draws_at_the_edge(rank):
    """Draws so near to 1 that they may round to the end of the distribution function."""
    request = RowRequest(topk=8, vocab_size=20, sampling="random")
    uniforms = np.full((ROWS, 8), np.nextafter(1.0, 0.0))
    whole = logits_of(96, 1000, 20)
    local = whole[:, rank * 32 : (rank + 1) * 32]
    got = select_sharded(local, rank * 32, request, uniforms, dist.group.WORLD)
    return got[0], got[1], *select(whole, request, uniforms)[:2]


def test_the_last_draws_fall_on_the_last_id_and_not_on_padding():
    for ids, logprobs, want_ids, want_logprobs in run_ranks(3, draws_at_the_edge):
        assert ids.tolist() == want_ids.tolist()
        torch.testing.assert_close(logprobs, want_logprobs)
        assert (ids[:, 0] == 19).all() and (ids[:, 1:] == -1).all()


def nan_on_one_shard(rank):
    logits = torch.zeros(3, 8)
    if rank == 1:
        logits[1, 2] = torch.nan
    try:
        select_sharded(logits, 8 * rank, RowRequest(topk=2, vocab_size=16), None, dist.group.WORLD)
    except EngineError:
        return "refused"


def test_nan_on_one_shard_is_refused_by_all():
    assert run_ranks(2, nan_on_one_shard) == ["refused", "refused"]

"""Rows out of an engine's lists of candidates, by themselves."""

import numpy as np
import pytest
import torch

from megatron_kd.losses import Divergence, TopKTarget, dense_kd_loss
from megatron_kd.teacher.engines.base import RowRequest, TeacherDocument
from megatron_kd.teacher.engines.listed_rows import rows_from_lists

IMPOSSIBLE = [-np.inf, -9999.0, -9999.5, -1e30]


def rows_of(logprobs, topk=3):
    ids = np.arange(len(logprobs), dtype=np.int64)
    document = TeacherDocument(tokens=np.array([1, 0], np.int32), rows=np.array([0]))
    request = RowRequest(vocab_size=5, topk=topk)
    lists = [None, (ids, np.array(logprobs, np.float32))]
    return rows_from_lists(lists, document, request, "a server")


@pytest.mark.parametrize("written", IMPOSSIBLE)
def test_tokens_that_cannot_come_are_unused_slots(written):
    rows = rows_of([0.0, written, written])
    assert rows.topk_ids.tolist() == [[0, -1, -1]]
    assert rows.topk_logprobs.tolist() == [[0.0, -np.inf, -np.inf]]


def test_what_can_hardly_come_is_kept():
    rows = rows_of([0.0, -9998.0, -700.0])
    assert rows.topk_ids.tolist() == [[0, 2, 1]]


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_losses_do_not_see_how_a_server_writes_them(objective):
    logits = torch.randn(1, 1, 5, generator=torch.Generator().manual_seed(0))
    losses = []
    for written in IMPOSSIBLE:
        rows = rows_of([0.0, written, written])
        target = TopKTarget(
            torch.from_numpy(rows.topk_ids).view(1, 1, 3),
            torch.from_numpy(rows.topk_logprobs).view(1, 1, 3),
        )
        divergence = Divergence(objective=objective, tail="bucket")
        losses.append(dense_kd_loss(logits, target, divergence=divergence).item())
    assert losses == [losses[0]] * len(losses) and losses[0] < 20

import numpy as np
import pytest
import torch

from megatron_kd.teacher.engines.base import EngineError, RowRequest
from megatron_kd.teacher.engines.draws import draws_of
from megatron_kd.teacher.engines.listed_rows import order_rows
from megatron_kd.teacher.engines.topk import largest, select


def naive_largest(values, count):
    return [sorted(range(len(row)), key=lambda v: (-row[v], v))[:count] for row in values.tolist()]


@pytest.mark.parametrize("count", [1, 5, 100, 251, 252])
@pytest.mark.parametrize("levels", [2, 7, 10**6], ids=lambda n: f"{n}-levels")
def test_largest_breaks_ties_by_smaller_id(count, levels):
    generator = torch.Generator().manual_seed(count + levels)
    values = torch.randint(levels, (23, 252), generator=generator).float()
    assert largest(values, count).tolist() == naive_largest(values, count)


def test_bf16_logits_share_the_last_place():
    logits = (torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    ids, logprobs, *_ = select(logits, RowRequest(topk=100, vocab_size=5000))
    want = logits.float().log_softmax(-1)
    assert ids.tolist() == naive_largest(want, 100)
    torch.testing.assert_close(logprobs, want.gather(-1, ids.long()), rtol=0, atol=0)


def test_padding_rows_have_no_mass():
    logits = torch.zeros(3, 40)
    logits[1, 33:] = 1.2  # padding that would win
    request = RowRequest(topk=4, vocab_size=33, temperatures=(2.0,))
    ids, logprobs, log_z, _ = select(logits, request)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(logprobs.exp(), torch.full((3, 4), 1 / 33))
    # Σ_v exp(log p_v / 2) = 33 · 33^(-1/2)
    torch.testing.assert_close(log_z[2.0].exp(), torch.full((3,), 33**0.5))
    beyond = logits.softmax(-1)[:, 33:].sum(-1)
    assert request.beyond.rows == 3
    assert request.beyond.largest == pytest.approx(float(beyond[1]), rel=1e-5)
    assert request.beyond.total == pytest.approx(float(beyond.sum()), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_lies_mostly_beyond_the_vocabulary_is_refused(dtype):
    logits = torch.zeros(3, 40, dtype=dtype)
    logits[2, 35] = 5.0  # 0.79 of the row
    request = RowRequest(topk=4, vocab_size=35)
    with pytest.raises(EngineError, match=r"0\.8\d\d of its probability .* from 35 on"):
        select(logits, request)


def test_normalizer_at_a_temperature_gives_that_distribution():
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)) * 4
    ids, logprobs, log_z, _ = select(
        logits, RowRequest(topk=7, vocab_size=200, temperatures=(0.5, 3.0))
    )
    for tau in (0.5, 3.0):
        want = (logits / tau).log_softmax(-1).gather(-1, ids.long())
        torch.testing.assert_close(logprobs / tau - log_z[tau][:, None], want)


def test_top_p_keeps_the_candidate_that_reaches_it():
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]])
    ids, logprobs, *_ = select(probabilities.log(), RowRequest(topk=3, vocab_size=4, top_p=0.75))
    assert ids.tolist() == [[0, 1, -1], [0, -1, -1]]
    assert torch.isneginf(logprobs[1, 1:]).all()


def test_impossible_tokens_are_not_kept():
    logits = torch.full((1, 10), -torch.inf)
    logits[0, [3, 8]] = 0.0
    ids, logprobs, *_ = select(logits, RowRequest(topk=4, vocab_size=10))
    assert ids.tolist() == [[3, 8, -1, -1]]
    assert torch.isneginf(logprobs[0, 2:]).all()


def test_nan_is_refused():
    with pytest.raises(EngineError, match="dtype"):
        select(torch.full((1, 4), torch.nan), RowRequest(topk=1, vocab_size=4))


def test_narrow_teacher_is_refused():
    with pytest.raises(EngineError, match="151936"):
        select(torch.zeros(1, 100), RowRequest(topk=1, vocab_size=151936))


def test_random_draws_are_unbiased_and_repeat():
    probabilities = np.array([0.6, 0.25, 0.1, 0.05])
    rows = np.arange(4000)
    tokens = np.arange(4001, dtype=np.int32)
    request = RowRequest(topk=4, vocab_size=4, sampling="random")
    uniforms = draws_of(tokens, rows, request)
    logits = torch.from_numpy(np.log(probabilities)).float().expand(4000, 4)
    ids, logprobs, *_ = select(logits, request, uniforms)
    weights = logprobs.double().exp()
    assert torch.allclose(weights.sum(-1), torch.ones(4000, dtype=torch.double))
    for row in ids.tolist():
        used = [v for v in row if v >= 0]
        assert len(set(used)) == len(used) and row == used + [-1] * (4 - len(used))
    estimate = torch.zeros(5, dtype=torch.double)
    estimate.index_add_(0, ids.flatten().long() % 5, weights.flatten())
    standard_error = np.sqrt(probabilities * (1 - probabilities) / (4000 * 4))
    assert (np.abs(estimate[:4].numpy() / 4000 - probabilities) < 4 * standard_error).all()
    # The same numbers whichever rows are asked.
    np.testing.assert_array_equal(draws_of(tokens, rows[100:200], request), uniforms[100:200])
    other = draws_of(tokens, rows, RowRequest(topk=4, vocab_size=4, sampling="random", seed=7))
    assert (other != uniforms).mean() > 0.99
    assert (draws_of(tokens[::-1], rows, request) != uniforms).mean() > 0.99


def test_order_rows_takes_the_first_k_of_k_plus_one():
    ids = np.array([[9, 4, 7, 2]])
    logprobs = np.array([[-1.0, -0.5, -1.0, -3.0]], np.float32)
    got_ids, got_logprobs = order_rows(ids, logprobs, 3)
    assert got_ids.tolist() == [[4, 7, 9]]
    assert got_logprobs.tolist() == [[-0.5, -1.0, -1.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"topk": 0},
        {"topk": 11},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"sampling": "beam"},
        {"sampling": "random", "top_p": 0.9},
        {"temperatures": (0.0,)},
        {"temperatures": (2.0, 2.0)},
    ],
    ids=str,
)
def test_senseless_requests_are_refused(wrong):
    with pytest.raises(EngineError):
        RowRequest(**{"topk": 4, "vocab_size": 10, **wrong})

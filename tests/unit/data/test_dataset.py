"""The training dataset: alignment, padding, epochs, orders, workers."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_kd.data.dataset import PAD_TOKEN, DistillDataset

S, K, SAMPLES = 8, 3, 5


def sample(index, n=S + 1, cached=True):
    values = {
        "tokens": np.arange(n, dtype=np.int32) + 100 * index,
        "loss_mask": np.array([t % 2 == 0 and t < n - 1 for t in range(n)]),
    }
    if cached:
        values["topk_ids"] = np.arange(n * K, dtype=np.int32).reshape(n, K)
        values["topk_logprobs"] = -np.ones((n, K), dtype=np.float32)
        values["log_z"] = {2.0: np.arange(n, dtype=np.float32)}
    return SimpleNamespace(**values)


def dataset(samples=None, **options):
    samples = samples or [sample(i) for i in range(SAMPLES)]
    return DistillDataset(samples, S, options.pop("length", 12), **options)


def test_row_t_pairs_with_the_label_t_plus_one():
    item = dataset()[2]
    assert item["tokens"].tolist() == list(range(200, 208))
    assert item["labels"].tolist() == list(range(201, 209))
    assert item["topk_ids"][3].tolist() == [9, 10, 11]
    assert item["loss_mask"].tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert item["sample_index"].tolist() == [2]


def test_a_short_sample_is_padded_and_masked():
    item = dataset([sample(0, n=4)])[0]
    assert item["tokens"].tolist() == [0, 1, 2, 3] + [PAD_TOKEN] * 4
    assert item["loss_mask"].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert (item["topk_ids"][3:] == -1).all()
    assert torch.isinf(item["topk_logprobs"][3:]).all()


def test_the_teachers_normaliser_comes_with_its_temperature():
    assert dataset(temperature=2.0)[1]["log_z_tau"].tolist() == list(range(8))
    assert "log_z_tau" not in dataset(temperature=3.0)[1]
    assert "log_z_tau" not in dataset()[1]


def test_a_long_sample_is_refused():
    with pytest.raises(ValueError, match=r"10 tokens.*sequence length is 8"):
        dataset([sample(0, n=S + 2)])[0]


def test_prepared_sequences_bring_no_teacher_rows():
    assert "topk_ids" not in dataset([sample(0, cached=False)])[0]


def test_every_epoch_is_a_permutation_of_its_own():
    shuffled = dataset(length=3 * SAMPLES, shuffle=True, seed=7)
    order = [shuffled.sample_index(i) for i in range(3 * SAMPLES)]
    epochs = [order[i : i + SAMPLES] for i in range(0, len(order), SAMPLES)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = dataset(length=3 * SAMPLES, shuffle=True, seed=7)
    backwards = [again.sample_index(i) for i in reversed(range(3 * SAMPLES))]
    assert backwards[::-1] == order  # any order of reading sees the same samples
    other = dataset(length=3 * SAMPLES, shuffle=True, seed=8)
    assert [other.sample_index(i) for i in range(3 * SAMPLES)] != order


def test_a_period_repeats_the_same_samples():
    evaluation = dataset(length=12, period=4)
    assert [evaluation.sample_index(i) for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_workers_get_the_same_items():
    original = dataset(shuffle=True, seed=3)
    copy = pickle.loads(pickle.dumps(original))
    for i in range(12):
        a, b = original[i], copy[i]
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="holds no samples"):
        DistillDataset([], S, 4)

"""The training dataset: alignment, padding, epochs, orders, workers."""

import itertools
import pickle

import numpy as np
import pytest
import torch

from megatron_kd.cache import CachedRows, CachedSample
from megatron_kd.data.dataset import PAD_TOKEN, DistillDataset, SampleOptions
from megatron_kd.data.document_layout import DocumentLayout, context_parallel_places
from megatron_kd.data.sequences import Sequence

S, K, SAMPLES = 8, 3, 5


def sample(index, n=S + 1, cached=True, mask=None, bounds=None):
    """Token t of sample i is 100 i + t; its row holds the ids 3 t, 3 t + 1 and 3 t + 2."""
    tokens = np.arange(n, dtype=np.int32) + 100 * index
    if mask is None:
        mask = np.array([t % 2 == 0 and t < n - 1 for t in range(n)])
    bounds = np.array([0, n] if bounds is None else bounds, np.int32)
    if not cached:
        return Sequence(tokens, mask, bounds)
    rows = CachedRows(
        positions=np.flatnonzero(mask),
        topk_ids=np.arange(n * K, dtype=np.int32).reshape(n, K)[mask],
        topk_logprobs=-np.arange(n, dtype=np.float32)[mask, None] - np.ones((1, K), np.float32),
        mass=np.ones(int(mask.sum()), np.float32),
        log_z={2.0: np.arange(n, dtype=np.float32)[mask] + 1},
        hidden=np.arange(n * 2, dtype=np.float16).reshape(n, 2)[mask],
    )
    return CachedSample(tokens, mask, bounds, rows)


def dataset(samples=None, **options):
    samples = samples or [sample(i) for i in range(SAMPLES)]
    order = {name: options.pop(name) for name in ("shuffle", "seed", "period") if name in options}
    length = options.pop("length", 12)
    return DistillDataset(samples, SampleOptions(sequence_length=S, **options), length, **order)


def test_row_t_pairs_with_the_label_t_plus_one():
    item = dataset()[2]
    assert item["tokens"].tolist() == list(range(200, 208))
    assert item["labels"].tolist() == list(range(201, 209))
    assert item["topk_ids"][:4].tolist() == [[0, 1, 2], [-1] * 3, [6, 7, 8], [-1] * 3]
    assert item["topk_logprobs"][:4, 0].tolist() == [-1, -np.inf, -3, -np.inf]
    assert item["loss_mask"].tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert item["sample_index"].tolist() == [2]


def test_each_cache_of_a_mixture_has_its_number_and_temperature():
    class Mixed(list):
        def locate(self, index):
            return index % 2, index // 2

    samples = Mixed(sample(i) for i in range(4))
    options = SampleOptions(sequence_length=S, source_temperatures=(1.0, 3.0, 2.0))
    items = [DistillDataset(samples, options, 4, numbers=[0, 2])[i] for i in range(4)]
    assert [item["source"].tolist() for item in items] == [[0], [2], [0], [2]]
    assert ["log_z_tau" in item for item in items] == [False, True, False, True]
    assert dataset()[0]["source"].tolist() == [0]


def test_a_short_sample_is_padded_and_masked():
    item = dataset([sample(0, n=4)])[0]
    assert item["tokens"].tolist() == [0, 1, 2] + [PAD_TOKEN] * 5
    assert item["labels"].tolist() == [1, 2, 3] + [PAD_TOKEN] * 5
    assert item["loss_mask"].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert (item["topk_ids"][3:] == -1).all()
    assert torch.isinf(item["topk_logprobs"][3:]).all()


def test_the_teachers_normalizer_comes_with_its_temperature():
    assert dataset(temperature=2.0)[1]["log_z_tau"].tolist() == [1, 0, 3, 0, 5, 0, 7, 0]
    assert "log_z_tau" not in dataset(temperature=3.0)[1]
    assert "log_z_tau" not in dataset()[1]


def test_fewer_entries_are_the_most_likely_ones():
    whole, cut = dataset()[1], dataset(topk=2)[1]
    assert torch.equal(cut["topk_ids"], whole["topk_ids"][:, :2])
    assert torch.equal(cut["topk_logprobs"], whole["topk_logprobs"][:, :2])


def test_a_long_sample_is_refused():
    with pytest.raises(ValueError, match=r"10 tokens.*sequence length is 8"):
        dataset([sample(0, n=S + 2)])[0]


def packed(*lengths):
    """A sample of documents with these lengths; token values count on through it."""
    bounds = np.cumsum([0, *lengths])
    mask = np.ones(sum(lengths), bool)
    mask[bounds[1:] - 1] = False
    return sample(0, n=sum(lengths), mask=mask, bounds=bounds)


def test_documents_apart_are_laid_out_as_if_they_were_alone():
    item = dataset([packed(3, 1, 4)], documents_apart=True)[0]
    assert item["tokens"].tolist() == [0, 1, 4, 5, 6] + [PAD_TOKEN] * 3
    assert item["labels"].tolist() == [1, 2, 5, 6, 7] + [PAD_TOKEN] * 3
    assert item["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert item["loss_mask"].tolist() == [1] * 5 + [0] * 3
    assert item["topk_ids"][2].tolist() == [12, 13, 14]  # row 4 of the sample
    assert item["cu_seqlens"].tolist() == [0, 2, 5, 8]
    assert "cu_seqlens" not in dataset([packed(3, 1, 4)])[0]


def test_a_row_at_a_documents_end_is_no_input():
    """Where documents are apart, the last token of one does not predict the first of the next."""
    across = sample(0, n=6, mask=np.array([1, 1, 1, 0, 1, 0], bool), bounds=[0, 3, 6])
    item = dataset([across], documents_apart=True)[0]
    assert item["tokens"].tolist() == [0, 1, 3, 4] + [PAD_TOKEN] * 4
    assert item["topk_ids"][:, 0].tolist() == [0, 3, -1, 12, -1, -1, -1, -1]
    assert dataset([across])[0]["topk_ids"][:, 0].tolist() == [0, 3, 6, -1, 12, -1, -1, -1]


def test_hidden_states_lie_where_their_rows_do():
    item = dataset(hidden_states=True)[1]
    assert item["teacher_hidden"].dtype == torch.float16
    assert item["teacher_hidden"][:3].tolist() == [[0, 1], [0, 0], [4, 5]]
    assert "teacher_hidden" not in dataset()[1]


def test_a_sample_without_rows_is_all_filler():
    item = dataset([sample(0, mask=np.zeros(S + 1, bool))])[0]
    assert (item["topk_ids"] == -1).all() and torch.isneginf(item["topk_logprobs"]).all()


def test_documents_are_padded_to_what_ranks_can_share():
    item = dataset([packed(3, 4)], documents_apart=True, document_multiple=4, temperature=2.0)[0]
    assert item["tokens"].tolist() == [0, 1, PAD_TOKEN, PAD_TOKEN, 3, 4, 5, PAD_TOKEN]
    assert item["loss_mask"].tolist() == [1, 1, 0, 0, 1, 1, 1, 0]
    assert item["log_z_tau"].tolist() == [1, 2, 0, 0, 4, 5, 6, 0]
    assert item["cu_seqlens"].tolist() == [0, 4, 8]
    with pytest.raises(ValueError, match=r"needs 12 positions.*length is 8"):
        dataset([packed(2, 2, 2)], documents_apart=True, document_multiple=4)[0]


@pytest.mark.parametrize("multiple", [1, 2, 4, 16])
def test_a_layout_keeps_every_prediction_once(multiple):
    generator = np.random.default_rng(3)
    for _ in range(50):
        bounds = np.cumsum([0, *generator.integers(1, 12, generator.integers(1, 6))])
        layout = DocumentLayout.of(bounds, multiple)
        assert (np.diff(layout.bounds) % multiple == 0).all()
        assert layout.bounds[-1] == DocumentLayout.positions(bounds, multiple)
        assert len(set(layout.places)) == len(layout.places) == bounds[-1] - len(bounds) + 1
        assert set(layout.rows) == set(range(bounds[-1])) - set(bounds[1:] - 1)
        for begin, end in itertools.pairwise(layout.bounds):
            inside = layout.rows[(layout.places >= begin) & (layout.places < end)]
            assert (np.diff(inside) == 1).all()  # one document, nothing between
            assert np.isin(inside[0], bounds)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_context_parallel_ranks_hold_every_place_once(ranks):
    bounds = [0, 8, 24, 40]
    held = [context_parallel_places(bounds, rank, ranks) for rank in range(ranks)]
    places, documents = (torch.cat(parts) for parts in zip(*held, strict=True))
    assert sorted(places.tolist()) == list(range(40))
    assert all(bounds[d] <= p < bounds[d + 1] for p, d in zip(places, documents, strict=True))
    assert {len(own) for own, _ in held} == {40 // ranks}
    if ranks == 2:
        assert held[0][0].tolist()[:4] == [0, 1, 6, 7]


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
        DistillDataset([], SampleOptions(sequence_length=S), 4)

import itertools

import numpy as np
import pytest

from megatron_kd.data.prepare.packing import DocumentSlice, assemble, best_fit, cut
from megatron_kd.data.prepare.split import validation_documents


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 15, 16, 17, 40, 41])
def test_split_predicts_every_token_once(length):
    limit = 9
    pieces = cut(7, length, limit, "split")
    assert all(2 <= len(p) <= limit and p.document == 7 for p in pieces)
    predicted = [t for p in pieces for t in range(p.start + 1, p.end)]
    assert predicted == list(range(1, length))


def test_overlong_rules():
    assert cut(0, 9, 9, "drop") == cut(0, 9, 9, "truncate") == [DocumentSlice(0, 0, 9)]
    assert cut(0, 10, 9, "drop") == []
    assert cut(0, 10, 9, "truncate") == [DocumentSlice(0, 0, 9)]
    assert cut(0, 10, 9, "split") == [DocumentSlice(0, 0, 9), DocumentSlice(0, 8, 10)]
    assert cut(0, 1, 9, "split") == cut(0, 0, 9, "split") == []


def reference_best_fit(lengths, capacity):
    """The definition: longest first into the fullest bin with room, else a new one."""
    bins = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        open_bins = [b for b in bins if sum(lengths[i] for i in b) + lengths[item] <= capacity]
        if open_bins:
            max(open_bins, key=lambda b: sum(lengths[i] for i in b)).append(item)
        else:
            bins.append([item])
    return bins


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_is_best_fit(seed):
    random = np.random.default_rng(seed)
    capacity = int(random.integers(5, 60))
    lengths = random.integers(1, capacity + 1, size=int(random.integers(0, 120))).tolist()
    bins = best_fit(lengths, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    loads = sorted(sum(lengths[i] for i in b) for b in bins)
    assert all(load <= capacity for load in loads)
    want = sorted(sum(lengths[i] for i in b) for b in reference_best_fit(lengths, capacity))
    assert loads == want
    assert bins == sorted(sorted(b) for b in bins)


def test_assemble_keeps_pieces_apart_or_not():
    first = (np.array([1, 2, 3], np.int32), np.array([1, 1, 1], bool))
    second = (np.array([4, 5], np.int32), np.array([1, 0], bool))
    third = (np.array([6, 7, 8], np.int32), np.array([0, 1, 1], bool))
    tokens, mask, bounds = assemble([first, second, third], packing="block")
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert bounds.tolist() == [0, 3, 5, 8] and bounds.dtype == np.int32
    #                       1→2   2→3    3→4    4→5    5→6   6→7   7→8
    assert mask.tolist() == [True, True, False, False, False, True, True, False]
    tokens, mask, bounds = assemble([first, second, third], packing="naive")
    assert bounds.tolist() == [0, 8]
    assert mask.tolist() == [True, True, True, False, False, True, True, False]
    _, mask, bounds = assemble([first], packing="none")
    assert mask.tolist() == [True, True, False] and bounds.tolist() == [0, 3]


def digests(*names):
    return [name.encode().ljust(16) for name in names]


def test_copies_are_never_on_both_sides():
    random = np.random.default_rng(0)
    names = [f"document {i}" for i in random.integers(0, 50, size=400)]
    lengths = [10 + int(name.split()[1]) for name in names]
    held_out = validation_documents(digests(*names), lengths, fraction=0.2, seed=3)
    sides = {name: set() for name in names}
    for name, side in zip(names, held_out, strict=True):
        sides[name].add(bool(side))
    assert all(len(side) == 1 for side in sides.values())
    share = sum(n for n, out in zip(lengths, held_out, strict=True) if out) / sum(lengths)
    assert abs(share - 0.2) < 0.03


def test_the_split_follows_content_and_seed_not_place():
    names = [f"document {i}" for i in range(200)]
    lengths = [20 + i % 7 for i in range(200)]
    order = np.random.default_rng(1).permutation(200)
    straight = validation_documents(digests(*names), lengths, fraction=0.1, seed=5)
    shuffled = validation_documents(
        digests(*(names[i] for i in order)), [lengths[i] for i in order], fraction=0.1, seed=5
    )
    assert np.array_equal(straight[order], shuffled)
    other = validation_documents(digests(*names), lengths, fraction=0.1, seed=6)
    assert not np.array_equal(straight, other)


def test_both_sides_get_something():
    assert validation_documents(digests("a", "b"), [100, 1], fraction=0.01, seed=0).sum() == 1
    assert validation_documents(digests("a", "b"), [100, 90], fraction=0.05, seed=0).sum() == 1
    assert validation_documents(digests("a", "b", "c"), [5, 5, 5], fraction=0.99, seed=0).sum() == 2
    assert not validation_documents(digests("a", "b"), [1, 1], fraction=0.0, seed=0).any()


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0, float("nan")])
def test_impossible_fractions(fraction):
    with pytest.raises(ValueError, match="--validation-fraction"):
        validation_documents(digests("a", "b"), [1, 1], fraction=fraction, seed=0)


def test_one_document_cannot_be_split():
    with pytest.raises(ValueError, match="1 distinct documents"):
        validation_documents(digests("a", "a"), [5, 5], fraction=0.5, seed=0)

"""How documents fill sequences of at most `limit` tokens (the sequence length and one).

Documents too long for a sequence are cut first, so that only whole pieces are placed; pieces are
packed best fit, longest first. Letters: m tokens of a document, n tokens of a sequence.
"""

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OVERLONG = ("split", "truncate", "drop")


@dataclass(frozen=True)
class DocumentSlice:
    """Tokens start to end (half-open) of one document."""

    document: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def cut(document: int, length: int, limit: int, overlong: str) -> list[DocumentSlice]:
    """The pieces of a document of `length` tokens.

    "split" makes consecutive pieces that share one token, so that every token but the document's
    first is predicted exactly once; "truncate" keeps the beginning; "drop" keeps what fits.
    """
    if length < 2:  # nothing to predict
        return []
    if length <= limit:
        return [DocumentSlice(document, 0, length)]
    if overlong == "drop":
        return []
    if overlong == "truncate":
        return [DocumentSlice(document, 0, limit)]
    step = limit - 1
    return [
        DocumentSlice(document, start, min(start + limit, length))
        for start in range(0, length - 1, step)
    ]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing.

    Args:
        lengths: Length of each item, each from 1 to `capacity`.
        capacity: What a bin holds.

    Returns:
        The items of each bin, ascending; bins in the order of their first item. The result depends
        on `lengths` and `capacity` alone.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)  # free tokens → bins, the latest last
    rooms: list[int] = []  # the keys of by_room that are not empty, ascending
    for item in order.tolist():
        length = int(lengths[item])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            chosen, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(place)
        bins[chosen].append(item)
        left = room - length
        if left:
            if not by_room[left]:
                bisect.insort(rooms, left)
            by_room[left].append(chosen)
    return sorted(sorted(items) for items in bins)


def assemble(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], *, packing: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One sequence from the pieces that share it.

    Args:
        parts: For each piece its tokens [m] and `wanted` [m]: whether predicting tokens[j] is
            trained.
        packing: "none" and "block" keep pieces apart: nothing predicts a piece's first token.
            "naive" lets all pieces be one text: a piece's last token predicts the next one's first.

    Returns:
        (tokens [n] int32, loss_mask [n] bool, cu_seqlens [documents + 1] int32). Row t of the mask
        stands for predicting tokens[t + 1]. With "naive" cu_seqlens has one document.
    """
    tokens = np.concatenate([tokens for tokens, _ in parts])
    wanted = np.concatenate([wanted for _, wanted in parts])
    bounds = np.cumsum([0] + [len(tokens) for tokens, _ in parts])
    if packing == "naive":
        bounds = bounds[[0, -1]]
    loss_mask = np.zeros(len(tokens), bool)
    loss_mask[:-1] = wanted[1:]
    loss_mask[bounds[1:] - 1] = False
    return tokens, loss_mask, bounds.astype(np.int32)

"""Which documents validate: whole ones, copies together, chosen by a hash of their content."""

import hashlib
from collections.abc import Sequence

import numpy as np


def validation_documents(
    digests: Sequence[bytes], lengths: Sequence[int], *, fraction: float, seed: int
) -> np.ndarray:
    """Marks the documents held out for validation.

    Distinct contents are put in an order that depends on `seed` and on the content alone; from its
    start those are taken that bring the held-out tokens closer to `fraction` of all tokens. Copies
    of a document go where it goes, so nothing validated is trained on, and where a document stands
    in the input makes no difference.

    Args:
        digests: Content hash of each document.
        lengths: Tokens of each document.
        fraction: Share of all tokens to hold out, from 0 (none) to below 1.
        seed: Chooses another order.

    Returns:
        [documents] bool.

    Raises:
        ValueError: `fraction` is out of range, or there are too few distinct documents to split.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"--validation-fraction must lie from 0 to below 1, got {fraction}")
    if fraction == 0:
        return np.zeros(len(digests), bool)
    tokens_of: dict[bytes, int] = {}
    for digest, length in zip(digests, lengths, strict=True):
        tokens_of[digest] = tokens_of.get(digest, 0) + int(length)
    if len(tokens_of) < 2:
        raise ValueError(
            f"{len(tokens_of)} distinct documents cannot be split into training and validation; "
            "give more documents, or --validation-fraction 0 and other data for validation"
        )
    key = str(seed).encode()
    order = sorted(tokens_of, key=lambda d: hashlib.blake2b(d, digest_size=16, key=key).digest())
    target, taken, chosen = fraction * sum(tokens_of.values()), 0, set()
    for digest in order:
        with_it = taken + tokens_of[digest]
        if abs(with_it - target) < abs(taken - target):
            taken = with_it
            chosen.add(digest)
    if not chosen:  # every document alone is more than twice the share asked for
        chosen.add(min(order, key=tokens_of.__getitem__))
    if len(chosen) == len(order):
        chosen.remove(max(order, key=tokens_of.__getitem__))
    return np.asarray([digest in chosen for digest in digests])

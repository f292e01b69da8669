"""Which tokens a range of a text's characters became. m: tokens of the text."""

import numpy as np


def encode_with_offsets(tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a text and the characters that each of them stands for.

    The tokens are those of tokenizer(text, add_special_tokens=False). The offsets are not: a
    post-processor that trims them gives a token of white space none at all, so they are
    taken without it; and a control token that swallows the white space beside it (Phi-3's
    <|end|>) stands for its own characters alone.

    Returns:
        (tokens [m] int32, offsets [m, 2] int64 half-open).
    """
    core = tokenizer.backend_tokenizer
    post_processor = core.post_processor
    core.post_processor = None
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    finally:
        core.post_processor = post_processor
    tokens = np.asarray(encoded["input_ids"], np.int32)
    offsets = np.asarray(encoded["offset_mapping"], np.int64)
    offsets = offsets.reshape(-1, 2)  # without tokens the list is flat
    added = [
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if (token.lstrip or token.rstrip) and token.content.strip()
    ]
    for place in np.flatnonzero(np.isin(tokens, added)):
        start, end = offsets[place]
        part = text[start:end]
        offsets[place, 0] = end - len(part.lstrip())
        offsets[place, 1] = start + len(part.rstrip())
    return tokens, offsets


def tokens_within(offsets: np.ndarray, start: int, end: int) -> np.ndarray:
    """[m] bool: tokens that stand for characters of the range alone, from start to end (half-open).

    A token that stands for no character counts where it lies: at the range's end no longer.
    """
    return (offsets[:, 0] >= start) & (offsets[:, 0] < end) & (offsets[:, 1] <= end)


def tokens_touching(offsets: np.ndarray, start: int, end: int) -> np.ndarray:
    """[m] bool: tokens that stand for any character of the range from start to end (half-open)."""
    if start >= end:
        return np.zeros(len(offsets), bool)
    overlap = (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return overlap | tokens_within(offsets, start, end)

"""The compact code of top-K rows: ids as a set by Elias-Fano, log-probabilities by a Rice code on a
fixed grid.

Why these: K ids out of V need about log2(V/K) + 1.44 bits each as a set and 17 as a list; most of K
candidates lie close above the row's smallest one, so their distance from it is small, and a Rice
code (r low bits, the rest in unary) needs some 9 bits where a fixed width needs 11. A grid fixed in
nats bounds the error for every row, whatever its range.

Letters: R rows, k candidates of a row, E the sum of k over the rows, V vocabulary; q a candidate's
code, -log p / STEP_NATS rounded; b the row's largest code; e = b - q. The layout is described, bit
by bit, in docs/cache-format.md.
"""

import math
from collections.abc import Mapping

import numpy as np

from megatron_kd.cache.codecs.base import Codec, RowEntries, RowSpec
from megatron_kd.files import TensorLayout

STEP_NATS = 5 / 512  # a binary fraction: q * STEP_NATS is exact in fp32, the error at most 5/1024
MAX_CODE = 61440  # 600 nats: smaller probabilities are stored as e^-600, which is 0 in fp32
BLOCK_ROWS = 256  # rows decoded at a time, so that the passes over them stay in the core's cache
MAX_VALUE_LOW = 16  # more low bits than any code has
FIXED = 0x80  # flag in `layout`: this row's e has no unary part
# Share of the mass from which a row's first candidate is known better from the mass than from its
# code, and the mass below which half precision is too coarse for that.
TOP_SHARE = 2 / 3
MIN_MASS = 2.0**-13
ID_SET_BITS = 1.44  # a candidate of a set takes these beside log2(V / K)
VALUE_BITS = 9.0  # of a candidate's e, on average over a language model's rows


class Compact(Codec):
    """Sets of ids and a Rice code of log-probabilities: the smallest, at some cost in speed."""

    groups = {
        "mass": "mass",
        "bottom": "row headers",
        "layout": "row headers",
        "stream": "ids and log-probabilities",
    }
    pointers = {"stream_offsets": "stream_bytes"}

    def tensors(self, spec: RowSpec) -> dict[str, TensorLayout]:
        return {
            "mass": ("F16", ("R",)),
            "bottom": ("U16", ("R",)),
            "layout": ("U8", ("R",)),
            "high_bytes": ("U32", ("S",)),
            "stream": ("U8", ("stream_bytes",)),
        }

    def encode(self, rows: RowEntries, spec: RowSpec) -> dict[str, np.ndarray]:
        if rows.counts.size:
            bottom, layout, stream, high_bytes = encode(
                rows.ids, rows.logprobs, rows.counts, spec.vocab_size
            )
        else:
            bottom, layout = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
            stream, high_bytes = np.zeros(0, np.uint8), 0
        return {
            "mass": code_mass(rows.mass).astype("<f2"),
            "bottom": bottom.astype("<u2"),
            "layout": layout,
            "high_bytes": np.array([high_bytes], "<u4"),
            "stream": stream,
        }

    def decode(
        self, parts: Mapping[str, np.ndarray], counts: np.ndarray | None, spec: RowSpec
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mass = decode_mass(parts["mass"])
        ids, logprobs = decode(
            parts["stream"],
            int(parts["high_bytes"][0]),
            parts["bottom"],
            parts["layout"],
            counts,
            mass,
            spec.vocab_size,
            spec.topk,
        )
        return ids, logprobs, mass

    def mass(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        return decode_mass(tensors["mass"])

    def bytes_per_position(self, vocab_size: int, topk: int) -> float:
        id_bits = max(0.0, math.log2(vocab_size / topk)) + ID_SET_BITS
        return topk * (id_bits + VALUE_BITS) / 8 + 5  # mass, bottom and layout


def low_bits(counts: np.ndarray, vocab_size: int) -> np.ndarray:
    """[R] int64: how many low bits of each id a row of that many ids stores plainly."""
    ratio = np.maximum(vocab_size // counts, 1)
    return (np.frexp(ratio)[1] - 1).astype(np.int64)  # floor(log2(ratio))


def code_mass(mass: np.ndarray) -> np.ndarray:
    """[R] fp64 in [0, 1] to [R] fp16: 1 - mass, or -mass where that is the smaller of the two."""
    small = np.where(mass > 0.5, 1.0 - mass, -mass)
    coded = small.astype(np.float16)
    coded[(mass <= 0.5) & (coded == 0)] = np.float16(-0.0)
    return coded


def decode_mass(coded: np.ndarray) -> np.ndarray:
    """[R] fp16 to [R] fp32; the sign bit says which side was stored."""
    value = coded.astype(np.float32)
    return np.where(np.signbit(value), -value, 1.0 - value).astype(np.float32)


def encode(ids, logprobs, counts, vocab_size):
    """Packs the rows of one sample.

    Args:
        ids: [E] int64, ascending and distinct within each row.
        logprobs: [E] fp64, nats, ≤ 0, in the order of ids.
        counts: [R] int64, ≥ 1: entries per row.

    Returns:
        (bottom [R] uint16, layout [R] uint8, stream uint8, high_bytes: length of the stream's
        second part)
    """
    starts = np.cumsum(counts) - counts
    row = np.repeat(np.arange(counts.size), counts)
    code = np.minimum(np.rint(-logprobs / STEP_NATS), MAX_CODE).astype(np.int64)
    bottom = np.maximum.reduceat(code, starts)
    excess = bottom[row] - code  # [E] e

    # r of each row: the cheapest near the one for a geometric e of this mean, or no unary part
    widest = _bit_length(np.maximum.reduceat(excess, starts))
    best_bits = counts * widest
    layout = widest | FIXED
    guess = _bit_length((np.add.reduceat(excess, starts) * 0.69 / counts).astype(np.int64))
    for offset in (0, -1, 1):
        r = np.clip(guess + offset, 0, widest)
        bits = counts * (r + 1) + np.add.reduceat(excess >> r[row], starts)
        better = bits < best_bits
        best_bits = np.where(better, bits, best_bits)
        layout = np.where(better, r, layout)

    value_low = layout & 0x1F
    id_low = low_bits(counts, vocab_size)
    field = ((excess & ((1 << value_low) - 1)[row]) << id_low[row]) | (
        ids & ((1 << id_low) - 1)[row]
    )
    packed = _pack(field.astype(np.uint64), (value_low + id_low)[row])
    high = ids >> id_low[row]
    gap = high - np.where(np.arange(ids.size) == starts[row], 0, np.roll(high, 1))
    id_unary = _unary(gap)
    unary_entries = (layout < FIXED)[row]
    value_unary = _unary((excess >> value_low[row])[unary_entries])
    stream = np.concatenate([packed, id_unary, value_unary])
    return bottom.astype(np.uint16), layout.astype(np.uint8), stream, id_unary.size


def decode(stream, high_bytes, bottom, layout, counts, mass, vocab_size, topk):
    """The rows of one sample, in falling probability, ties by rising id.

    Args:
        stream: [bytes] uint8; high_bytes: int.
        bottom: [R] uint16; layout: [R] uint8; mass: [R] fp32.
        counts: [R] int64 entries per row, or None where every row has topk.

    Returns:
        (ids [R, K] int32, logprobs [R, K] fp32); -1 and -inf in unused slots, which come last.

    Raises:
        ValueError: The stream does not hold such rows.
    """
    rows = bottom.size
    out_ids = np.empty((rows, topk), np.int32)
    out_logprobs = np.empty((rows, topk), np.float32)
    if not rows:
        return out_ids, out_logprobs
    ragged = counts is not None and bool((counts != topk).any())
    per_row = counts if ragged else np.full(rows, topk)
    id_low = low_bits(per_row, vocab_size)
    value_low = (layout & 0x1F).astype(np.int64)
    row_bits = (value_low + id_low) * per_row
    packed_bytes = (int(row_bits.sum()) + 7) >> 3
    if packed_bytes + high_bytes > stream.size or int(value_low.max()) > MAX_VALUE_LOW:
        raise ValueError("rows are longer than their bytes")
    padded = np.zeros(packed_bytes + 8, np.uint8)
    padded[:packed_bytes] = stream[:packed_bytes]
    unary_entries = np.where(layout < FIXED, per_row, 0)
    entry_at, unary_at, bit_at = (
        np.concatenate([[0], np.cumsum(sizes)]) for sizes in (per_row, unary_entries, row_bits)
    )
    id_ones = _ones(stream[packed_bytes : packed_bytes + high_bytes], int(entry_at[-1]))
    value_ones = _ones(stream[packed_bytes + high_bytes :], int(unary_at[-1]))
    for begin in range(0, rows, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, rows)
        block = slice(begin, end)
        out_ids[block], out_logprobs[block] = _decode_block(
            padded=padded[bit_at[begin] >> 3 : (bit_at[end] + 7 >> 3) + 8],
            first_bit=(bit_at[begin:end] - (bit_at[begin] & ~7)).astype(np.int32),
            high=_high_parts(id_ones, entry_at[begin : end + 1]),
            unary=_gaps(value_ones, int(unary_at[begin]), int(unary_at[end])),
            plain=layout[block] < FIXED,
            id_low=id_low[block].astype(np.int32),
            value_low=value_low[block].astype(np.int32),
            bottom=bottom[block].astype(np.int32),
            per_row=per_row[block] if ragged else None,
            vocab_size=vocab_size,
            topk=topk,
        )
        _restore_top(out_logprobs[block], mass[block])
    return out_ids, out_logprobs


def _decode_block(
    *, padded, first_bit, high, unary, plain, id_low, value_low, bottom, per_row, vocab_size, topk
):
    """Some rows of a sample. per_row is None where all have topk entries."""
    rows = first_bit.size
    if per_row is None:
        shape = (rows, topk)
        within = np.arange(topk, dtype=np.int32)[None]
        last = np.arange(topk - 1, rows * topk, topk)

        def spread(values):  # [R] to [R, 1], against [R, K]
            return values[:, None]
    else:
        shape = (int(per_row.sum()),)
        last = np.cumsum(per_row) - 1
        within = np.arange(shape[0], dtype=np.int32) - np.repeat(last - per_row + 1, per_row)
        within = within.astype(np.int32)

        def spread(values):  # [R] to [E]
            return np.repeat(values, per_row)

    width = value_low + id_low
    field = _fields(padded, spread(first_bit) + within * spread(width), int(width.max()))
    if (high[last] > (vocab_size - 1) >> id_low).any():  # the largest of each row
        raise ValueError("an id is out of range")
    ids = high.reshape(shape) << spread(id_low)
    ids |= (field & spread((1 << id_low) - 1)).astype(np.int32, copy=False)
    excess = (field >> spread(id_low)).astype(np.int32) & spread((1 << value_low) - 1)
    if unary.size and int(unary.max()) << int(value_low.max()) >= 1 << 30:
        raise ValueError("a log-probability is out of range")
    if plain.all():
        excess += unary.reshape(shape) << spread(value_low)
    elif plain.any():
        coded = np.broadcast_to(spread(plain), shape)
        excess[coded] += unary << np.broadcast_to(spread(value_low), shape)[coded]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or (excess > spread(bottom)).any():
        raise ValueError("an id or a log-probability is out of range")

    # one integer sort does the order: e falls with the probability, the id breaks ties
    id_bits = max(int(vocab_size - 1).bit_length(), 1)
    top = int(excess.max())
    key_type = np.uint32 if top.bit_length() + id_bits <= 31 else np.uint64
    key = (top - excess).astype(key_type)
    key <<= key_type(id_bits)
    key |= ids.astype(key_type)
    if per_row is not None:
        slots = np.arange(topk) < per_row[:, None]
        flat, key = key, np.full((rows, topk), np.iinfo(key_type).max, key_type)
        key[slots] = flat
    key.sort(axis=1)
    out_ids = (key & key_type((1 << id_bits) - 1)).astype(np.int32)
    key >>= key_type(id_bits)
    logprobs = key.astype(np.float32)
    logprobs += (bottom - top).astype(np.float32)[:, None]  # q, exact in fp32
    logprobs *= np.float32(-STEP_NATS)
    logprobs += np.float32(0)  # -0 to 0
    if per_row is not None:
        out_ids[~slots] = -1
        logprobs[~slots] = -np.inf
    return out_ids, logprobs


def _fields(padded: np.ndarray, bit: np.ndarray, widest: int) -> np.ndarray:
    """The bits from each given one on, `widest` or more, in integers. padded: 8 bytes too many."""
    window = np.dtype("<u4") if widest <= 25 else np.dtype("<u8")
    # a window from every byte on, overlapping
    windows = np.ndarray((padded.size - 7,), window, padded.data, strides=(1,))
    found = windows[bit >> 3]
    found >>= (bit & 7).astype(window)
    return found.view(np.int32 if window.itemsize == 4 else np.int64)


def _high_parts(ones: np.ndarray, entry_at: np.ndarray) -> np.ndarray:
    """The zero bits before each entry's one, since the row before ended. int32."""
    first, end = int(entry_at[0]), int(entry_at[-1])
    zeros = ones[first:end] - np.arange(first, end)
    base = ones[entry_at[:-1] - 1] - (entry_at[:-1] - 1)  # at the last entry of the row before
    if first == 0:
        base[0] = 0
    return (zeros - np.repeat(base, np.diff(entry_at))).astype(np.int32)


def _gaps(ones: np.ndarray, first: int, end: int) -> np.ndarray:
    """The zero bits right before each of some ones. int32."""
    before = ones[first - 1] if first else -1
    return (np.diff(ones[first:end], prepend=before) - 1).astype(np.int32)


def _restore_top(logprobs: np.ndarray, mass: np.ndarray) -> None:
    """A candidate that holds most of the mass is known better from the mass and the others."""
    if not logprobs.size:
        return
    chosen = np.flatnonzero((np.exp(logprobs[:, 0]) >= TOP_SHARE * mass) & (mass >= MIN_MASS))
    others = np.exp(logprobs[chosen, 1:]).sum(axis=1, dtype=np.float64)
    top = np.log(np.maximum(mass[chosen] - others, 1e-300))
    close = np.abs(top - logprobs[chosen, 0]) <= STEP_NATS  # holds for every row an encoder wrote
    floor = logprobs[chosen, 1] if logprobs.shape[1] > 1 else np.full(chosen.size, -np.inf)
    logprobs[chosen, 0] = np.where(close, np.maximum(top, floor), logprobs[chosen, 0])


def _bit_length(values: np.ndarray) -> np.ndarray:
    return np.frexp(values)[1].astype(np.int64)


def _pack(field: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Fields of given widths, one after the other, least significant bit first. Returns bytes."""
    end = np.cumsum(width)
    total = int(end[-1]) if end.size else 0
    if not total:
        return np.zeros(0, np.uint8)
    begin = end - width
    word, shift = begin >> 6, (begin & 63).astype(np.uint64)
    words = np.zeros((total >> 6) + 2, np.uint64)
    heads = np.flatnonzero(np.diff(word, prepend=-1))
    # Fields are disjoint, so that adding them is or-ing them.
    words[word[heads]] = np.add.reduceat(field << shift, heads)
    spill = (begin & 63) + width > 64  # at most one field leaves each word
    words[word[spill] + 1] |= field[spill] >> (np.uint64(64) - shift[spill])
    return words.astype("<u8").view(np.uint8)[: (total + 7) >> 3]


def _unary(values: np.ndarray) -> np.ndarray:
    """Each value as that many zero bits and a one. Returns bytes."""
    ones = np.cumsum(values + 1) - 1
    bits = np.zeros(int(ones[-1]) + 1 if ones.size else 0, np.uint8)
    bits[ones] = 1
    return np.packbits(bits, bitorder="little")


def _ones(stream: np.ndarray, expected: int) -> np.ndarray:
    ones = np.flatnonzero(np.unpackbits(stream, bitorder="little").view(bool))
    if ones.size != expected:
        raise ValueError(f"{expected} entries expected, {ones.size} found")
    return ones

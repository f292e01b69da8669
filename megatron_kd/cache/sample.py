"""One sample on its way into a shard: checked, put in order, packed.

Letters: n tokens, R supervised rows, K candidates, D hidden size.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_kd.cache.codecs import CODECS, RowEntries
from megatron_kd.cache.codecs.base import LARGEST_HALF
from megatron_kd.cache.format import MAX_SAMPLE_SLOTS, CacheError, CacheSpec, token_hash
from megatron_kd.cache.shard import pack_tokens, to_bfloat16

POSITIVE_NATS = 1e-3  # log-probabilities up to here are rounding, and become 0
LABEL_NATS = 1e-2  # what rounding may put between a token's two log-probabilities in one row
MASS_TOLERANCE = 5e-3  # what half precision and bfloat16 rows may exceed 1 by


@dataclass(frozen=True)
class Sample:
    """A sample that was found good."""

    tokens: np.ndarray  # [n] int32
    loss_mask: np.ndarray  # [n] bool
    cu_seqlens: np.ndarray  # [documents + 1] int32
    rows: RowEntries
    log_z: list[np.ndarray]  # each [R] fp32
    hidden: np.ndarray | None  # [R, D] fp32, or fp16 where that is what is stored
    label_logprob: np.ndarray | None = None  # [R] fp32


def as_array(value, what: str, where: str, kinds: str) -> np.ndarray:
    """A numpy view of numpy or torch input whose dtype kind is among `kinds`."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in kinds:
        names = {"iu": "integers", "f": "floating point", "iub": "bool or integers"}
        raise CacheError(f"{where}: {what} must be {names[kinds]}, got {array.dtype}")
    return array


def check_sample(
    spec,
    where,
    tokens,
    loss_mask,
    topk_ids,
    topk_logprobs,
    *,
    cu_seqlens=None,
    log_z=None,
    hidden=None,
    label_logprob=None,
) -> Sample:
    """Refuses what is no sequence with truncated teacher rows. Arguments: `SampleWriter.append`."""
    tokens = as_array(tokens, "tokens", where, "iu")
    if tokens.ndim != 1 or not 1 <= tokens.size < 1 << 31:
        raise CacheError(f"{where}: tokens must be [n] with n ≥ 1, got shape {tokens.shape}")
    if tokens.size * spec.topk > MAX_SAMPLE_SLOTS:
        raise CacheError(
            f"{where}: {tokens.size} tokens of {spec.topk} candidates; a sample holds at most "
            f"{MAX_SAMPLE_SLOTS} slots: cut the text, or keep fewer candidates"
        )
    if tokens.min() < 0 or tokens.max() >= spec.vocab_size:
        raise CacheError(
            f"{where}: tokens must lie in [0, {spec.vocab_size}), "
            f"got {tokens.min()} to {tokens.max()}"
        )
    mask = as_array(loss_mask, "loss_mask", where, "iub")
    if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
        raise CacheError(
            f"{where}: loss_mask must be {tokens.shape} of 0 and 1, got {mask.shape} {mask.dtype}"
        )
    mask = mask.astype(bool)
    if mask[-1]:
        raise CacheError(
            f"{where}: the last position is supervised, but no token follows it; "
            "set loss_mask[-1] to 0"
        )
    take = _row_taker(mask, where)
    ids = take(as_array(topk_ids, "topk_ids", where, "iu"), "topk_ids", (spec.topk,))
    logprobs = take(
        as_array(topk_logprobs, "topk_logprobs", where, "f"), "topk_logprobs", (spec.topk,)
    )
    positions = np.flatnonzero(mask)
    rows = _check_rows(spec, where, positions, ids, logprobs)
    labels = tokens[positions + 1]
    return Sample(
        tokens=tokens.astype(np.int32),
        loss_mask=mask,
        cu_seqlens=_check_documents(cu_seqlens, tokens.size, where),
        rows=rows,
        log_z=_check_log_z(spec, where, log_z, take),
        hidden=_check_hidden(spec, where, hidden, take),
        label_logprob=_check_label(spec, where, label_logprob, take, labels, ids, logprobs),
    )


def _row_taker(mask: np.ndarray, where: str):
    rows = int(mask.sum())

    def take(array: np.ndarray, what: str, tail: tuple) -> np.ndarray:
        if array.shape == (mask.size, *tail):
            return array[mask]
        if array.shape == (rows, *tail):
            return array
        raise CacheError(
            f"{where}: {what} must be {(mask.size, *tail)}, or {(rows, *tail)} for the supervised "
            f"rows alone; got {array.shape}"
        )

    return take


def _check_rows(spec: CacheSpec, where: str, positions, ids, logprobs) -> RowEntries:
    def refuse(rows, why):  # rows: [R] bool, the bad ones
        row = int(np.flatnonzero(rows)[0])
        raise CacheError(f"{where}, position {positions[row]}: {why(row)}")

    ids, logprobs = ids.astype(np.int64), logprobs.astype(np.float64)
    outside = (ids < -1) | (ids >= spec.vocab_size)
    if outside.any():
        refuse(
            outside.any(axis=1),
            lambda row: (
                f"id {ids[row][outside[row]][0]} is outside the vocabulary of {spec.vocab_size}"
            ),
        )
    wrong = np.isnan(logprobs) | (logprobs > POSITIVE_NATS)
    if wrong.any():
        refuse(
            wrong.any(axis=1),
            lambda row: (
                f"{logprobs[row][wrong[row]][0]} is not a log-probability (nats, at most 0)"
            ),
        )
    wrong = (ids < 0) & (logprobs > -np.inf)
    if wrong.any():
        refuse(
            wrong.any(axis=1), lambda row: "an unused slot (id -1) must have log-probability -inf"
        )
    used = logprobs > -np.inf  # a candidate of probability 0 is no candidate
    counts = used.sum(axis=1)
    if (counts == 0).any():
        refuse(counts == 0, lambda row: "supervised, but the teacher's row is empty")
    key = np.where(used, ids, spec.vocab_size) << 32 | np.arange(spec.topk)
    key.sort(axis=1)  # much faster than an argsort
    order = key & 0xFFFFFFFF
    ids, logprobs = np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)
    used = np.take_along_axis(used, order, 1)
    twice = (ids[:, 1:] == ids[:, :-1]) & used[:, 1:]
    if twice.any():
        refuse(
            twice.any(axis=1),
            lambda row: (
                f"id {ids[row, 1:][twice[row]][0]} occurs twice; candidates must be distinct"
            ),
        )
    logprobs = np.minimum(logprobs, 0.0)
    mass = np.exp(logprobs).sum(axis=1)  # exp(-inf) is 0 in unused slots
    if (mass > 1 + MASS_TOLERANCE).any():
        refuse(
            mass > 1 + MASS_TOLERANCE,
            lambda row: (
                f"probabilities sum to {mass[row]:.4f}; they need the full-vocabulary normalizer"
            ),
        )
    return RowEntries(counts, ids[used], logprobs[used], np.minimum(mass, 1.0))


def _check_documents(cu_seqlens, length: int, where: str) -> np.ndarray:
    if cu_seqlens is None:
        return np.array([0, length], np.int32)
    bounds = as_array(cu_seqlens, "cu_seqlens", where, "iu").astype(np.int64)
    ends_ok = bounds.ndim == 1 and bounds.size >= 2 and bounds[0] == 0 and bounds[-1] == length
    if not ends_ok or (np.diff(bounds) < 1).any():
        raise CacheError(
            f"{where}: cu_seqlens must rise strictly from 0 to {length}, got {bounds.ravel()[:8]}…"
        )
    return bounds.astype(np.int32)


def _check_log_z(spec: CacheSpec, where: str, log_z, take) -> list[np.ndarray]:
    given = {float(tau): value for tau, value in (log_z or {}).items()}
    if set(given) != set(spec.temperatures):
        raise CacheError(
            f"{where}: log_z must come for the temperatures {list(spec.temperatures)}, "
            f"got {sorted(given)}"
        )
    columns = []
    for tau in spec.temperatures:
        column = take(as_array(given[tau], f"log_z[{tau}]", where, "f"), f"log_z[{tau}]", ())
        if not np.isfinite(column).all():
            raise CacheError(f"{where}: log_z[{tau}] has values that are not finite")
        columns.append(column.astype("<f4"))
    return columns


def _check_hidden(spec: CacheSpec, where: str, hidden, take) -> np.ndarray | None:
    if (hidden is not None) != bool(spec.hidden_size):
        raise CacheError(
            f"{where}: this cache has hidden_size {spec.hidden_size}, hidden states "
            f"{'came' if hidden is not None else 'are missing'}"
        )
    if hidden is None:
        return None
    rows = take(as_array(hidden, "hidden", where, "f"), "hidden", (spec.hidden_size,))
    if not np.isfinite(rows).all():
        raise CacheError(
            f"{where}: hidden states have values that are not finite (beyond "
            "float16? then use hidden_dtype bfloat16)"
        )
    if spec.hidden_dtype == "bfloat16":
        return to_bfloat16(rows)
    if spec.hidden_dtype == "float16" and rows.size and np.abs(rows).max() > LARGEST_HALF:
        raise CacheError(
            f"{where}: hidden states exceed float16; use hidden_dtype bfloat16 or float32"
        )
    return rows.astype("<f2" if spec.hidden_dtype == "float16" else "<f4")


def _check_label(spec: CacheSpec, where: str, given, take, labels, ids, logprobs):
    if (given is not None) != spec.label_logprob:
        came = "came" if given is not None else "is missing"
        raise CacheError(
            f"{where}: this cache has label_logprob {str(spec.label_logprob).lower()}, and the "
            f"label's log-probability {came}"
        )
    if given is None:
        return None
    column = take(as_array(given, "label_logprob", where, "f"), "label_logprob", ())
    if np.isnan(column).any() or (column > POSITIVE_NATS).any():
        raise CacheError(f"{where}: label_logprob has values that are no log-probabilities")
    if spec.sampling_method == "topk":  # of draws the candidates' weights are shares
        found = np.asarray(ids) == labels[:, None]
        row = found.any(axis=1)
        candidates = np.where(found, logprobs, 0.0).sum(axis=1)[row]
        if (np.abs(candidates - column[row]) > LABEL_NATS).any():
            raise CacheError(
                f"{where}: label_logprob differs from the same token's among the candidates: the "
                "rows belong to another position, or to another teacher"
            )
    return np.minimum(column, 0.0).astype("<f4")


@dataclass
class ShardBuffer:
    """The samples of one shard, already packed."""

    spec: CacheSpec
    samples: int = 0
    positions: int = 0
    _parts: dict[str, list] = field(default_factory=dict)
    _counts: list[np.ndarray] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        self.samples += 1
        self.positions += sample.rows.counts.size
        self._counts.append(sample.rows.counts)
        parts = {
            "token_hash": np.array([token_hash(sample.tokens.astype("<i4").tobytes())], "<u8"),
            "tokens": pack_tokens(sample.tokens, self.spec),
            "loss_mask": np.packbits(sample.loss_mask, bitorder="little"),
            "cu_seqlens": sample.cu_seqlens.astype("<i4"),
            "row_size": sample.rows.counts.size,
            **CODECS[self.spec.codec].encode(sample.rows, self.spec),
            **{f"log_z.{index}": column for index, column in enumerate(sample.log_z)},
        }
        if sample.hidden is not None:
            parts["hidden"] = sample.hidden
        if sample.label_logprob is not None:
            parts["label_logprob"] = sample.label_logprob
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)

    def tensors(self) -> dict[str, np.ndarray]:
        """Everything a shard file holds."""
        parts = self._parts
        tensors = {
            name: np.concatenate(arrays) for name, arrays in parts.items() if name != "row_size"
        }
        for pointer, source in self._pointed.items():
            tensors[pointer] = _offsets([array.shape[0] for array in parts[source]])
        tensors["row_offsets"] = _offsets(parts["row_size"])
        counts = np.concatenate(self._counts)
        if (counts != self.spec.topk).any():
            tensors["counts"] = counts.astype("<u4")
        return tensors

    @property
    def _pointed(self) -> dict[str, str]:
        """Name of a tensor of offsets: a tensor whose parts it bounds."""
        codec = CODECS[self.spec.codec]
        lengths = {shape[0]: name for name, (_, shape) in codec.tensors(self.spec).items()}
        own = {pointer: lengths[length] for pointer, length in codec.pointers.items()}
        return {"token_offsets": "tokens", "document_offsets": "cu_seqlens"} | own


def _offsets(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype("<u8")

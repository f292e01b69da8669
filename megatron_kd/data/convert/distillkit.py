"""DistillKit's captured teacher distributions (Parquet, format of version 2) as samples of a cache.

What lies in a directory: `compression_config.yaml` and Parquet files with the columns `input_ids`,
`compressed_logprobs` and `bytepacked_indices`, a list of byte lists each; row t belongs to the
prediction of input_ids[t + 1]. A byte list of ids holds k ids of ceil(log2 d) bits, highest bit
first. One of log-probabilities holds, in this order: `exact_k` values; the coefficients of
`polynomial_terms` over the other ranks; and for each of `residual_bins` a scale and its elements as
signed integers with an offset. With `delta_encoding` the values are differences to the rank before.

Letters: n tokens, k candidates.

DistillKit appends a padding token to texts shorter than its limit, so that the last row of such a
text has that token as its label.

Source: arcee-ai/DistillKit, distillkit/compression and sample_common.py at commit a61c2e7, whose
    `LogprobCompressor` and `StreamingParquetWriter` wrote files that came over with every id.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
import yaml

from megatron_kd.cache.format import CacheError
from megatron_kd.cache.shard import from_bfloat16

CONFIG_NAME = "compression_config.yaml"
COLUMNS = ("input_ids", "compressed_logprobs", "bytepacked_indices")
DTYPES = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True)
class CapturedSample:
    """One sequence with the rows of all its predictions."""

    tokens: np.ndarray  # [n] int64
    topk_ids: np.ndarray  # [n - 1, k] int64; -1 unused
    topk_logprobs: np.ndarray  # [n - 1, k] fp64; -inf unused


@dataclass(frozen=True)
class Compression:
    """The part of `compression_config.yaml` that says how to read."""

    d: int
    k: int
    exact_k: int
    exact_dtype: str
    polynomial_terms: tuple
    term_dtype: str
    residual_bins: tuple[dict, ...]
    delta_encoding: bool
    normalize_t: bool

    @classmethod
    def read(cls, file: Path) -> "Compression":
        try:
            values = yaml.safe_load(file.read_text())
            compression = cls(
                d=int(values["d"]),
                k=int(values["k"]),
                exact_k=int(values["exact_k"]),
                exact_dtype=values.get("exact_dtype", "float32"),
                polynomial_terms=tuple(values.get("polynomial_terms") or ()),
                term_dtype=values.get("term_dtype", "float32"),
                residual_bins=tuple(values.get("residual_bins") or ()),
                delta_encoding=bool(values.get("delta_encoding", True)),
                normalize_t=bool(values.get("normalize_t", False)),
            )
            known = compression.exact_dtype in DTYPES and compression.term_dtype in DTYPES
        except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
            raise CacheError(
                f"{file} is not DistillKit's compression configuration: {error}"
            ) from error
        if not known or not 0 <= compression.exact_k <= compression.k <= compression.d:
            raise CacheError(f"{file}: dtypes or sizes make no sense: {values}")
        return compression

    @property
    def id_bits(self) -> int:
        return int(np.ceil(np.log2(np.float32(self.d))))

    def ids(self, packed: np.ndarray) -> np.ndarray:
        """[rows, bytes] uint8 to [rows, k] int64."""
        return _unpack(packed, self.id_bits, self.k)

    def logprobs(self, packed: np.ndarray) -> np.ndarray:
        """[rows, bytes] uint8 to [rows, k] fp64, in fp64 throughout."""
        cursor = _Cursor(packed)
        exact = cursor.floats(self.exact_dtype, self.exact_k)
        ranks = self.k - self.exact_k
        rest = np.zeros((packed.shape[0], ranks))
        if self.polynomial_terms:
            coefficients = cursor.floats(self.term_dtype, len(self.polynomial_terms))
            rest += coefficients @ self._terms(ranks).T
        at = 0
        for residual in self.residual_bins:
            bits, count = int(residual["element_bits"]), int(residual["num_elements"])
            scale = cursor.floats(residual["scale_dtype"], 1)
            elements = _unpack(cursor.take((bits * count + 7) // 8), bits, count)
            signed = elements * 2 - 1 if bits == 1 else elements - (1 << (bits - 1))
            rest[:, at : at + count] += signed * scale
            at += count
        values = np.concatenate([exact, rest], axis=1)
        return np.cumsum(values, axis=1) if self.delta_encoding else values

    def _terms(self, ranks: int) -> np.ndarray:
        """[ranks, terms]: the terms' values at each rank."""
        points = np.linspace(0, 1, ranks) if self.normalize_t else np.arange(ranks, dtype=float)
        special = {"sqrt": np.sqrt, "exp": np.exp}
        return np.stack(
            [
                special[term](points) if isinstance(term, str) else points**term
                for term in self.polynomial_terms
            ],
            axis=1,
        )


class _Cursor:
    """Reads rows of bytes from left to right."""

    def __init__(self, rows: np.ndarray):
        self.rows, self.at = rows, 0

    def take(self, count: int) -> np.ndarray:
        part = self.rows[:, self.at : self.at + count]
        if part.shape[1] != count:
            raise CacheError("the byte lists are shorter than the compression configuration says")
        self.at += count
        return part

    def floats(self, dtype: str, count: int) -> np.ndarray:
        stored = np.dtype(DTYPES[dtype])
        raw = np.ascontiguousarray(self.take(count * stored.itemsize)).view(stored)
        return (from_bfloat16(raw) if dtype == "bfloat16" else raw).astype(np.float64)


def _unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[rows, bytes] to [rows, count] int64; elements of `bits` bits, highest first."""
    stream = np.unpackbits(np.ascontiguousarray(packed), axis=1)
    if stream.shape[1] < bits * count:
        raise CacheError("the byte lists are shorter than the compression configuration says")
    elements = stream[:, : bits * count].reshape(packed.shape[0], count, bits)
    return elements @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))


def captured_samples(folder: Path, compression: Compression) -> Iterator[CapturedSample]:
    """The samples of a directory, file after file in numeric order.

    Raises:
        CacheError: The files are not of this format.
    """
    files = sorted(folder.glob("*.parquet"), key=_number)
    if not files:
        raise CacheError(f"{folder} holds no Parquet files")
    for file in files:
        parquet = pyarrow.parquet.ParquetFile(file)
        missing = sorted(set(COLUMNS) - set(parquet.schema_arrow.names))
        if missing:
            raise CacheError(
                f"{file} has no column {', '.join(missing)}; DistillKit's older captures hold "
                "logits without a normalizer and cannot be converted"
            )
        for batch in parquet.iter_batches(batch_size=16, columns=list(COLUMNS)):
            for index in range(batch.num_rows):
                yield _sample(*(batch.column(name)[index] for name in COLUMNS), compression, file)


def _number(file: Path) -> tuple[int, str]:
    digits = "".join(c for c in file.stem if c.isdigit())
    return int(digits or 0), file.name


def _sample(input_ids, logprob_lists, id_lists, compression: Compression, file: Path):
    tokens = input_ids.values.to_numpy().astype(np.int64)
    rows = min(len(logprob_lists), tokens.size - 1)  # a row after the last token predicts nothing
    if rows != tokens.size - 1 or len(id_lists) != len(logprob_lists):
        raise CacheError(
            f"{file}: a sample has {tokens.size} tokens and {len(logprob_lists)} rows; expected a "
            "row for each token but the last"
        )
    logprobs = compression.logprobs(_matrix(logprob_lists, file)[:rows])
    ids = compression.ids(_matrix(id_lists, file)[:rows])
    unused = ~np.isfinite(logprobs)
    return CapturedSample(tokens, np.where(unused, -1, ids), np.where(unused, -np.inf, logprobs))


def _matrix(lists, file: Path) -> np.ndarray:
    inner = lists.values
    lengths = np.diff(inner.offsets.to_numpy())
    if lengths.size and (lengths != lengths[0]).any():
        raise CacheError(f"{file}: the byte lists of a sample have different lengths")
    return inner.flatten().to_numpy().reshape(len(inner), -1)

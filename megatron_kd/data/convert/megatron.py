"""Megatron-LM's saved teacher log-probabilities (`--save-logits`-style tars) as samples of a cache.

What lies in a directory: `dp{D}__{I}.tar` or `cp{C}_dp{D}__{I}.tar`, I an iteration or a range of
samples; in each tar first `_meta.json`, then one `{iteration}.pt.zst` or `{first}-{end}.pt.zst` per
training step: zstd around a `torch.save` of `values`, `indices_low` (uint16) and `bit_17`. Version
1 keeps a list with one tensor [s, micro-batch, K] per micro-batch and `bit_17` as bool; version 2
one tensor [s, samples of this rank, K] and `bit_17` bit-packed. Within a step, micro-batch m of
rank d holds the samples (m·D + d)·B up to (m·D + d + 1)·B, D ranks, B the micro-batch size. The
files hold no tokens.

Letters: s sequence length, K candidates.

Source: NVIDIA/Megatron-LM, megatron/training/distillation: version 1 as at commit d98e8a6 (August
    2026), whose `LogitsSaverHooks` wrote files that came over with every id (top-K, top-p, context
    parallel); version 2 as `utils.py` of commit 10cc4f5 reads it.
"""

import contextlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import torch

from megatron_kd.cache.format import CacheError

TAR_NAME = re.compile(r"(?:cp(?P<cp>\d+)_)?dp(?P<dp>\d+)__(?:(?P<first>\d+)-)?(?P<last>\d+)\.tar")
STEP_NAME = re.compile(r"(?:(?P<first>\d+)-)?(?P<last>\d+)\.pt\.zst")
META_NAME = "_meta.json"
UNUSED_BELOW_NATS = -999.0  # its marks for an unused slot are -1e3 and -1e4
MAX_STEP_BYTES = 1 << 36


@dataclass(frozen=True)
class SavedRows:
    """One sample's rows, in the order Megatron trained on them."""

    topk_ids: np.ndarray  # [s, K] int64; -1 unused
    topk_logprobs: np.ndarray  # [s, K] fp32; -inf unused


def read_meta(folder: Path) -> dict:
    """`_meta.json` of the first tar."""
    first = min(_find_tars(folder).values())[0]
    with _opened(first) as tar:
        for member in tar:
            if member.name == META_NAME:
                return json.loads(tar.extractfile(member).read(1 << 20))
    raise CacheError(f"{first} has no {META_NAME}: not a tar of saved log-probabilities")


def saved_samples(folder: Path) -> Iterator[SavedRows]:
    """The samples of a directory, from the first one on.

    Raises:
        CacheError: The directory does not hold an unbroken run of training steps from the first.
    """
    tars = _find_tars(folder)
    saver = read_meta(folder).get("saver", {})
    contexts = sorted({cp for cp, _ in tars})
    ranks = sorted({dp for _, dp in tars})
    saved_ranks = saver.get("dp_size_save", len(ranks))
    if ranks != list(range(saved_ranks)) or contexts != list(range(len(contexts))):
        raise CacheError(
            f"{folder} has tars of data-parallel ranks {ranks} and context-parallel ranks "
            f"{contexts}; expected {saved_ranks} data-parallel ranks without a gap"
        )
    if set(tars) != {(cp, dp) for cp in contexts for dp in ranks}:
        raise CacheError(f"{folder}: tars of some pairs of context and data rank are missing")
    streams = {key: _steps(paths) for key, paths in tars.items()}
    expected = 0
    while True:
        steps = {key: next(stream, None) for key, stream in streams.items()}
        if all(step is None for step in steps.values()):
            return
        names = {step and step[:2] for step in steps.values()}
        if len(names) != 1:
            raise CacheError(f"{folder}: the ranks' tars do not hold the same steps ({names})")
        ((first, last),) = names
        by_rank = {
            dp: _join_contexts([_decode(steps[cp, dp][2], folder) for cp in contexts])
            for dp in ranks
        }
        begin = first if first is not None else last
        if begin != expected:
            raise CacheError(f"{folder}: expected step or sample {expected}, found {begin}")
        yield from _in_order(by_rank, saver.get("mbs_save"), folder)
        expected = last if first is not None else last + 1


def _find_tars(folder: Path) -> dict[tuple[int, int], list[Path]]:
    found: dict[tuple[int, int], list] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = TAR_NAME.fullmatch(path.name)
        if match:
            key = (int(match["cp"] or 0), int(match["dp"]))
            found.setdefault(key, []).append((int(match["last"]), path))
    if not found:
        raise CacheError(f"{folder} holds no tars named dp0__100.tar or cp0_dp0__100.tar")
    return {key: [path for _, path in sorted(paths)] for key, paths in found.items()}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path) as tar:
            yield tar
    except tarfile.TarError as error:
        raise CacheError(f"{path} cannot be read: {error}") from error


def _steps(paths: list[Path]) -> Iterator[tuple[int | None, int, bytes]]:
    for path in paths:
        with _opened(path) as tar:
            for member in tar:
                match = STEP_NAME.fullmatch(member.name)
                if match and member.isreg() and member.size <= MAX_STEP_BYTES:
                    first = None if match["first"] is None else int(match["first"])
                    yield first, int(match["last"]), tar.extractfile(member).read()


def _decode(payload: bytes, folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[(values, ids)] per micro-batch (version 1), or one pair (version 2)."""
    try:
        plain = pyarrow.CompressedInputStream(pyarrow.BufferReader(payload), "zstd").read()
        saved = torch.load(io.BytesIO(plain), weights_only=True, map_location="cpu")
        values, low, high = saved["values"], saved["indices_low"], saved["bit_17"]
    except (OSError, KeyError, RuntimeError, ValueError, EOFError) as error:
        raise CacheError(f"{folder}: a step cannot be read ({error})") from error
    if isinstance(values, torch.Tensor):
        values, low, high = [values], [low], [high]
    pairs = []
    for value, below, bit in zip(values, low, high, strict=True):
        if bit.dtype == torch.uint8:  # bit-packed over the flattened tensor, highest bit first
            bits = np.unpackbits(bit.numpy().ravel(), count=below.numel())
            bit = torch.from_numpy(bits).reshape(below.shape)
        if value.shape != below.shape or value.shape != bit.shape or value.dim() != 3:
            raise CacheError(f"{folder}: a step's values and indices have different shapes")
        pairs.append((value, (bit.long() << 16) | below.long()))
    return pairs


def _join_contexts(parts: list[list[tuple[torch.Tensor, torch.Tensor]]]):
    """Joins sequences split over C ranks: rank c holds the chunks c and 2C - 1 - c of 2C."""
    if len(parts) == 1:
        return parts[0]
    joined = []
    for same in zip(*parts, strict=True):
        fields = []
        for tensors in zip(*same, strict=True):
            halves = [tensor.chunk(2, dim=0) for tensor in tensors]
            fields.append(torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)]))
        joined.append(tuple(fields))
    return joined


def _in_order(by_rank: dict, micro_batch: int | None, folder: Path) -> Iterator[SavedRows]:
    batches = {}
    for rank, pairs in by_rank.items():
        if len(pairs) == 1 and micro_batch and pairs[0][0].shape[1] > micro_batch:
            values, ids = pairs[0]
            pairs = list(zip(values.split(micro_batch, 1), ids.split(micro_batch, 1), strict=True))
        batches[rank] = pairs
    if len({len(pairs) for pairs in batches.values()}) != 1:
        raise CacheError(f"{folder}: the ranks hold different numbers of micro-batches")
    for number in range(len(batches[0])):
        for rank in sorted(batches):
            values, ids = batches[rank][number]
            for sample in range(values.shape[1]):
                logprobs = values[:, sample].float().numpy()
                unused = logprobs <= UNUSED_BELOW_NATS
                yield SavedRows(
                    topk_ids=np.where(unused, -1, ids[:, sample].numpy()),
                    topk_logprobs=np.where(unused, -np.inf, logprobs).astype(np.float32),
                )

"""One capture: what it was asked to do, and the making of its shards.

Every worker opens the same directory with the same description, makes the shards that are its own
and not there yet, and publishes the manifest if its shard was the last one missing. Nothing is
shared but files that appear whole.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_kd.cache.format import (
    MANIFEST_NAME,
    CacheError,
    parse_manifest,
    read_text,
)
from megatron_kd.cache.writer import (
    ShardWriter,
    finished_shards,
    open_directory,
    publish_manifest,
    reopen,
)
from megatron_kd.files import publish
from megatron_kd.teacher.capture.plan import SampleRows, pieces
from megatron_kd.teacher.capture.progress import CaptureProgress
from megatron_kd.teacher.capture.setting import CaptureJob, Setting, resolve
from megatron_kd.teacher.capture.trial import Trial
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines.base import EngineError, engine_class
from megatron_kd.teacher.engines.http_client import API_KEY

# What `verify --repair` needs to make a shard again; beside the shards until the manifest carries
# it.
_ORIGIN_NAME = ".capture.json"
_TELLING_TOPK = 20  # with fewer candidates a good teacher may miss many next tokens
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def capture(jobs: Mapping[str, tuple[CaptureJob, Path]], worker: Worker) -> dict[str, bool]:
    """Makes this worker's missing shards of several splits.

    Args:
        jobs: Split name: (job, cache directory). All are checked before the teacher is loaded.

    Returns:
        Split name: whether its cache is complete now (False: other workers have shards to make).

    Raises:
        ValueError: the data, teacher, options and directory do not go together; the message says
            how to go on.
        OSError: the disk is full, or the teacher stopped answering. Finished shards are kept.
    """
    settings = {name: (resolve(job), output) for name, (job, output) in jobs.items()}
    folders = {
        name: open_directory(output, setting.spec) for name, (setting, output) in settings.items()
    }
    complete = {}
    with _Engines() as engines:
        for name, (setting, _) in settings.items():
            folder = folders[name]
            _reopen_if_incomplete(setting, folder)
            if not (folder / MANIFEST_NAME).exists():
                publish(folder / _ORIGIN_NAME, _origin_text(setting.job))
                _make(
                    setting,
                    folder,
                    name if worker.count == 1 else f"{name} {worker}",
                    worker,
                    engines,
                )
            complete[name] = _complete(setting, folder)
    return complete


def resume(path: str | os.PathLike, shards: Sequence[int] | None = None) -> dict:
    """Makes missing shards of a cache again, by the parameters it was captured with; for
    `megatron-kd verify --repair`.

    Args:
        path: The cache's directory, complete or not.
        shards: Shards to make again even though they are there. None: those that are missing.

    Returns:
        The new manifest.

    Raises:
        ValueError: data or teacher are not those of the cache any more.
        OSError: as in capture_split.
    """
    folder = Path(path)
    manifest_file, origin_file = folder / MANIFEST_NAME, folder / _ORIGIN_NAME
    if manifest_file.exists():
        origin = parse_manifest(read_text(manifest_file), str(manifest_file))[0]["origin"]
    elif origin_file.exists():
        origin = json.loads(origin_file.read_text())
    else:
        raise EngineError(
            f"{folder} does not say how it was captured; run megatron-kd capture with its "
            "parameters again"
        )
    try:
        job = CaptureJob(**origin)
    except TypeError as error:
        raise EngineError(f"{folder} was not captured by megatron-kd capture: {error}") from error
    if job.options.get("trust_remote_code"):  # a manifest must not be able to ask for that
        raise EngineError(
            f"{folder} was captured with --trust-remote-code, which is never repeated unasked; "
            "give its megatron-kd capture command again"
        )
    if job.options.get("server") and os.environ.get(API_KEY):
        raise EngineError(
            f"{folder} names its own servers {list(job.options['server'])}, to which the key in "
            f"{API_KEY} is not sent unasked; give its megatron-kd capture command again, which "
            "makes the missing shards"
        )
    setting = resolve(job)
    open_directory(folder, setting.spec)
    if manifest_file.exists():
        there = finished_shards(folder)
        again = set(range(len(setting.plan) - 1)) - set(there) if shards is None else set(shards)
        publish(origin_file, _origin_text(job))
        reopen(folder, without=sorted(again))
    with _Engines() as engines:
        _make(setting, folder, folder.name, Worker(), engines)
    _complete(setting, folder)
    return json.loads(manifest_file.read_text())


def _reopen_if_incomplete(setting: Setting, folder: Path) -> None:
    """Makes a complete cache an unfinished one where shards got lost since."""
    try:
        lost = sorted(set(range(len(setting.plan) - 1)) - set(finished_shards(folder)))
        if not (folder / MANIFEST_NAME).exists() or not lost:
            return
        print(
            f"{folder}: shard {', '.join(map(str, lost))} missing or cut since the cache was "
            "complete; captured again",
            file=sys.stderr,
        )
        reopen(folder, without=lost)
    except FileNotFoundError:  # another worker did so between two looks at the directory
        if (folder / MANIFEST_NAME).exists():
            raise


class _Engines:
    """Loads the teacher when its first row is asked for, and keeps it for the next split."""

    def __init__(self):
        self._key = self._engine = None

    def __enter__(self) -> "_Engines":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._engine is not None:
            self._engine.close()

    def of(self, setting: Setting):
        job = setting.job
        key = (job.engine, job.teacher, setting.request, setting.options)
        if key != self._key:
            self.__exit__()
            self._engine = engine_class(job.engine)(job.teacher, setting.request, setting.options)
            self._key = key
        return self._engine


def _make(setting: Setting, folder: Path, label: str, worker: Worker, engines: _Engines) -> None:
    """Makes the worker's shards that are not finished. Loads the teacher only if there are any."""
    finished = finished_shards(folder)
    shards = len(setting.plan) - 1
    todo = [shard for shard in range(shards) if worker.takes(shard) and shard not in finished]
    if not todo:
        return
    of_shard = np.add.reduceat(setting.positions, setting.plan[:-1])
    engine = engines.of(setting)
    progress = CaptureProgress(label, int(of_shard[todo].sum()), shutil.disk_usage(folder).free)
    try:
        for shard in todo:
            try:
                _make_shard(setting, engine, folder, shard, progress)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                raise OSError(
                    f"{error}. Shard {shard} of {shards} in {folder} could not be written; the "
                    "finished ones are kept. Make room and run the same command again to go on"
                ) from error
    finally:
        progress.close()


def _make_shard(
    setting: Setting, engine, folder: Path, shard: int, progress: CaptureProgress
) -> None:
    first, last = int(setting.plan[shard]), int(setting.plan[shard + 1])
    found = pieces(setting.reader, first, last, setting.spec.packing)
    longest = max((piece.document.run_tokens for piece in found), default=0)
    limit = setting.described.max_tokens
    if limit is not None and longest > limit:
        raise EngineError(
            f"{setting.job.teacher} gives rows for at most {limit} tokens of a text with the "
            f"{setting.job.engine} engine, the data has texts of {longest}; prepare it with "
            f"--seq-length {limit} or less"
        )
    held = {
        index: SampleRows(
            np.asarray(setting.reader[index].loss_mask),
            setting.request,
            setting.spec.hidden_size,
            setting.spec.hidden_dtype,
        )
        for index in range(first, last)
    }
    trial = Trial(setting.spec)
    for number, rows in engine.stream([piece.document for piece in found]):
        piece = found[number]
        held[piece.sample].put(piece, rows)
        progress.advance(len(piece.document.rows))
        if progress.wants_estimate:
            trial.add(piece.document, rows)
            if progress.ready_to_estimate:
                share = trial.label_share() if setting.spec.topk >= _TELLING_TOPK else None
                progress.estimate(trial.bytes_per_position(), share)
    writer = ShardWriter(folder, setting.spec, shard, first)
    for index in range(first, last):
        sample, rows = setting.reader[index], held.pop(index)
        writer.append(
            sample.tokens,
            sample.loss_mask,
            rows.topk_ids,
            rows.topk_logprobs,
            cu_seqlens=sample.cu_seqlens,
            log_z=rows.log_z,
            hidden=rows.hidden,
        )
    writer.publish()


def _complete(setting: Setting, folder: Path) -> bool:
    """Publishes the manifest if every shard is there; so does any other worker that sees them
    all."""
    manifest = folder / MANIFEST_NAME
    if not manifest.exists():
        try:
            if len(finished_shards(folder)) < len(setting.plan) - 1:
                return manifest.exists()
            publish_manifest(folder, samples=len(setting.reader), origin=asdict(setting.job))
        except (FileNotFoundError, CacheError):
            # Another worker published between two looks at the directory and took the entry files
            # away.
            if not manifest.exists():
                raise
    (folder / _ORIGIN_NAME).unlink(missing_ok=True)
    return True


def _origin_text(job: CaptureJob) -> bytes:
    return json.dumps(asdict(job), sort_keys=True).encode()

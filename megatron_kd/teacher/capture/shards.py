"""The making of a cache's shards, the first time and again.

Every worker opens the same directory with the same description, makes the shards that are its own
and not there yet, and publishes the manifest if its shard was the last one missing. Nothing is
shared but files that appear whole.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.format import SPEC_NAME
from megatron_kd.cache.writer import ShardWriter
from megatron_kd.full_disk import explained_full_disk
from megatron_kd.teacher.capture.estimate import CaptureEstimate
from megatron_kd.teacher.capture.job import CaptureJob, ResolvedJob, as_begun, resolve
from megatron_kd.teacher.capture.progress import CaptureProgress
from megatron_kd.teacher.capture.sample_documents import SampleRows, placed_documents
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines import engine_class, explained_absence
from megatron_kd.teacher.engines.base import EngineError, TeacherEngine

_UNTOLD_BEYOND = 1e-3
"""Mass on padding rows that is not worth a line: a trained teacher leaves far less there."""
_TELLING_TOPK = 20
"""With fewer candidates a good teacher may miss many next tokens."""


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
    resolved_jobs = {name: resolve(job) for name, (job, _) in jobs.items()}
    opened = {name: _open(job, Path(jobs[name][1])) for name, job in resolved_jobs.items()}
    complete = {}
    with _Engines() as engines:
        for name, (resolved, directory) in opened.items():
            if lost := directory.reopen_lost(resolved.plan):
                print(
                    f"{directory.folder}: shard {', '.join(map(str, lost))} missing or cut since "
                    "the cache was complete; captured again",
                    file=sys.stderr,
                )
            if not directory.is_complete:
                directory.keep_origin(resolved.job.origin())
                label = name if worker.count == 1 else f"{name} {worker}"
                _make(resolved, directory, label, worker, engines)
            complete[name] = _complete(resolved, directory)
    return complete


def recapture(path: str | os.PathLike, shards: Sequence[int] | None = None) -> dict:
    """Makes shards of a cache again, by the parameters it was captured with; what
    `megatron-kd verify --repair` is handed.

    Args:
        path: The cache's directory, complete or not.
        shards: Shards to make again even though they are there. None: those that are missing.

    Returns:
        The new manifest.

    Raises:
        ValueError: Data or teacher are not those of the cache any more, or it does not say how it
            was captured.
        OSError: The disk is full, or the teacher stopped answering. Finished shards are kept.
    """
    directory = CacheDirectory(path)
    job = _recorded_job(directory)
    if job is None:
        raise EngineError(
            f"{path} does not say how megatron-kd capture made it; run megatron-kd capture with "
            "its parameters again"
        )
    _refuse_unasked(path, job)
    resolved, directory = _open(resolve(job), directory.folder)
    if directory.is_complete:
        again = directory.missing(resolved.plan) if shards is None else shards
        directory.keep_origin(job.origin())
        directory.reopen(without=again)
    with _Engines() as engines:
        _make(resolved, directory, directory.folder.name, Worker(), engines)
    _complete(resolved, directory)
    return directory.manifest()[0]


def _refuse_unasked(path: str | os.PathLike, job: CaptureJob) -> None:
    """Refuse what a manifest must not be able to ask for (`unasked` of `option`)."""
    for f in fields(engine_class(job.engine).Options):
        unasked = f.metadata["unasked"]
        if unasked is True or job.options.get(f.name, f.default) == f.default:
            continue
        flag = f"--{f.name.replace('_', '-')}"
        if unasked is False:
            raise EngineError(
                f"{path} was captured with {flag}, which is never repeated unasked; give its "
                "megatron-kd capture command again"
            )
        if os.environ.get(unasked):
            raise EngineError(
                f"{path} names its own {flag} {job.options[f.name]}, to which what {unasked} holds "
                "is not sent unasked; give its megatron-kd capture command again, which makes the "
                "missing shards"
            )


def _recorded_job(directory: CacheDirectory) -> CaptureJob | None:
    """The job that a directory names as its origin; None where there is none of ours."""
    try:
        return CaptureJob(**(directory.origin() or {}))
    except TypeError:  # no origin, or another tool's
        return None


def _open(resolved: ResolvedJob, folder: Path) -> tuple[ResolvedJob, CacheDirectory]:
    """Makes the job's directory, or checks that it was begun by this job."""
    directory = CacheDirectory(folder)
    earlier = _recorded_job(directory)
    if earlier is not None and (folder / SPEC_NAME).exists():
        resolved = as_begun(resolved, earlier, directory.spec())
    return resolved, CacheDirectory.begin(folder, resolved.spec)


def _complete(resolved: ResolvedJob, directory: CacheDirectory) -> bool:
    return directory.complete_if_whole(resolved.plan, origin=resolved.job.origin())


class _Engines:
    """Loads the teacher when its first row is asked for, and keeps it for the next split."""

    def __init__(self):
        self._key = self._engine = self._request = None

    def __enter__(self) -> "_Engines":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._engine is None:
            return
        self._engine.close()
        if self._request.beyond.largest > _UNTOLD_BEYOND:
            print(
                f"ids from {self._request.vocab_size} on, which no token has, get "
                f"{self._request.beyond}; the rows are normalized without them",
                file=sys.stderr,
            )

    def of(self, resolved: ResolvedJob) -> TeacherEngine:
        """The engine of a job."""
        job = resolved.job
        key = (job.engine, job.teacher, resolved.request, resolved.options)
        if key != self._key:
            self.__exit__()
            engine = engine_class(job.engine)
            with explained_absence(job.engine):
                self._engine = engine(job.teacher, resolved.request, resolved.options)
            self._key, self._request = key, resolved.request
        return self._engine


def _make(
    resolved: ResolvedJob, directory: CacheDirectory, label: str, worker: Worker, engines: _Engines
) -> None:
    """Makes the worker's shards that are not finished. Loads the teacher only if there are any."""
    todo = [shard for shard in directory.missing(resolved.plan) if worker.takes(shard)]
    if not todo:
        return
    of_shard = np.add.reduceat(resolved.positions, resolved.plan[:-1])
    engine = engines.of(resolved)
    progress = CaptureProgress(label, int(of_shard[todo].sum()), shutil.disk_usage(directory).free)
    try:
        for shard in todo:
            with explained_full_disk(shard, len(resolved.plan) - 1, directory.folder):
                _make_shard(resolved, engine, directory, shard, progress)
    finally:
        progress.close()


def _make_shard(
    resolved: ResolvedJob,
    engine: TeacherEngine,
    directory: CacheDirectory,
    shard: int,
    progress: CaptureProgress,
) -> None:
    first, last = int(resolved.plan[shard]), int(resolved.plan[shard + 1])
    found = placed_documents(resolved.reader, first, last, resolved.spec.packing)
    longest = max((placed.document.run_tokens for placed in found), default=0)
    limit = resolved.described.max_tokens
    if limit is not None and longest > limit:
        raise EngineError(
            f"{resolved.job.teacher} gives rows for at most {limit} tokens of a text with the "
            f"{resolved.job.engine} engine, the data has texts of {longest}; prepare it with "
            f"--seq-length {limit} or less"
        )
    rows_of_sample = {
        index: SampleRows(
            np.asarray(resolved.reader[index].loss_mask),
            resolved.request,
            resolved.spec.hidden_size,
            resolved.spec.hidden_dtype,
        )
        for index in range(first, last)
    }
    estimate = CaptureEstimate(resolved.spec)
    for number, rows in engine.stream([placed.document for placed in found]):
        placed = found[number]
        rows_of_sample[placed.sample].put(placed, rows)
        progress.advance(len(placed.document.rows))
        if progress.wants_estimate:
            estimate.add(placed.document, rows)
            if progress.ready_to_estimate:
                share = estimate.label_share() if resolved.spec.topk >= _TELLING_TOPK else None
                progress.estimate(estimate.bytes_per_position(), share)
    writer = ShardWriter(directory, resolved.spec, shard, first)
    for index in range(first, last):
        sample, rows = resolved.reader[index], rows_of_sample.pop(index)
        writer.append(
            sample.tokens,
            sample.loss_mask,
            rows.topk_ids,
            rows.topk_logprobs,
            cu_seqlens=sample.cu_seqlens,
            log_z=rows.log_z,
            hidden=rows.hidden,
            label_logprob=rows.label_logprobs,
        )
    writer.publish()

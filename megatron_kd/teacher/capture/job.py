"""What a capture was asked to do, and what that comes to: the shards' plan and what all of them
share.

What a shard holds depends on the job alone, never on how many processes share the work, so any of
them can make any shard and the result is the same.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megatron_kd.cache.format import MAX_SAMPLE_SLOTS, CacheSpec
from megatron_kd.cache.writer import DEFAULT_SHARD_POSITIONS, plan_shards
from megatron_kd.data.sequences import SequenceReader
from megatron_kd.teacher.engines import engine_class, explained_absence
from megatron_kd.teacher.engines.base import (
    EngineError,
    EngineOptions,
    RowRequest,
    TeacherDescription,
    options_of,
)


@dataclass(frozen=True, kw_only=True)
class CaptureJob:
    """A capture of one split, as plain values: they travel in the cache's manifest so that it can
    be repaired."""

    data: str
    """Folder of the split's prepared sequences."""
    teacher: str
    """Model directory, or the model's name at its server."""
    engine: str = "transformers"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own options that were given."""
    topk: int = 100
    top_p: float = RowRequest.top_p
    sampling: str = RowRequest.sampling
    seed: int = RowRequest.seed
    temperatures: tuple[float, ...] = RowRequest.temperatures
    label_logprob: bool = False
    """Keep each row's log-probability of the next token."""
    hidden_dtype: str | None = None
    """None keeps no hidden states."""
    codec: str = "compact"
    shard_positions: int = DEFAULT_SHARD_POSITIONS
    vocab_size: int | None = None
    """None takes the tokenizer's, from the data."""
    licence: str | None = None
    """The teacher's license; None takes what its model card says. The manifest spells it so."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(float(tau) for tau in self.temperatures))

    def origin(self) -> dict[str, Any]:
        """What a cache's manifest carries of it. What the first releases lack is left out at its
        default, so that they can repair such a cache too."""
        values = asdict(self)
        if not self.label_logprob:
            del values["label_logprob"]
        return values

    def engine_options(self) -> EngineOptions:
        """The engine's options object.

        Raises:
            EngineError: an option is not one of this engine's, or its value is refused.
        """
        return options_of(engine_class(self.engine), self.engine, self.options)


@dataclass(frozen=True)
class ResolvedJob:
    """A job with everything resolved that does not need the teacher loaded."""

    job: CaptureJob
    reader: SequenceReader
    options: EngineOptions
    described: TeacherDescription
    request: RowRequest
    spec: CacheSpec
    plan: np.ndarray  # [shards + 1] int64, shard i holds samples plan[i] to plan[i + 1]
    positions: np.ndarray  # [samples] int64


def resolve(job: CaptureJob) -> ResolvedJob:
    """Checks a job against its data and its teacher, without loading the teacher.

    Raises:
        ValueError: They do not go together; the message says what to change.
        OSError: The teacher's server does not answer.
    """
    reader = SequenceReader(job.data)
    data = reader.manifest
    options = job.engine_options()
    engine = engine_class(job.engine)
    with explained_absence(job.engine):
        described = engine.describe(job.teacher, options)
    vocab_size = job.vocab_size or data["vocab_size"]
    _check_output_rows(job, described, vocab_size, reader)
    if described.tokenizer is not None and described.tokenizer != data["tokenizer"]:
        raise EngineError(
            f"{job.teacher} has another tokenizer than the one {job.data} was prepared with, so "
            f"its ids mean other tokens; prepare the data with --tokenizer {job.teacher}, or take "
            "the teacher of that tokenizer"
        )
    if job.hidden_dtype and described.hidden_size is None:
        raise EngineError(
            f"the {job.engine} engine returns no hidden states; use the transformers engine or "
            "leave out --hidden-dtype"
        )
    if (data["seq_length"] + 1) * job.topk > MAX_SAMPLE_SLOTS:
        raise EngineError(
            f"sequences of {data['seq_length'] + 1} tokens with {job.topk} candidates exceed the "
            f"{MAX_SAMPLE_SLOTS} slots a sample may have; lower --topk, or prepare shorter ones"
        )
    request = RowRequest(
        topk=job.topk,
        vocab_size=vocab_size,
        top_p=job.top_p,
        sampling=job.sampling,
        seed=job.seed,
        temperatures=job.temperatures,
        labels=job.label_logprob,
        hidden=job.hidden_dtype is not None,
    )
    sampling: Any = job.sampling
    if job.sampling == "random":
        sampling = {"method": "random", "draws": job.topk, "seed": job.seed}
    elif job.top_p < 1.0:
        sampling = {"method": "topk", "top_p": job.top_p}
    spec = CacheSpec(
        vocab_size=vocab_size,
        topk=job.topk,
        teacher=described.fingerprint,
        tokenizer=data["tokenizer"],
        codec=job.codec,
        engine={"name": job.engine, "version": described.version},
        sampling=sampling,
        template=data.get("template"),
        packing=data["packing"],
        data={
            name: data[name] for name in ("fingerprint", "seq_length", "vocabulary") if name in data
        },
        temperatures=job.temperatures,
        label_logprob=job.label_logprob,
        hidden_size=described.hidden_size if job.hidden_dtype else 0,
        hidden_dtype=job.hidden_dtype or "float16",
        licence=job.licence or described.license,
        parameters={"shard_positions": job.shard_positions, **options.recorded()},
    )
    positions = np.array([int(np.sum(reader[i].loss_mask)) for i in range(len(reader))], np.int64)
    plan = plan_shards(positions, job.shard_positions)
    return ResolvedJob(job, reader, options, described, request, spec, plan, positions)


def _check_output_rows(job, described, vocab_size: int, reader: SequenceReader) -> None:
    rows = described.output_rows
    if rows is None or rows >= vocab_size:
        return
    highest = max(int(reader[i].tokens.max()) for i in range(len(reader)))
    if highest >= rows:
        raise EngineError(
            f"{job.teacher} has {rows} output rows, but the data holds token {highest}: this is "
            "not the teacher the data was tokenised for"
        )
    raise EngineError(
        f"{job.teacher} has {rows} output rows, fewer than the {vocab_size} ids of the tokenizer. "
        f"The data uses none from {rows} on, so capture with --vocab-size {rows}; the student "
        "needs as many output rows"
    )


def as_begun(resolved: ResolvedJob, earlier: CaptureJob, begun: CacheSpec) -> ResolvedJob:
    """A job as its directory was begun, where that was before all of its options were recorded.

    The first releases recorded `dtype` and `batch_tokens` alone among the options that shape rows;
    the others stand in the job that the directory names as its origin. What it says counts, and the
    directory keeps its description, to which its shards are bound.

    Args:
        earlier: The job that the directory names.
        begun: What describes the directory.

    Raises:
        EngineError: An option that shapes rows had another value there.
    """
    if earlier.engine != resolved.job.engine:
        return resolved  # the description says so itself
    there, here = earlier.engine_options().shaping(), resolved.options.shaping()
    differing = {name: (there[name], here[name]) for name in here if there[name] != here[name]}
    if differing:
        raise EngineError(
            f"the cache was begun with other engine options (there, here): {differing}; use the "
            "same settings, or another directory"
        )
    recorded = {
        name: value
        for name, value in resolved.spec.parameters.items()
        if name in (begun.parameters or {})
    }
    return replace(resolved, spec=replace(resolved.spec, parameters=recorded))

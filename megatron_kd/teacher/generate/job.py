"""What a generation was asked to do, and what that comes to: the prompts, and the shards they are
answered in.

What a shard holds depends on the job alone, never on how many processes share the work, so any of
them can make any shard.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.format import MAX_SAMPLE_SLOTS, CacheSpec
from megatron_kd.data.prepare.chat import ChatRules
from megatron_kd.data.prepare.documents import load_tokenizer, tokenizer_hash, vocabulary_size
from megatron_kd.data.prepare.prompts import PromptText, PromptTokenizer
from megatron_kd.data.prepare.records import read_records
from megatron_kd.data.prepare.split import validation_documents
from megatron_kd.data.sequence_format import TRAIN, VALIDATION
from megatron_kd.teacher.engines import engine_class, explained_absence
from megatron_kd.teacher.engines.base import (
    EngineError,
    EngineOptions,
    RowRequest,
    TeacherDescription,
    options_of,
)
from megatron_kd.teacher.generators import GENERATORS
from megatron_kd.teacher.generators.base import Generator, Sampling


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """What is kept of the distributions that the responses are drawn from."""

    topk: int = 100
    top_p: float = RowRequest.top_p
    temperatures: tuple[float, ...] = RowRequest.temperatures
    label_logprob: bool = False
    """Keep the log-probability of each token of the response."""
    codec: str = "compact"
    licence: str | None = None
    """The model's license; None takes what its model card says. The manifest spells it so."""
    validation_fraction: float = 0.05
    """Share of the prompts' tokens whose responses are held out."""
    split_seed: int = 1234
    """Chooses them."""


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """A generation, as plain values."""

    prompts: tuple[str, ...]
    """See `records.read_records`."""
    model: str
    """Model directory, or the model's name at its server."""
    tokenizer: str | None = None
    """Directory of the tokenizer; None: the model's."""
    engine: str = "transformers"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own options that were given."""
    sampling: Sampling = Sampling()
    chat: ChatRules = ChatRules()
    bos: str | None = "auto"
    """Token before each text; "auto" adds one if the tokenizer does, None adds none."""
    record_field: str | None = None
    hf_split: str | None = None
    max_prompts: int | None = None
    skip_invalid: bool = False
    """Leave out prompts that cannot be used, instead of stopping at the first."""
    shard_prompts: int = 256
    """Prompts whose responses appear on disk together."""
    rows: KeptRows | None = None
    """None keeps no rows."""

    def __post_init__(self) -> None:
        for name in ("shard_prompts", "max_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


@dataclass(frozen=True)
class Shard:
    """Prompts that are answered together."""

    first: int
    last: int
    """Half-open, into the prompts."""
    split: str = TRAIN
    """Of the cache that their rows go to."""
    number: int = 0
    """In that cache."""


@dataclass(frozen=True)
class ResolvedGeneration:
    """A job with everything resolved that does not need the model loaded."""

    job: GenerateJob
    engine: type[Generator]
    options: EngineOptions
    described: TeacherDescription
    tokenizer: Any
    prompt_tokenizer: PromptTokenizer
    prompts: list[PromptText]
    """In the order of the shards."""
    numbers: list[int]
    """Each one's place among the prompts as they were given."""
    ends: tuple[int, ...]
    request: RowRequest | None
    shards: list[Shard]
    spec: dict
    caches: dict[str, CacheSpec]
    """By split; empty where no rows are kept."""


def resolve(job: GenerateJob, report: Callable[[str], None]) -> ResolvedGeneration:
    """Checks a job against its prompts and its model, without loading the model.

    Args:
        report: Called with a line about each prompt that is left out.

    Raises:
        ValueError: They do not go together; the message says what to change.
        OSError: The model's server does not answer, or prompts are not there.
    """
    engine = engine_class(job.engine, GENERATORS)
    options = options_of(engine, job.engine, job.options)
    is_local = Path(job.model).exists()
    if job.tokenizer is None and not is_local:
        raise EngineError(
            f"{job.model} is no directory here, and a server does not show its tokenizer; give "
            "that as --tokenizer DIR"
        )
    tokenizer = load_tokenizer(job.tokenizer or job.model)
    request = None
    if job.rows is not None:
        request = RowRequest(
            topk=job.rows.topk,
            vocab_size=vocabulary_size(tokenizer),
            top_p=job.rows.top_p,
            temperatures=job.rows.temperatures,
            labels=job.rows.label_logprob,
        )
    engine.refuse(job.sampling, request)
    with explained_absence(job.engine):
        described = engine.describe(job.model, options)
    if described.output_rows is not None and described.output_rows < vocabulary_size(tokenizer):
        raise EngineError(
            f"{job.model} has {described.output_rows} output rows, fewer than the vocabulary size "
            f"{vocabulary_size(tokenizer)} of {job.tokenizer}: this is not that tokenizer's model"
        )
    if described.tokenizer not in (None, tokenizer_hash(tokenizer)):
        raise EngineError(
            f"{job.model} has another tokenizer than {job.tokenizer}, so its ids mean other "
            "tokens; leave --tokenizer out"
        )
    prompt_tokenizer = PromptTokenizer(tokenizer, bos=job.bos, rules=job.chat)
    prompts = _prompts(job, prompt_tokenizer, described.max_tokens, report)
    shards, numbers = _shards(job, prompts)
    prompts = [prompts[number] for number in numbers]
    chat = prompt_tokenizer.chat
    ends = {tokenizer.eos_token_id, None if chat is None else chat.end_of_turn, *_ends(job.model)}
    ends = tuple(
        sorted(end for end in ends if end is not None and end < vocabulary_size(tokenizer))
    )
    spec = {
        "model": described.fingerprint,
        "license": described.license,
        "engine": {"name": job.engine, "version": described.version},
        "tokenizer": tokenizer_hash(tokenizer),
        "template": None if chat is None else chat.fingerprint,
        "sampling": asdict(job.sampling),
        "ends": list(ends),
        "prompts": {"count": len(prompts), "sha256": _hash(prompts)},
        "parameters": {"shard_prompts": job.shard_prompts, **options.recorded()},
        "rows": None if job.rows is None else asdict(job.rows),
    }
    caches = {} if job.rows is None else _caches(job, spec, described, prompts, shards, tokenizer)
    return ResolvedGeneration(
        job,
        engine,
        options,
        described,
        tokenizer,
        prompt_tokenizer,
        prompts,
        numbers,
        ends,
        request,
        shards,
        spec,
        caches,
    )


def _prompts(
    job: GenerateJob, tokenizer: PromptTokenizer, limit: int | None, report
) -> list[PromptText]:
    skip_invalid = None
    if job.skip_invalid:

        def skip_invalid(message: str) -> None:
            report(f"left out: {message}")

    records = read_records(
        job.prompts,
        field=job.record_field,
        hf_split=job.hf_split,
        skip_invalid=skip_invalid,
    )
    found = []
    for prompt in tokenizer.prompts(records, skip_invalid=skip_invalid):
        new = job.sampling.max_new_tokens
        if limit is not None and len(prompt.tokens) + new > limit:
            message = (
                f"{prompt.where}: a prompt of {len(prompt.tokens)} tokens with {new} new ones "
                f"exceeds the {limit} that {job.model} reads; lower --max-new-tokens, or leave "
                "such prompts out with --skip-invalid"
            )
            if skip_invalid is None:
                raise EngineError(message)
            skip_invalid(message)
            continue
        found.append(prompt)
        if len(found) == job.max_prompts:
            break
    if not found:
        raise EngineError(f"no prompts in {', '.join(job.prompts)}")
    return found


def _shards(job: GenerateJob, prompts: list[PromptText]) -> tuple[list[Shard], list[int]]:
    """The shards, and the prompts' numbers in the order that they hold them."""
    held_out = np.zeros(len(prompts), bool)
    if job.rows is not None:
        held_out = validation_documents(
            [hashlib.sha256(_bytes(prompt)).digest() for prompt in prompts],
            [len(prompt.tokens) for prompt in prompts],
            fraction=job.rows.validation_fraction,
            seed=job.rows.split_seed,
        )
    shards, ordered = [], []
    for split, chosen in ((TRAIN, ~held_out), (VALIDATION, held_out)):
        numbers = np.flatnonzero(chosen).tolist()
        for place, start in enumerate(range(0, len(numbers), job.shard_prompts)):
            part = numbers[start : start + job.shard_prompts]
            shards.append(Shard(len(ordered), len(ordered) + len(part), split, place))
            ordered += part
    return shards, ordered


def _caches(job, spec, described, prompts, shards, tokenizer) -> dict[str, CacheSpec]:
    rows = job.rows
    longest = max(len(prompt.tokens) for prompt in prompts) + job.sampling.max_new_tokens
    if longest * rows.topk > MAX_SAMPLE_SLOTS:
        raise EngineError(
            f"responses of up to {longest} tokens with {rows.topk} candidates exceed the "
            f"{MAX_SAMPLE_SLOTS} slots a sample may have; lower --topk, or --max-new-tokens"
        )
    common = CacheSpec(
        vocab_size=vocabulary_size(tokenizer),
        topk=rows.topk,
        teacher=described.fingerprint,
        tokenizer=spec["tokenizer"],
        codec=rows.codec,
        engine=spec["engine"],
        sampling={"method": "topk", "top_p": rows.top_p} if rows.top_p < 1.0 else "topk",
        template=spec["template"],
        packing="none",
        data={"prompts": spec["prompts"]["sha256"], "seq_length": longest - 1},
        temperatures=rows.temperatures,
        label_logprob=rows.label_logprob,
        licence=rows.licence or described.license,
        parameters={"generated": spec["sampling"], **spec["parameters"]},
    )
    return {split: common for split in dict.fromkeys(shard.split for shard in shards)}


def _ends(model: str) -> set[int]:
    """The tokens that end a response by a model directory's own settings."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(model, name)
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            found |= {value} if type(value) is int else set(value or ())
    return found


def _bytes(prompt: PromptText) -> bytes:
    return np.ascontiguousarray(prompt.tokens, "<i4").tobytes()


def _hash(prompts: list[PromptText]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        tokens = _bytes(prompt)
        digest.update(len(tokens).to_bytes(8, "little") + tokens)
    return digest.hexdigest()

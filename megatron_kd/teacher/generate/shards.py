"""The making of a generation's shards.

Every worker opens the same directory with the same description, makes the shards that are its own
and not there yet, and joins them if its shard was the last one missing.

Letters: p tokens of a prompt, m of its response.
"""

import os
from pathlib import Path

import numpy as np

from megatron_kd.cache.directory import CacheDirectory
from megatron_kd.cache.writer import ShardWriter
from megatron_kd.data.prepare.documents import vocabulary_size
from megatron_kd.full_disk import explained_full_disk
from megatron_kd.teacher.capture.progress import Progress
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines import explained_absence
from megatron_kd.teacher.engines.base import EngineError
from megatron_kd.teacher.generate.answers import CACHE_FOLDER, AnswerDirectory, is_cut
from megatron_kd.teacher.generate.job import ResolvedGeneration, Shard
from megatron_kd.teacher.generators.base import ENDED, Generator, Prompt, Response


def generate(resolved: ResolvedGeneration, output: str | os.PathLike, worker: Worker) -> bool:
    """Makes this worker's missing shards.

    Returns:
        Whether the responses are complete now; False where other workers have shards to make.

    Raises:
        ValueError: The directory was begun with other settings, or a response cannot be used.
        OSError: The disk is full, or the model's server stopped answering. Finished shards are
            kept.
    """
    directory = AnswerDirectory.begin(output, resolved.spec)
    caches = {
        split: CacheDirectory.begin(Path(output, CACHE_FOLDER, split), spec)
        for split, spec in resolved.caches.items()
    }
    count = len(resolved.shards)
    if not directory.is_complete:
        todo = [part for part in directory.missing(count) if worker.takes(part)]
        if todo:
            _make(resolved, directory, caches, todo, worker)
    if not directory.complete_if_whole(count):
        return False
    # Not before: a shard whose part was not there yet is made again, in a cache that is open.
    origin = {"generate": str(output)}
    return all(
        cache.complete_if_whole(_plan(resolved, split), origin=origin)
        for split, cache in caches.items()
    )


def _make(resolved: ResolvedGeneration, directory, caches, todo: list[int], worker) -> None:
    samples = resolved.job.sampling.samples
    total = sum(resolved.shards[part].last - resolved.shards[part].first for part in todo)
    label = "generate" if worker.count == 1 else f"generate {worker}"
    progress = Progress(label, total * samples, "responses")
    engine = None
    try:
        with explained_absence(resolved.job.engine):
            engine = resolved.engine(
                resolved.job.model,
                resolved.job.sampling,
                resolved.ends,
                vocabulary_size(resolved.tokenizer),
                resolved.request,
                resolved.options,
            )
        for part in todo:
            with explained_full_disk(part, len(resolved.shards), directory.folder):
                shard = resolved.shards[part]
                answered = _answered(resolved, engine, shard, progress)
                if caches:
                    _publish_rows(resolved, caches[shard.split], shard, answered)
                directory.publish_part(part, _records(resolved, shard, answered))
    finally:
        progress.close()
        if engine is not None:
            engine.close()


def _answered(
    resolved: ResolvedGeneration, engine: Generator, shard: Shard, progress: Progress
) -> list[list[Response]]:
    """The responses to each prompt of a shard."""
    prompts = [
        Prompt(number, prompt.tokens, prompt.messages, prompt.tools, prompt.text)
        for number, prompt in zip(
            resolved.numbers[shard.first : shard.last],
            resolved.prompts[shard.first : shard.last],
            strict=True,
        )
    ]
    found: list[list] = [[None] * resolved.job.sampling.samples for _ in prompts]
    compared = agreed = 0
    for index, sample, response in engine.stream(prompts):
        found[index][sample] = response
        if response.tokens is not None and (response.text or "").strip():
            compared += 1
            agreed += _same_words(resolved, response)
        progress.advance(1)
    if compared and not agreed:
        raise EngineError(
            f"{resolved.job.model}: the server's words for its tokens are not those of "
            f"{resolved.job.tokenizer}, so it has another tokenizer; give the server's as "
            "--tokenizer"
        )
    return found


def _words(resolved: ResolvedGeneration, tokens: np.ndarray) -> str:
    """A response's text without the token that ends it."""
    spoken = tokens[:-1] if len(tokens) and int(tokens[-1]) in resolved.ends else tokens
    return resolved.tokenizer.decode(spoken.tolist(), clean_up_tokenization_spaces=False)


def _same_words(resolved: ResolvedGeneration, response: Response) -> bool:
    """Whether a server's text is that of its tokens, but for white space and broken characters."""

    def letters(text: str) -> str:
        return "".join(text.replace("\ufffd", "").split())

    given, spoken = letters(response.text), letters(_words(resolved, response.tokens))
    ends = [letters(resolved.tokenizer.decode([end])) for end in resolved.ends]
    return given in (spoken, *(spoken + end for end in ends))


def _records(
    resolved: ResolvedGeneration, shard: Shard, answered: list[list[Response]]
) -> list[dict]:
    """The lines of a shard: what `megatron-kd prepare` reads, and what people want to see."""
    records = []
    for index, responses in enumerate(answered):
        place = shard.first + index
        for sample, response in enumerate(responses):
            try:
                records.append(_record(resolved, place, sample, response))
            except ValueError as error:
                if resolved.job.skip_invalid:
                    continue
                raise EngineError(
                    f"{resolved.prompts[place].where}: a response cannot be used: {error}; leave "
                    "such responses out with --skip-invalid"
                ) from error
    return records


def _record(resolved: ResolvedGeneration, place: int, sample: int, response: Response) -> dict:
    prompt, tokens, text = resolved.prompts[place], response.tokens, response.text
    if tokens is None:
        whole = response.stop_reason in ENDED
        tokens = resolved.prompt_tokenizer.answered(prompt, text, response.message, is_whole=whole)
    else:
        text = _words(resolved, tokens)
    asked = {"prompt": prompt.text if prompt.messages is None else prompt.messages}
    if prompt.tools is not None:
        asked["tools"] = prompt.tools
    said = {"response": text}
    if response.message is not None and len(response.message) > 2:  # beside role and content
        said["message"] = response.message
    return {
        "tokens": [*prompt.tokens.tolist(), *tokens.tolist()],
        "loss_mask": [0] * len(prompt.tokens) + [1] * len(tokens),
        "prompt_number": resolved.numbers[place],
        "sample": sample,
        **asked,
        **said,
        "stop_reason": response.stop_reason,
        "truncated": is_cut(response.stop_reason),
        "empty": not text.strip() and "message" not in said,
    }


def _plan(resolved: ResolvedGeneration, split: str) -> np.ndarray:
    """[shards + 1] int64: where the samples of a cache's shards begin and end."""
    counts = [s.last - s.first for s in resolved.shards if s.split == split]
    return np.cumsum([0, *counts]) * resolved.job.sampling.samples


def _publish_rows(
    resolved: ResolvedGeneration, cache: CacheDirectory, shard: Shard, answered
) -> None:
    first = int(_plan(resolved, shard.split)[shard.number])
    writer = ShardWriter(cache, resolved.caches[shard.split], shard.number, first)
    for index, responses in enumerate(answered):
        prompt = resolved.prompts[shard.first + index]
        for response in responses:
            if not len(response.tokens):
                raise EngineError(
                    f"{prompt.where}: no token came (stop reason {response.stop_reason}), so there "
                    "is no row to keep; generate without --capture"
                )
            tokens = np.concatenate([prompt.tokens, response.tokens])
            mask = np.zeros(len(tokens), bool)
            mask[len(prompt.tokens) - 1 : -1] = True
            rows = response.rows
            writer.append(
                tokens,
                mask,
                rows.topk_ids,
                rows.topk_logprobs,
                log_z=rows.log_z,
                label_logprob=rows.label_logprobs,
            )
    writer.publish()

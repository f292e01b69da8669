"""The teacher in vLLM, in this process: prompt log-probabilities of each document.

vLLM's entry for prompt position t + 1 is the distribution that row t wants. It lists the K largest
candidates and, before them, the prompt's own token, which may be one of the K or a further one:
rows are made of distinct ids, the K largest.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_kd.models.fingerprint import model_directory
from megatron_kd.teacher.engines.base import (
    EngineError,
    RowRequest,
    TeacherDescription,
    TeacherDocument,
    TeacherEngine,
    TeacherRows,
    option,
)
from megatron_kd.teacher.engines.listed_rows import (
    PROMPT_EXTRA_TOKENS,
    prompt_of,
    refuse_unlisted,
    rows_from_lists,
)
from megatron_kd.teacher.engines.model_directory import ModelDirectoryOptions, describe_directory


@dataclass(frozen=True, kw_only=True)
class VllmModelOptions(ModelDirectoryOptions):
    """How vLLM holds a model."""

    tensor_parallel: int = option(1, "GPUs that share each layer", shapes_rows=True, minimum=1)
    max_model_len: int | None = option(
        None, "the longest prompt, in tokens; left out: the model's own limit"
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU that vLLM may take")

    def load(self, model: str | os.PathLike, *, max_logprobs: int, reuse_prefixes: bool):
        """The `vllm.LLM` of a model directory, for token ids in and out.

        Args:
            max_logprobs: The most candidates that a request may ask for.
            reuse_prefixes: Whether prompts that begin alike share their beginning; a shared one has
                no prompt log-probabilities.
        """
        import vllm

        return vllm.LLM(
            model=str(model_directory(model)),
            skip_tokenizer_init=True,  # ids in, ids out: text plays no part
            dtype=self.dtype,
            tensor_parallel_size=self.tensor_parallel,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            trust_remote_code=self.trust_remote_code,
            enable_prefix_caching=reuse_prefixes,
            max_logprobs=max_logprobs,
            disable_log_stats=True,
        )


@dataclass(frozen=True, kw_only=True)
class VllmOptions(VllmModelOptions):
    """How vLLM runs the teacher."""

    batch_tokens: int = option(
        16384,
        "prompt tokens given to vLLM in one call; it schedules them itself",
        shapes_rows=True,
        recorded_at_default=True,
        minimum=1,
    )


class VllmEngine(TeacherEngine):
    """vLLM's offline LLM class."""

    Options = VllmOptions

    @classmethod
    def describe(cls, teacher: str, options: VllmModelOptions) -> TeacherDescription:
        import torch
        import vllm

        described = describe_directory(
            teacher,
            f"vllm {vllm.__version__}, torch {torch.__version__}",
            trust_remote_code=options.trust_remote_code,
        )
        limit = options.max_model_len or described.max_tokens
        return replace(
            described, hidden_size=None, max_tokens=limit and limit - PROMPT_EXTRA_TOKENS
        )

    def __init__(self, teacher: str | os.PathLike, request: RowRequest, options: VllmOptions):
        refuse_unlisted(request, "vllm")
        import vllm

        self.request = request
        self.options = options
        self._llm = options.load(teacher, max_logprobs=request.topk, reuse_prefixes=False)
        self._sampling = vllm.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=request.topk,
            detokenize=False,
            # Plain lists instead of an object per candidate: K · n of them cost more than the
            # teacher.
            flat_logprobs=True,
        )

    def stream(self, documents: Sequence[TeacherDocument]) -> Iterator[tuple[int, TeacherRows]]:
        batch, held = [], 0
        for index, document in enumerate(documents):
            if batch and held + document.run_tokens > self.options.batch_tokens:
                yield from self._run(documents, batch)
                batch, held = [], 0
            batch.append(index)
            held += document.run_tokens
        if batch:
            yield from self._run(documents, batch)

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def _run(
        self, documents: Sequence[TeacherDocument], batch: list[int]
    ) -> Iterator[tuple[int, TeacherRows]]:
        prompts = [prompt_of(documents[index]) for index in batch]
        try:
            outputs = self._llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], self._sampling, use_tqdm=False
            )
        except ValueError as error:
            raise EngineError(f"vLLM refused a prompt: {error}") from error
        for index, prompt, output in zip(batch, prompts, outputs, strict=True):
            flat = output.prompt_logprobs
            if list(output.prompt_token_ids) != prompt or len(flat.start_indices) != len(prompt):
                raise EngineError("vLLM returned another prompt than it was given")
            ids = np.asarray(flat.token_ids, np.int64)
            logprobs = np.asarray(flat.logprobs, np.float32)
            lists = [
                (ids[start:end], logprobs[start:end])
                for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
            ]
            yield (
                index,
                rows_from_lists(lists, documents[index], self.request, "vLLM", prompt=prompt),
            )

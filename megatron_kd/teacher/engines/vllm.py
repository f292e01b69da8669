"""The teacher in vLLM, in this process: prompt log-probabilities of each document.

vLLM's entry for prompt position t + 1 is the distribution that row t wants. It lists the K largest
candidates and, before them, the prompt's own token, which may be one of the K or a further one:
rows are made of distinct ids, the K largest.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_kd.models.fingerprint import (
    licence_of,
    model_directory,
    model_fingerprint,
    tokenizer_of,
)
from megatron_kd.teacher.engines.base import Document, EngineError, RowRequest, Rows, Teacher
from megatron_kd.teacher.engines.listed_rows import (
    PROMPT_EXTRA_TOKENS,
    prompt_of,
    refuse_unlisted,
    rows_from_lists,
)


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """How vLLM runs the teacher."""

    dtype: str = "auto"
    """"auto" (the checkpoint's), "float32", "bfloat16" or "float16"."""
    batch_tokens: int = 16384
    """Prompt tokens given to vLLM in one call; it schedules them itself."""
    tensor_parallel: int = 1
    """GPUs that share the teacher."""
    max_model_len: int | None = None
    """The longest prompt, in tokens; None takes the model's own limit."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU that vLLM may take."""
    trust_remote_code: bool = False


class VllmEngine:
    """vLLM's offline LLM class; see TeacherEngine for the interface."""

    Options = VllmOptions

    @classmethod
    def describe(cls, teacher: str, options: VllmOptions) -> Teacher:
        import torch
        import transformers
        import vllm

        path = model_directory(teacher)
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=options.trust_remote_code
        ).get_text_config()
        limit = options.max_model_len or getattr(config, "max_position_embeddings", None)
        return Teacher(
            version=f"vllm {vllm.__version__}, torch {torch.__version__}",
            fingerprint=model_fingerprint(path),
            output_rows=config.vocab_size,
            max_tokens=limit and limit - PROMPT_EXTRA_TOKENS,
            tokenizer=tokenizer_of(path),
            licence=licence_of(path),
        )

    def __init__(self, teacher: str | os.PathLike, request: RowRequest, options: VllmOptions):
        refuse_unlisted(request, "vllm")
        import vllm

        path = model_directory(teacher)
        self.request = request
        self.options = options
        self._llm = vllm.LLM(
            model=str(path),
            skip_tokenizer_init=True,  # ids in, ids out: text plays no part
            dtype=options.dtype,
            tensor_parallel_size=options.tensor_parallel,
            max_model_len=options.max_model_len,
            gpu_memory_utilization=options.gpu_memory_utilization,
            trust_remote_code=options.trust_remote_code,
            # A cached prefix has no prompt log-probabilities.
            enable_prefix_caching=False,
            max_logprobs=request.topk,
            disable_log_stats=True,
        )
        self._sampling = vllm.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=request.topk,
            detokenize=False,
            # Plain lists instead of an object per candidate: K · n of them cost more than the
            # teacher.
            flat_logprobs=True,
        )

    def stream(self, documents: Sequence[Document]) -> Iterator[tuple[int, Rows]]:
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

    def _run(self, documents: Sequence[Document], batch: list[int]) -> Iterator[tuple[int, Rows]]:
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

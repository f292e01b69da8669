"""Responses of a model in vLLM, in this process."""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_kd.teacher.engines.base import EngineError, RowRequest
from megatron_kd.teacher.engines.listed_rows import refuse_unlisted, rows_of_response
from megatron_kd.teacher.engines.vllm import VllmEngine, VllmModelOptions
from megatron_kd.teacher.generators.base import (
    Generator,
    Prompt,
    Response,
    Sampling,
    asked,
    closed_at_end,
    seed_of,
)


class VllmGenerator(Generator):
    """vLLM's offline LLM class. It is given all prompts of a shard and schedules them itself."""

    Options = VllmModelOptions
    gives_rows = True
    describe = VllmEngine.describe

    @classmethod
    def refuse(cls, sampling: Sampling, request: RowRequest | None) -> None:
        super().refuse(sampling, request)
        if request is not None:
            refuse_unlisted(request, "vllm")

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        ends: Sequence[int],
        vocab_size: int,
        request: RowRequest | None,
        options: VllmModelOptions,
    ):
        self.sampling, self.ends, self.request = sampling, list(ends), request
        self._llm = options.load(
            model, max_logprobs=request.topk if request else 1, reuse_prefixes=True
        )

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Response]]:
        import vllm

        drawn = self.sampling
        wanted = asked(prompts, drawn)
        settings = [
            vllm.SamplingParams(
                max_tokens=drawn.max_new_tokens,
                temperature=drawn.temperature,
                top_p=drawn.top_p,
                top_k=drawn.top_k or -1,
                seed=seed_of(drawn, prompts[i].number, j),
                stop_token_ids=self.ends,
                detokenize=False,
                **({"logprobs": self.request.topk, "flat_logprobs": True} if self.request else {}),
            )
            for i, j in wanted
        ]
        given = [{"prompt_token_ids": prompts[i].tokens.tolist()} for i, _ in wanted]
        try:
            outputs = self._llm.generate(given, settings, use_tqdm=False)
        except ValueError as error:
            raise EngineError(f"vLLM refused a prompt: {error}") from error
        for (index, sample), output in zip(wanted, outputs, strict=True):
            yield index, sample, self._response(output.outputs[0])

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def _response(self, output) -> Response:
        reason = str(output.finish_reason)
        tokens = closed_at_end(output.token_ids, reason, self.ends, output.stop_reason)
        if self.request is None:
            return Response(reason, tokens)
        flat = output.logprobs
        ids = np.asarray(flat.token_ids, np.int64)
        logprobs = np.asarray(flat.logprobs, np.float32)
        lists = [
            (ids[start:end], logprobs[start:end])
            for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
        ]
        return Response(reason, tokens, rows_of_response(lists, tokens, self.request, "vLLM"))

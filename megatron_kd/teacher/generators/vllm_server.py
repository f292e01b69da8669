"""Responses of a model behind vLLM's OpenAI-compatible server, over /v1/completions.

Prompts go as token ids, and responses come back as token ids.
"""

from collections.abc import Sequence

import numpy as np

from megatron_kd.teacher.engines.base import EngineError, RowRequest
from megatron_kd.teacher.engines.http_client import TeacherClient
from megatron_kd.teacher.engines.listed_rows import refuse_unlisted, rows_of_response
from megatron_kd.teacher.engines.vllm_server import VllmServerEngine
from megatron_kd.teacher.generators.base import (
    Prompt,
    Response,
    Sampling,
    closed_at_end,
    seed_of,
)
from megatron_kd.teacher.generators.server import ServerGenerator

_ID = "token_id:"


class VllmServerGenerator(ServerGenerator):
    """Any number of equal vLLM servers."""

    gives_rows = True
    describe = VllmServerEngine.describe

    @classmethod
    def refuse(cls, sampling: Sampling, request: RowRequest | None) -> None:
        super().refuse(sampling, request)
        if request is not None:
            refuse_unlisted(request, "vllm-server")

    async def respond(self, client: TeacherClient, prompt: Prompt, sample: int) -> Response:
        body = {
            "model": self.model,
            "prompt": prompt.tokens.tolist(),
            "max_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k or -1,
            "seed": seed_of(self.sampling, prompt.number, sample),
            "stop_token_ids": self.ends,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
        }
        if self.request is not None:
            body |= {"logprobs": self.request.topk, "return_tokens_as_token_ids": True}
        answer = await client.ask("/v1/completions", body)
        return parse_completion(answer, body["prompt"], self.ends, self.request)


def parse_completion(
    answer: dict, prompt: list[int], ends: Sequence[int], request: RowRequest | None
) -> Response:
    """The response in an answer of /v1/completions.

    Raises:
        EngineError: The answer is not one to this prompt, or not of the expected form.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError("the vLLM server's answer has no single choice; is it a vLLM server?")
    (choice,) = choices
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise EngineError(
            "the vLLM server's answer has no token_ids; return_token_ids needs vLLM 0.10.2 or "
            "newer (for other servers there is --engine openai)"
        )
    if choice.get("prompt_token_ids") not in (None, prompt):
        raise EngineError("the vLLM server answered for another prompt than it was sent")
    reason = str(choice.get("finish_reason"))
    tokens = closed_at_end(tokens, reason, ends, choice.get("stop_reason"))
    rows = None
    if request is not None:
        try:
            listed = choice["logprobs"]["top_logprobs"]
            lists = [_candidates(position) for position in listed]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise EngineError(
                f"the vLLM server's logprobs are not objects of token id to log-probability: "
                f"{error!r}"
            ) from error
        rows = rows_of_response(lists, tokens, request, "the vLLM server")
    return Response(reason, tokens, rows, choice.get("text"))


def _candidates(position: dict) -> tuple[np.ndarray, np.ndarray]:
    ids = [int(name.removeprefix(_ID)) for name in position]
    return np.array(ids, np.int64), np.array(list(position.values()), np.float32)

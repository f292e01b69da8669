"""Responses of a model behind SGLang's native server, over /generate.

Prompts go as token ids, and responses come back as token ids. SGLang reads the seed of a response
where it was started with --enable-deterministic-inference; otherwise draws differ between runs.
"""

from collections.abc import Sequence

from megatron_kd.teacher.engines.base import EngineError
from megatron_kd.teacher.engines.http_client import TeacherClient
from megatron_kd.teacher.engines.sglang import SglangEngine
from megatron_kd.teacher.generators.base import (
    Prompt,
    Response,
    closed_at_end,
    seed_of,
)
from megatron_kd.teacher.generators.server import ServerGenerator


class SglangGenerator(ServerGenerator):
    """Any number of equal SGLang servers."""

    describe = SglangEngine.describe

    async def respond(self, client: TeacherClient, prompt: Prompt, sample: int) -> Response:
        settings = {
            "max_new_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k or -1,
            "sampling_seed": seed_of(self.sampling, prompt.number, sample),
            "stop_token_ids": self.ends,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        body = {
            "input_ids": prompt.tokens.tolist(),
            "sampling_params": settings,
            "stream": False,
        }
        answer = await client.ask("/generate", body)
        return parse_generate(answer, body["input_ids"], self.ends)


def parse_generate(answer: dict, prompt: list[int], ends: Sequence[int]) -> Response:
    """The response in an answer of /generate.

    Raises:
        EngineError: The answer is not one to this prompt, or not of the expected form.
    """
    meta, tokens = answer.get("meta_info"), answer.get("output_ids")
    if not isinstance(meta, dict):
        raise EngineError("SGLang's answer has no meta_info; is it a SGLang server?")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise EngineError("SGLang's answer has no output_ids; it needs SGLang 0.4.8 or newer")
    count = meta.get("prompt_tokens")
    if count is not None and count != len(prompt):
        raise EngineError(f"SGLang read {count} prompt tokens where {len(prompt)} were sent")
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict):
        finish = {"type": finish}
    reason = str(finish.get("type"))
    return Response(
        reason, closed_at_end(tokens, reason, ends, finish.get("matched")), None, answer.get("text")
    )

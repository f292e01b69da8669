"""Responses of any server that speaks as OpenAI's: words in, words out.

Turns go to /v1/chat/completions, plain text to /v1/completions. The server uses the chat template
and the tokenizer it was started with, and says nothing of either, so what comes back is tokenised
here.
"""

from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherDescription
from megatron_kd.teacher.engines.http_client import (
    HttpOptions,
    TeacherClient,
    describe_servers,
)
from megatron_kd.teacher.generators.base import (
    Prompt,
    Response,
    Sampling,
    seed_of,
)
from megatron_kd.teacher.generators.server import ServerGenerator

_SPOKEN = ("content", "reasoning_content", "tool_calls")


class OpenaiGenerator(ServerGenerator):
    """Any number of equal servers."""

    gives_tokens = False

    @classmethod
    def describe(cls, model: str, options: HttpOptions) -> TeacherDescription:
        async def describe_one(client: TeacherClient, server: str) -> TeacherDescription:
            listed = (await client.ask("/v1/models", server=server)).get("data")
            if not isinstance(listed, list) or not all(isinstance(m, dict) for m in listed):
                raise EngineError(
                    f"{server}/v1/models does not list models; give an OpenAI-compatible server's "
                    "address without /v1"
                )
            found = [served for served in listed if served.get("id") == model]
            if not found:
                there = ", ".join(str(served.get("id")) for served in listed)
                raise EngineError(
                    f"{server} does not serve {model!r} but {there}; give that as --model"
                )
            limit = found[0].get("max_model_len")
            return TeacherDescription(
                version="OpenAI-compatible (server)",
                fingerprint={"name": model},
                max_tokens=limit if type(limit) is int else None,
            )

        return describe_servers(options, describe_one)

    @classmethod
    def refuse(cls, sampling: Sampling, request: RowRequest | None) -> None:
        super().refuse(sampling, request)
        if sampling.top_k:
            raise EngineError(
                "OpenAI's interface has no top_k; leave out --top-k, or use the engine of the "
                "server (vllm-server, sglang)"
            )

    async def respond(self, client: TeacherClient, prompt: Prompt, sample: int) -> Response:
        body = {
            "model": self.model,
            "max_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": seed_of(self.sampling, prompt.number, sample),
        }
        if prompt.messages is None:
            answer = await client.ask("/v1/completions", {**body, "prompt": prompt.text})
            choice = _choice(answer)
            return Response(str(choice.get("finish_reason")), text=_text(choice.get("text")))
        body["messages"] = prompt.messages
        if prompt.tools is not None:
            body["tools"] = prompt.tools
        choice = _choice(await client.ask("/v1/chat/completions", body))
        given = choice.get("message")
        if not isinstance(given, dict):
            raise EngineError("the server's answer has no message; is it OpenAI-compatible?")
        turn = {name: given[name] for name in _SPOKEN if given.get(name)}
        text = turn["content"] = _text(given.get("content"))
        return Response(
            str(choice.get("finish_reason")), text=text, message={"role": "assistant", **turn}
        )


def _choice(answer: dict) -> dict:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError("the server's answer has no single choice; is it OpenAI-compatible?")
    return choices[0]


def _text(value) -> str:
    if value is not None and not isinstance(value, str):
        raise EngineError(f"the server's answer must be text, got {type(value).__name__}")
    return value or ""

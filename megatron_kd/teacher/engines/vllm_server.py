"""The teacher behind vLLM's OpenAI-compatible server: prompt log-probabilities over
/v1/completions.

Prompts go as token ids and candidates come back keyed by token id; no text is read. Start the
server with `vllm serve MODEL --max-logprobs K --no-enable-prefix-caching`.
"""

import secrets
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_kd.teacher.engines.base import (
    EngineError,
    RowRequest,
    TeacherDescription,
    TeacherDocument,
    TeacherEngine,
    TeacherRows,
)
from megatron_kd.teacher.engines.http_client import (
    HttpOptions,
    TeacherClient,
    describe_servers,
    stream_answers,
)
from megatron_kd.teacher.engines.listed_rows import (
    PROMPT_EXTRA_TOKENS,
    prompt_of,
    refuse_unlisted,
    rows_from_lists,
)


class VllmServerEngine(TeacherEngine):
    """Any number of equal vLLM servers."""

    Options = HttpOptions

    @classmethod
    def describe(cls, teacher: str, options: HttpOptions) -> TeacherDescription:
        async def describe_one(client: TeacherClient, server: str) -> TeacherDescription:
            model = _model(await client.ask("/v1/models", server=server), teacher, server)
            version = (await client.ask("/version", server=server)).get("version")
            limit = model.get("max_model_len")
            return TeacherDescription(
                version=f"vllm {version} (server)",
                fingerprint={"name": str(model.get("id")), "root": str(model.get("root", ""))},
                max_tokens=limit and limit - PROMPT_EXTRA_TOKENS,
            )

        return describe_servers(options, describe_one)

    def __init__(self, teacher: str, request: RowRequest, options: HttpOptions):
        refuse_unlisted(request, "vllm-server")
        self.request = request
        self.options = options
        self._model = teacher

    def stream(self, documents: Sequence[TeacherDocument]) -> Iterator[tuple[int, TeacherRows]]:
        return stream_answers(self.options, documents, self._rows)

    def close(self) -> None:
        """Nothing is held between streams."""

    async def _rows(self, client: TeacherClient, document: TeacherDocument) -> TeacherRows:
        prompt = prompt_of(document)
        answer = await client.ask(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": self.request.topk,
                "return_token_ids": True,
                "add_special_tokens": False,
                # Its own salt keeps a request away from cached prefixes, which have no
                # log-probabilities.
                "cache_salt": secrets.token_hex(16),
            },
        )
        lists = parse_completion(answer, prompt)
        return rows_from_lists(lists, document, self.request, "the vLLM server", prompt=prompt)


def parse_completion(answer: dict, prompt: list[int]) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """(ids, logprobs) per prompt position from an answer of /v1/completions; None at position 0.

    Raises:
        EngineError: the answer is not one to this prompt, or not of the expected form.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError("the vLLM server's answer has no single choice; is it a vLLM server?")
    echoed = choices[0].get("prompt_token_ids")
    if echoed is not None and echoed != prompt:
        raise EngineError("the vLLM server answered for another prompt than it was sent")
    positions = choices[0].get("prompt_logprobs")
    if not isinstance(positions, list):
        raise EngineError(
            "the vLLM server's answer has no prompt_logprobs; the server must allow them (vLLM "
            "0.6 or newer)"
        )
    if len(positions) != len(prompt):
        raise EngineError(
            f"the vLLM server returned prompt_logprobs for {len(positions)} positions of a prompt "
            f"of {len(prompt)} tokens"
        )
    try:
        return [
            None
            if position is None
            else (
                np.fromiter(map(int, position), np.int64, len(position)),
                np.fromiter((c["logprob"] for c in position.values()), np.float32, len(position)),
            )
            for position in positions
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(
            "the vLLM server's prompt_logprobs are not objects of token id to log-probability: "
            f"{error!r}"
        ) from error


def _model(models: dict, wanted: str, server: str) -> dict:
    listed = models.get("data")
    if not isinstance(listed, list) or not all(isinstance(model, dict) for model in listed):
        raise EngineError(f"{server}/v1/models does not list models; is it a vLLM server?")
    for model in listed:
        if model.get("id") == wanted:
            return model
    there = ", ".join(str(model.get("id")) for model in listed)
    raise EngineError(f"{server} does not serve {wanted!r} but {there}; give that as --teacher")

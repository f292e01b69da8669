"""The teacher behind SGLang's native server: input log-probabilities over /generate.

Prompts go as token ids, and candidates come back as ids: base64 arrays where the server knows how
to send them, nested lists from older ones. SGLang's entry for prompt position t + 1 is row t; the
first position has none.
"""

import base64
import binascii
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
from megatron_kd.teacher.engines.listed_rows import prompt_of, refuse_unlisted, rows_from_lists


class SglangEngine(TeacherEngine):
    """Any number of equal SGLang servers."""

    Options = HttpOptions

    @classmethod
    def describe(cls, teacher: str, options: HttpOptions) -> TeacherDescription:
        return describe_servers(
            options, lambda client, server: _describe_server(client, server, teacher)
        )

    def __init__(self, teacher: str, request: RowRequest, options: HttpOptions):
        refuse_unlisted(request, "sglang")
        self.request = request
        self.options = options

    def stream(self, documents: Sequence[TeacherDocument]) -> Iterator[tuple[int, TeacherRows]]:
        return stream_answers(self.options, documents, self._rows)

    def close(self) -> None:
        """Nothing is held between streams."""

    async def _rows(self, client: TeacherClient, document: TeacherDocument) -> TeacherRows:
        prompt = prompt_of(document)
        answer = await client.ask(
            "/generate",
            {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,  # its default returns output positions only
                "top_logprobs_num": self.request.topk,
                "return_text_in_logprobs": False,
                # Servers that do not know these two ignore them and send nested lists.
                "return_flat_raw_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
                "stream": False,
            },
        )
        return rows_from_lists(
            parse_generate(answer, prompt),
            document,
            self.request,
            "SGLang",
            prompt_logprobs=token_logprobs(answer, prompt) if self.request.labels else None,
        )


async def _describe_server(client: TeacherClient, server: str, teacher: str) -> TeacherDescription:
    """What one server says of its teacher; refuses a server of another model."""
    try:
        model, info = await client.ask("/model_info", server=server), "/server_info"
    except EngineError:  # the names before 0.5.5
        model, info = await client.ask("/get_model_info", server=server), "/get_server_info"
    details = await client.ask(info, server=server)
    path = model.get("model_path")
    if not isinstance(path, str):
        raise EngineError(f"{server} names no model_path; is it a SGLang server?")
    served = str(model.get("served_model_name") or details.get("served_model_name") or path)
    if teacher not in (path, served):
        raise EngineError(
            f"{server} does not serve {teacher!r} but {served} ({path}); give that as --teacher"
        )
    weights = str(model.get("weight_version") or "")
    return TeacherDescription(
        version=f"sglang {details.get('version')} (server)",
        fingerprint={"name": served, "path": path, "weights": weights},
    )


def parse_generate(answer: dict, prompt: list[int]) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """(ids, logprobs) per prompt position from an answer of /generate; None at position 0.

    Raises:
        EngineError: the answer is not one to this prompt, or not of the expected form.
    """
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError("SGLang's answer has no meta_info; is it a SGLang server?")
    count = meta.get("prompt_tokens")
    if count is not None and count != len(prompt):
        raise EngineError(f"SGLang read {count} prompt tokens where {len(prompt)} were sent")
    try:
        if "input_top_logprobs_val_flat_b64" in meta:
            lists = _flat(meta, _decoded(meta, "val", "<f4"), _decoded(meta, "idx", "<i4"))
        elif "input_top_logprobs_val_flat" in meta:
            values = np.asarray(meta["input_top_logprobs_val_flat"], np.float32)
            lists = _flat(meta, values, np.asarray(meta["input_top_logprobs_idx_flat"], np.int64))
        elif isinstance(meta.get("input_top_logprobs"), list):
            lists = [_nested(position) for position in meta["input_top_logprobs"]]
        else:
            raise EngineError(
                "SGLang's answer has no input_top_logprobs; it must be asked with "
                "logprob_start_len 0 by a client that its server lets see log-probabilities"
            )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"SGLang's input log-probabilities are malformed: {error!r}") from error
    if len(lists) != len(prompt):
        raise EngineError(
            f"SGLang returned log-probabilities for {len(lists)} positions of a prompt of "
            f"{len(prompt)} tokens; a cached prefix loses them: start the server with "
            "--disable-radix-cache"
        )
    return lists


def token_logprobs(answer: dict, prompt: list[int]) -> list[float | None]:
    """The log-probability of each token of the prompt; None at position 0.

    Raises:
        EngineError: They are missing, or another prompt's.
    """
    entries = answer["meta_info"].get("input_token_logprobs")
    try:
        if [int(entry[1]) for entry in entries] != prompt:
            raise EngineError("SGLang's input_token_logprobs are those of another prompt")
        return [None if entry[0] is None else float(entry[0]) for entry in entries]
    except (TypeError, IndexError, ValueError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"SGLang's input_token_logprobs are malformed: {error!r}") from error


def _decoded(meta: dict, name: str, dtype: str) -> np.ndarray:
    key = f"input_top_logprobs_{name}_flat_b64"
    sent = np.dtype(meta.get(f"{key}_dtype", dtype)).newbyteorder("<")
    return np.frombuffer(base64.b64decode(meta[key], validate=True), sent)


def _flat(meta: dict, values: np.ndarray, ids: np.ndarray) -> list:
    rows, width = meta["input_top_logprobs_shape"]
    empty = meta["input_top_logprobs_null_prefix"]
    if values.size != rows * width or ids.size != rows * width:
        raise EngineError(
            f"SGLang's flat arrays hold {values.size} values and {ids.size} ids where their shape "
            f"says {rows} × {width}"
        )
    pairs = zip(ids.reshape(rows, width).astype(np.int64), values.reshape(rows, width), strict=True)
    return [None] * empty + list(pairs)


def _nested(position: list | None) -> tuple[np.ndarray, np.ndarray] | None:
    if position is None:
        return None
    return (
        np.array([entry[1] for entry in position], np.int64),
        np.array([entry[0] for entry in position], np.float32),
    )

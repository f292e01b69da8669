"""Rows from engines that list candidates per prompt position: checks, and exactly the K largest of
what came.

Such an engine's list at prompt position t + 1 is the distribution of tokens[t + 1] given tokens[0
.. t]: row t.
"""

from collections.abc import Sequence

import numpy as np

from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherDocument, TeacherRows

# Beyond its rows a prompt takes a token after the last one, and the server one to generate.
PROMPT_EXTRA_TOKENS = 2
# What servers write for -inf, which JSON cannot hold (vLLM: -9999.0).
STANDS_FOR_IMPOSSIBLE = -9999.0


def refuse_unlisted(request: RowRequest, engine: str) -> None:
    """Refuses what candidate lists cannot give.

    Raises:
        EngineError: the request asks for draws, normalizers or hidden states.
    """
    if request.sampling != "topk":
        raise EngineError(
            f"the {engine} engine returns the largest candidates only; sampling {request.sampling} "
            "needs the transformers or megatron engine"
        )
    if request.temperatures or request.hidden:
        raise EngineError(
            f"the {engine} engine reports neither normalizers at other temperatures nor hidden "
            "states; use the transformers or megatron engine, or leave out --temperatures and "
            "--hidden-dtype"
        )


def prompt_of(document: TeacherDocument) -> list[int]:
    """Token ids to send so that every asked row has a prompt position after it.

    A row at the document's end has none: id 0 is put there. Row t depends on tokens[0 .. t] alone,
    so it changes nothing.
    """
    tokens = document.tokens[: document.run_tokens + 1].tolist()
    if len(tokens) == document.run_tokens:
        tokens.append(0)
    return tokens


def rows_of_response(
    lists: Sequence[tuple[np.ndarray, np.ndarray]],
    tokens: Sequence[int],
    request: RowRequest,
    engine: str,
) -> TeacherRows:
    """Rows of a response from one (ids, logprobs) pair per token of it, which lists that token.

    Raises:
        EngineError: As `rows_from_lists`; or they are fewer than the tokens.
    """
    tokens = [0, *map(int, tokens)]  # what stands before the response gives the first of its rows
    document = TeacherDocument(np.asarray(tokens, np.int32), np.arange(len(tokens) - 1))
    return rows_from_lists([None, *lists], document, request, engine, prompt=tokens)


def rows_from_lists(
    lists: Sequence[tuple[np.ndarray, np.ndarray] | None],
    document: TeacherDocument,
    request: RowRequest,
    engine: str,
    *,
    prompt: list[int] | None = None,
    prompt_logprobs: Sequence[float | None] | None = None,
) -> TeacherRows:
    """Rows of a document from one (ids, logprobs) pair per prompt position.

    Pairs may hold more than K entries, in any order, with the prompt's own token listed twice, and
    -9999.0 for a token that cannot come: its slot is unused, as one of -inf is.

    Args:
        prompt: Given where the engine lists the prompt's own token at each position: then rows of
            another position, or of another prompt, are found out.
        prompt_logprobs: The log-probability of the token at each prompt position, where the engine
            gives it beside its lists.

    Raises:
        EngineError: a position is missing, short of K, holds padding ids, is no distribution, or is
            not the prompt's.
    """
    wanted = min(request.topk, request.vocab_size)
    ids = np.empty((len(document.rows), wanted), np.int32)
    logprobs = np.empty((len(document.rows), wanted), np.float32)
    labels = document.labels() if request.labels else None
    label_logprobs = None if labels is None else np.empty(len(document.rows), np.float32)
    for line, row in enumerate(document.rows):
        entry = lists[row + 1] if row + 1 < len(lists) else None
        if entry is None or not len(entry[0]):
            raise EngineError(
                f"{engine} returned no candidates for prompt position {row + 1} of {len(lists)}: "
                "prompt log-probabilities are lost where a server reuses cached prefixes; turn "
                "its prefix caching off"
            )
        if prompt is not None and prompt[row + 1] not in entry[0]:
            raise EngineError(
                f"{engine} did not list the prompt's own token {prompt[row + 1]} at position "
                f"{row + 1}, as it always does: these are not that position's candidates"
            )
        distinct, first = np.unique(entry[0], return_index=True)
        values = np.asarray(entry[1], np.float32)[first]
        values[values <= STANDS_FOR_IMPOSSIBLE] = -np.inf
        _check(distinct, values, wanted, row, request, engine)
        if labels is not None:
            place = np.flatnonzero(distinct == labels[line])
            value = (
                values[place[0]] if len(place) else (prompt_logprobs or {row + 1: None})[row + 1]
            )
            if not isinstance(value, float | np.floating) or not value <= 1e-3:
                raise EngineError(
                    f"{engine}, prompt position {row + 1}: no log-probability came of its token "
                    f"{labels[line]}; leave out --label-logprob"
                )
            label_logprobs[line] = -np.inf if value <= STANDS_FOR_IMPOSSIBLE else value
        ids[line], logprobs[line] = (
            part[0] for part in order_rows(distinct[None], values[None], wanted)
        )
    if request.top_p < 1.0:
        mass = np.exp(logprobs.astype(np.float64))
        cut = mass.cumsum(-1) - mass >= request.top_p
        ids[cut], logprobs[cut] = -1, -np.inf
    unused = np.isneginf(logprobs)
    ids[unused] = -1
    return TeacherRows(ids, logprobs, label_logprobs=label_logprobs)


def _check(
    ids: np.ndarray, values: np.ndarray, wanted: int, row: int, request: RowRequest, engine: str
) -> None:
    place = f"{engine}, prompt position {row + 1}"
    if len(ids) < wanted:
        raise EngineError(
            f"{place}: {len(ids)} candidates came for {wanted} asked; raise the server's limit "
            f"(vLLM: --max-logprobs {wanted}) or lower --topk"
        )
    if ids[0] < 0 or ids[-1] >= request.vocab_size:
        bad = int(ids[0] if ids[0] < 0 else ids[-1])
        raise EngineError(
            f"{place}: id {bad} lies outside the vocabulary of {request.vocab_size}. A server "
            "cannot mask the padding rows of its teacher's output layer: capture this teacher "
            "with the transformers engine"
        )
    if np.isnan(values).any() or values.max() > 1e-3:
        raise EngineError(
            f"{place}: not log-probabilities (largest {values.max():.4g}, expected at most 0)"
        )
    if np.exp(values.astype(np.float64)).sum() > 1.01:
        raise EngineError(
            f"{place}: the candidates' probabilities add up to more than one; the server must "
            "report log-probabilities at temperature 1 (vLLM: --logprobs-mode raw_logprobs)"
        )


def order_rows(ids: np.ndarray, logprobs: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """The first K of candidate lists by falling log-probability, ties by smaller id.

    Args:
        ids: [r, ≥ k] integers, distinct along the row, -1 in unused slots.
        logprobs: [r, ≥ k] fp32, -inf in unused slots.

    Returns:
        [r, k] int32 and [r, k] fp32.
    """
    order = np.lexsort((ids, -logprobs), axis=-1)[:, :topk]
    return (
        np.take_along_axis(ids, order, -1).astype(np.int32),
        np.take_along_axis(logprobs, order, -1).astype(np.float32),
    )

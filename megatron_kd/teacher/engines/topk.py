"""From a chunk of logits to what is kept of it: the K largest, or K draws.

Letters: r rows, n rows of a chunk, v vocabulary, h hidden size, k kept candidates.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherRows

# fp32 copies of a chunk of logits that live at once while it is selected from.
_LOGIT_COPIES = 4


class Selected(NamedTuple):
    """What is kept of r rows of logits."""

    ids: torch.Tensor
    """[r, k] int32."""
    logprobs: torch.Tensor
    """[r, k] fp32."""
    log_z: dict[float, torch.Tensor]
    """Per temperature the normalizer [r] fp32."""
    label_logprobs: torch.Tensor | None
    """[r] fp32 of the next tokens; None without them."""


def chunk_rows(chunk_bytes: int, output_rows: int) -> int:
    """How many rows of hidden states may be turned into logits at once.

    Args:
        chunk_bytes: Bound on what their logits take, with the copies that selecting makes.
        output_rows: Columns of the logits.
    """
    return max(1, chunk_bytes // (output_rows * 4 * _LOGIT_COPIES))


def select_by_chunks(
    hidden_states: torch.Tensor,
    request: RowRequest,
    uniforms: np.ndarray | None,
    rows_at_once: int,
    select_chunk: Callable[[torch.Tensor, np.ndarray | None, np.ndarray | None], Selected],
    labels: np.ndarray | None = None,
) -> TeacherRows:
    """A document's rows, of which only a chunk is logits at a time.

    Args:
        hidden_states: [r, h], what the output layer reads at the asked rows.
        uniforms: [r, k] float64 from `draws_of`.
        rows_at_once: Rows of a chunk.
        select_chunk: What is kept of a chunk's hidden states [n, h] with its uniforms [n, k] and
            labels [n].
        labels: [r] int64, the token after each row; None does not ask for its log-probability.
    """
    chunks = []
    for start in range(0, len(hidden_states), rows_at_once):
        part = slice(start, start + rows_at_once)
        drawn = None if uniforms is None else uniforms[part]
        following = None if labels is None else labels[part]
        chunks.append(select_chunk(hidden_states[part], drawn, following))
    ids, logprobs, log_z, label_logprobs = zip(*chunks, strict=True)
    return TeacherRows(
        topk_ids=torch.cat(ids).cpu().numpy(),
        topk_logprobs=torch.cat(logprobs).cpu().numpy(),
        log_z={
            tau: torch.cat([chunk[tau] for chunk in log_z]).cpu().numpy()
            for tau in request.temperatures
        },
        label_logprobs=None if labels is None else torch.cat(label_logprobs).cpu().numpy(),
        hidden=hidden_states.float().cpu().numpy() if request.hidden else None,
    )


def select(
    logits: torch.Tensor,
    request: RowRequest,
    uniforms: np.ndarray | None = None,
    labels: np.ndarray | None = None,
) -> Selected:
    """Keeps what `request` asks of each row of logits.

    Args:
        logits: [r, ≥ vocab_size] of any float dtype; columns from vocab_size on are padding: their
            mass is counted in `request.beyond`, and nothing of it is kept.
        uniforms: [r, k] float64 in [0, 1), needed with sampling "random": one number per draw.
        labels: [r] int64, tokens whose log-probability is wanted, kept or not.

    Returns:
        Log-probabilities in nats under the whole vocabulary's normalizer, falling, ties by rising
        id, -1 and -inf in unused slots; normalizers log Σ_v exp(log p_v / τ).

    Raises:
        EngineError: the logits are narrower than vocab_size, hold NaN, or have most of a row's
            mass beyond.
    """
    if logits.shape[-1] < request.vocab_size:
        raise EngineError(
            f"the teacher has {logits.shape[-1]} output rows, fewer than the vocabulary size "
            f"{request.vocab_size}: this is not the teacher the data was tokenised for"
        )
    logprobs = logits[:, : request.vocab_size].float().log_softmax(-1)  # [r, v]
    if bool(torch.isnan(logprobs).any()):
        raise EngineError(
            "the teacher's logits hold NaN or infinity: a dtype it was not trained in (try "
            "--dtype bfloat16 or float32), or damaged weights"
        )
    if logits.shape[-1] > request.vocab_size:
        normalizer = logits[:, : request.vocab_size].amax(-1).float() - logprobs.amax(-1)  # [r]
        padding = logits[:, request.vocab_size :].float().logsumexp(-1)
        beyond = torch.sigmoid(padding - normalizer)
        request.beyond.add(beyond.cpu().numpy(), request.vocab_size)
    log_z = {tau: torch.logsumexp(logprobs / tau, -1) for tau in request.temperatures}
    if request.sampling == "random":
        ids, kept = _draw(logprobs, request.topk, uniforms)
    else:
        ids = largest(logprobs, request.topk)
        kept = logprobs.gather(-1, ids)
        kept = cut_mass(kept, request.top_p)
    unused = kept == -torch.inf
    label_logprobs = None
    if labels is not None:
        places = torch.as_tensor(labels, device=logprobs.device)[:, None]
        label_logprobs = logprobs.gather(-1, places)[:, 0]
    return Selected(ids.masked_fill(unused, -1).int(), kept, log_z, label_logprobs)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest values of each row, falling, ties by smaller id. [r, v] → [r,
    count] int64.

    torch.topk leaves it open which of several equal values it takes, and in bf16 the last place is
    often shared.
    """
    width = values.shape[-1]
    top = values.topk(min(count + 1, width), dim=-1)
    ids = top.indices[:, :count]
    if count < width:
        last = top.values[:, count - 1 : count]
        shared = (top.values[:, count:] == last).squeeze(-1)
        if bool(shared.any()):
            rows, last = values[shared], last[shared]
            above, equal = rows > last, rows == last
            room = count - above.sum(-1, keepdim=True)
            keep = above | (equal & (equal.cumsum(-1) <= room))
            ids = ids.clone()
            ids[shared] = keep.nonzero()[:, 1].view(-1, count)
    ids = ids.sort(-1).values
    order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def cut_mass(kept: torch.Tensor, top_p: float) -> torch.Tensor:
    """Falling log-probabilities [r, k] with those after the one that reaches top_p set to -inf."""
    if top_p >= 1.0:
        return kept
    mass = kept.double().exp()
    return kept.masked_fill(mass.cumsum(-1) - mass >= top_p, -torch.inf)


def merge_draws(ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws to distinct ids and the logarithms of their shares, falling; empty slots have -inf and
    id 0.

    Args:
        ids: [r, count] int64, ids drawn with replacement.
    """
    ids = ids.sort(-1).values
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    slot = first.long().cumsum(-1) - 1
    weights = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    weights.scatter_add_(-1, slot, torch.ones_like(weights))
    merged = torch.zeros_like(ids).scatter_(-1, slot, ids)
    kept = (weights / count).log()  # an empty slot: log 0 = -inf
    order = kept.sort(dim=-1, descending=True, stable=True).indices
    return merged.gather(-1, order), kept.gather(-1, order)


def _draw(
    logprobs: torch.Tensor, count: int, uniforms: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` draws with replacement from each row, by inverting its distribution function."""
    cumulative = logprobs.double().exp().cumsum(-1)  # [r, v]
    points = torch.from_numpy(uniforms).to(logprobs.device) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, points, right=True).clamp_(max=logprobs.shape[-1] - 1)
    return merge_draws(ids, count)

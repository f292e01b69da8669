"""What `topk.select` keeps, from logits whose vocabulary is shared out over tensor-parallel
ranks.

Letters: r rows, v vocabulary, vp this rank's part of it, k kept candidates.
"""

import numpy as np
import torch
import torch.distributed as dist

from megatron_kd.teacher.engines.base import EngineError, RowRequest
from megatron_kd.teacher.engines.topk import Selected, cut_mass, largest, merge_draws


def select_sharded(
    logits: torch.Tensor,
    first_id: int,
    request: RowRequest,
    uniforms: np.ndarray | None,
    group: dist.ProcessGroup,
    labels: np.ndarray | None = None,
) -> Selected:
    """What `topk.select` gives, from logits whose columns are shared out over a group.

    Args:
        logits: [r, vp], this rank's columns, the first of which is vocabulary id first_id.
        uniforms: [r, k] float64 in [0, 1) with sampling "random", the same on every rank.
        labels: [r] int64, the same on every rank: tokens whose log-probability is wanted.

    Returns:
        The same on every rank: ids [r, k] int32, log-probabilities [r, k] fp32, normalizers per
        temperature [r] fp32. The mass beyond the vocabulary is counted in `request.beyond`.
    """
    width = min(max(request.vocab_size - first_id, 0), logits.shape[-1])
    logits, padding = logits[:, :width].float(), logits[:, width:].float()
    lowest = logits.new_full(logits.shape[:1], -torch.inf)
    top = logits.amax(-1) if width else lowest
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    total = (logits - top[:, None]).exp().sum(-1)
    dist.all_reduce(total, group=group)
    if not bool(torch.isfinite(total).all()):
        raise EngineError("the teacher's logits hold NaN or infinity; try --dtype float32")
    logprobs = logits - (top + total.log())[:, None]  # [r, width]
    # Relative to what is kept; a rank without padding rows adds nothing.
    beyond = (padding - (top + total.log())[:, None]).exp().sum(-1)
    dist.all_reduce(beyond, group=group)
    request.beyond.add((beyond / (1 + beyond)).nan_to_num(1.0).cpu().numpy(), request.vocab_size)
    log_z = {
        tau: torch.logsumexp(_gathered(torch.logsumexp(logprobs / tau, -1)[:, None], group), -1)
        for tau in request.temperatures
    }
    if request.sampling == "random":
        ids, kept = merge_draws(_draw_sharded(logprobs, first_id, uniforms, group), request.topk)
    else:
        local = largest(logprobs, min(request.topk, width)) if width else logprobs.long()
        missing = request.topk - local.shape[-1]
        values = torch.nn.functional.pad(logprobs.gather(-1, local), (0, missing), value=-torch.inf)
        local = torch.nn.functional.pad(local + first_id, (0, missing), value=request.vocab_size)
        ids, kept = _gathered(local, group), _gathered(values, group)  # [r, k · group]
        by_id = ids.sort(-1).indices
        ids, kept = ids.gather(-1, by_id), kept.gather(-1, by_id)
        order = kept.sort(dim=-1, descending=True, stable=True).indices[:, : request.topk]
        ids, kept = ids.gather(-1, order), cut_mass(kept.gather(-1, order), request.top_p)
    unused = kept == -torch.inf
    label_logprobs = None
    if labels is not None:
        places = torch.as_tensor(labels, device=logits.device) - first_id
        is_local = (places >= 0) & (places < width)
        label_logprobs = torch.full_like(top, -torch.inf)
        label_logprobs[is_local] = logprobs[is_local, places[is_local]]
        dist.all_reduce(label_logprobs, op=dist.ReduceOp.MAX, group=group)
    return Selected(ids.masked_fill(unused, -1).int(), kept, log_z, label_logprobs)


def _draw_sharded(
    logprobs: torch.Tensor, first_id: int, uniforms: np.ndarray, group: dist.ProcessGroup
) -> torch.Tensor:
    """[r, k] ids; each draw falls on the one rank whose stretch of the distribution function holds
    it."""
    mass = logprobs.double().exp()
    shares = _gathered(mass.sum(-1, keepdim=True), group)  # [r, group]
    ends = shares.cumsum(-1)
    points = torch.from_numpy(uniforms).to(mass.device) * ends[:, -1:]
    owner = torch.searchsorted(ends, points, right=True)
    last_used = (shares > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    owner = torch.minimum(owner, last_used)
    is_local = owner == group.rank()
    ids = torch.full(points.shape, -1, dtype=torch.long, device=mass.device)
    if mass.shape[-1]:
        before = (ends - shares)[:, group.rank() : group.rank() + 1]
        found = torch.searchsorted(mass.cumsum(-1), points - before, right=True)
        ids = torch.where(is_local, found.clamp_(max=mass.shape[-1] - 1) + first_id, ids)
    dist.all_reduce(ids, op=dist.ReduceOp.MAX, group=group)
    return ids


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[r, n] of each rank → [r, n · group]."""
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, -1)

"""The paper's fused top-K loss, written plainly: what this package's heads are measured against.

    L = sum_S p log p - sum_S p z + M log Z            dL/dz = M softmax(z) - p

The paper's text forms log Z and z_S in one projection and recomputes the logits in the backward
pass: four products. Its Algorithm 1 projects twice in the forward pass: five. Both sum dW in fp32.

Shapes: s sequence, h hidden, vp = v / tp, k support, n rows of a chunk.

Source: arXiv 2608.03796, Eq. (2) and (3) and Algorithm 1.
"""

import torch
import torch.distributed as dist

from megatron_kd.tools.benchmark.inputs import Inputs


def text(inputs: Inputs):
    return _loss(inputs, projections=1)


def algorithm_1(inputs: Inputs):
    return _loss(inputs, projections=2)


def _loss(inputs: Inputs, projections: int):
    ids, logprobs = (x.squeeze(1) for x in (inputs.target.ids, inputs.target.logprobs))
    here = (ids >= inputs.start) & (ids < inputs.stop)
    support = torch.where(here, ids - inputs.start, 0), here, logprobs
    return _PaperLoss.apply(
        inputs.hidden, inputs.weight, support, inputs.chunk_tokens, projections, inputs.group
    ).mean()


class _PaperLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, support, chunk, projections, group):
        h, (index, here, logprobs) = hidden.squeeze(1), support  # [s, h], [s, k] each
        log_z, loss = (h.new_empty(len(h), dtype=torch.float32) for _ in range(2))

        def loss_of(z, part):
            return _loss_of(z, index[part], here[part], logprobs[part], log_z[part], group)

        for part in _chunks(len(h), chunk):
            z = (h[part] @ weight.T).float()  # [n, vp]
            log_z[part] = _log_sum_exp(z, group)
            if projections == 1:
                loss[part] = loss_of(z, part)
        if projections == 2:
            for part in _chunks(len(h), chunk):
                loss[part] = loss_of((h[part] @ weight.T).float(), part)
        ctx.save_for_backward(hidden, weight, index, here, logprobs, log_z)
        ctx.chunk, ctx.group = chunk, group
        return loss

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, index, here, logprobs, log_z = ctx.saved_tensors
        h = hidden.squeeze(1)
        d_hidden = torch.empty_like(h)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(len(h), ctx.chunk):
            p = logprobs[part].exp()  # [n, k]
            z = (h[part] @ weight.T).float()
            dz = (z - log_z[part].unsqueeze(-1)).exp() * (p.sum(-1) * upstream[part]).unsqueeze(-1)
            on_support = torch.where(here[part], p * upstream[part].unsqueeze(-1), 0.0)
            dz.scatter_add_(-1, index[part], -on_support)
            dz = dz.to(weight.dtype)
            d_hidden[part] = dz @ weight
            if weight.dtype == torch.float32:
                d_weight.addmm_(dz.T, h[part])
            else:
                d_weight += dz.T @ h[part]
        if ctx.group is not None:
            dist.all_reduce(d_hidden, group=ctx.group)
        return d_hidden.unsqueeze(1), d_weight.to(weight.dtype), None, None, None, None


def _chunks(rows: int, size: int):
    return (slice(i, i + size) for i in range(0, rows, size))


def _log_sum_exp(z, group):  # [n, vp] -> [n], over all ranks
    top = z.amax(-1)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    total = (z - top.unsqueeze(-1)).exp().sum(-1)
    if group is not None:
        dist.all_reduce(total, group=group)
    return top + total.log()


def _loss_of(z, index, here, logprobs, log_z, group):  # -> [n]
    p = logprobs.exp()
    on_support = (p * torch.where(here, z.gather(-1, index), 0.0)).sum(-1)
    if group is not None:
        dist.all_reduce(on_support, group=group)
    return (p * logprobs).sum(-1) - on_support + p.sum(-1) * log_z

"""What a run must compute, in fp64 and plain PyTorch, from the definitions in docs/objectives.md.

None of the package's losses is used here: logits come from Hugging Face's model, the divergence is
written out over its outcomes, and autograd and one line of SGD do the rest.

n: supervised rows of a global batch, v: vocabulary, o: outcomes of a divergence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import comparison
import torch

from megatron_kd.cache import CacheReader
from megatron_kd.data.sequences import SequenceReader

FLOOR = 2.0**-23  # of the teacher's mass off its support, where reverse KL takes its logarithm


@dataclass(frozen=True)
class Options:
    """The loss options of a recipe, by their own names."""

    objective: str = "forward_kl"
    tail: str = "none"
    temperature: float = 1.0
    temperature_squared: bool = False
    beta: float = 0.5
    ce_weight: float = 0.0


@dataclass
class Step:
    """One training step: means over the global batch's supervised tokens, and the gradient."""

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]

    @property
    def grad_norm(self) -> float:
        return torch.stack([g.norm() for g in self.gradients.values()]).norm().item()


def train(
    directory: Path,
    options: Options | Callable[[int], Options],
    batches: list[range],
    *,
    cache=None,
    teacher=None,
    lr: float,
    source_of: Callable[[int], str] | None = None,
    vocab_size: int | None = None,
) -> list[Step]:
    """Train the small world's student by SGD, one step for each batch.

    Args:
        directory: The small world's.
        options: Of all samples, or of each by its index.
        batches: Indices of the samples of each global batch.
        cache: Directory of the teacher's rows, or what reads them; offline.
        teacher: The resident teacher in fp64; online.
        source_of: The name of the cache of each sample, by its index.
        vocab_size: The student's output rows from here on are padding.
    """
    student = comparison.student(directory / "student")
    if cache is None:
        reader = SequenceReader(directory / "data/train")
    else:
        reader = CacheReader(cache) if isinstance(cache, Path) else cache
    options_of = options if callable(options) else lambda index: options
    steps = []
    for batch in batches:
        kd, ce, masses, by_source = [], [], [], {}
        for index in batch:
            options = options_of(index)
            sample = reader[index]
            tokens = torch.tensor(sample.tokens, dtype=torch.int64)
            rows = torch.as_tensor(sample.loss_mask).nonzero().squeeze(-1)  # [n]
            z = student(tokens[None]).logits[0, rows, :vocab_size]  # [n, v]
            if teacher is None:
                divergence, mass = from_rows(z, sample, rows, options)
                masses.append(mass)
            else:
                with torch.no_grad():
                    y = teacher(tokens[None]).logits[0, rows]
                tau = options.temperature
                p, q = torch.softmax(y / tau, -1), torch.softmax(z / tau, -1)
                divergence = between(p, q, options)
            if options.temperature_squared:
                divergence = divergence * options.temperature**2
            kd.append(divergence)
            if source_of is not None:
                by_source.setdefault(f"kd loss/{source_of(index)}", []).append(divergence)
            ce.append(-torch.log_softmax(z, -1).gather(-1, tokens[rows + 1, None])[:, 0])
        kd, ce = torch.cat(kd).mean(), torch.cat(ce).mean()
        alpha = options.ce_weight
        total = (1 - alpha) * kd + alpha * ce
        student.zero_grad()
        total.backward()
        losses = {"kd loss": kd.item(), "lm loss": ce.item(), "total loss": total.item()}
        losses |= {name: torch.cat(parts).mean().item() for name, parts in by_source.items()}
        if masses:
            means = torch.cat(masses, dim=-1).mean(-1)  # [2]
            losses |= dict(zip(("student mass", "teacher mass"), means.tolist(), strict=True))
        gradients = {name: p.grad.clone() for name, p in student.named_parameters()}
        steps.append(Step(losses, gradients))
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= lr * parameter.grad
    return steps


def from_rows(z: torch.Tensor, sample, rows: torch.Tensor, options: Options):
    """The divergence [n] of logits z [n, v] from a cached sample, and both masses [2, n]."""
    tau = options.temperature
    ids = torch.as_tensor(sample.topk_ids, dtype=torch.int64)[rows]
    log_p = torch.as_tensor(sample.topk_logprobs, dtype=torch.float64)[rows]
    used = (ids >= 0).all(0)  # a mixture widens the rows of a cache of fewer candidates
    ids, log_p = ids[:, used], log_p[:, used]
    if tau != 1 and tau in sample.log_z:
        normalizer = torch.as_tensor(sample.log_z[tau], dtype=torch.float64)[rows, None]
        p = (log_p / tau - normalizer).exp()
    else:  # what is known: the mass at temperature 1, and the proportions on the support
        p = log_p.exp().sum(-1, keepdim=True) * torch.softmax(log_p / tau, -1)
    q = torch.softmax(z / tau, -1).gather(-1, ids)
    masses = torch.stack([q.sum(-1), p.sum(-1)]).detach()
    if options.tail == "renormalize":
        p = p / p.sum(-1, keepdim=True)
    elif options.tail == "bucket":
        rest = 1 - p.sum(-1, keepdim=True)
        p = torch.cat([p, rest.clamp(min=FLOOR) if options.objective == "reverse_kl" else rest], -1)
        q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
    return between(p, q, options), masses


def between(p: torch.Tensor, q: torch.Tensor, options: Options) -> torch.Tensor:
    """Σ over outcomes of teacher p and student q, [n, o] each → [n], in nats."""

    def kl(a, b):
        return (a * (a / b.clamp(min=1e-300)).clamp(min=1e-300).log()).sum(-1)

    if options.objective == "forward_kl":
        return kl(p, q)
    if options.objective == "reverse_kl":
        return kl(q, p)
    m = options.beta * p + (1 - options.beta) * q
    return options.beta * kl(p, m) + (1 - options.beta) * kl(q, m)

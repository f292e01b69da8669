"""What the equality tests compare runs with: weights tensor by tensor, and losses by definition."""

from pathlib import Path

import torch
import transformers
from backend import TOLERANCE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_kd.cache import CacheReader


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face directory, by name."""
    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(file)
    return found


def worst_weight_departure(start, a, b) -> float:
    """The largest difference of two trained models' weights, tensor by tensor relative to what
    training changed, beyond the rounding of the weights themselves.
    """
    assert start.keys() == a.keys() == b.keys()
    worst = 0.0
    for name, first in start.items():
        change = (a[name] - first).abs().max().item()
        difference = (a[name] - b[name]).abs().max().item()
        rounding = TOLERANCE.rounding * first.abs().max().item()
        if difference > rounding:
            worst = max(worst, (difference - rounding) / change if change else float("inf"))
    return worst


def student(directory: Path) -> torch.nn.Module:
    """A Hugging Face model in fp64, which computes what the host should."""
    # transformers 5 has grouped products for experts, which fp64 has not.
    plain = {"experts_implementation": "eager"} if transformers.__version__ >= "5" else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **plain).eval()


def plain_losses(directory: Path, run, split: str, samples, model=None):
    """(KD loss, loss to the label) of samples, mean over their supervised tokens, by definition.

    Args:
        directory: The small world's.
        run: Which student and data.
        samples: Indices in the cache.
        model: The student, for gradients; None loads it.
    """
    model = model or student(directory / run.student)
    folder = directory if run.data == "plain" else directory / run.data
    cache = CacheReader(folder / "cache" / split)
    kd = lm = tokens = 0.0
    for index in samples:
        sample = cache[index]
        ids = torch.as_tensor(sample.tokens, dtype=torch.int64)
        rows = torch.as_tensor(sample.loss_mask).nonzero().squeeze(-1)
        documents = ids.tensor_split(torch.as_tensor(sample.cu_seqlens[1:-1], dtype=torch.int64))
        logits = torch.cat([model(document[None]).logits[0] for document in documents])
        log_q = torch.log_softmax(logits, -1)[rows]
        support = torch.as_tensor(sample.topk_ids, dtype=torch.int64)[rows]
        log_p = torch.as_tensor(sample.topk_logprobs, dtype=torch.float64)[rows]
        kd += (log_p.exp() * (log_p - log_q.gather(-1, support))).sum()
        lm -= log_q.gather(-1, ids[rows + 1, None]).sum()
        tokens += len(rows)
    return kd / tokens, lm / tokens

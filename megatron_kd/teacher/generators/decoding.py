"""A Hugging Face model in this process that writes on, token by token.

transformers' own loop runs it, with its caches; which token comes next is decided here, from the
logits as the model gives them: nothing of the model's generation settings is applied but the tokens
that end a response.

Letters: b responses of a batch, s padded tokens of their prompts, v vocabulary, k kept candidates.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherRows
from megatron_kd.teacher.engines.topk import select
from megatron_kd.teacher.engines.transformers_model import load_model
from megatron_kd.teacher.generators.base import LENGTH, STOP, Prompt, Response, Sampling


class DecodedModel:
    """The model of a directory, loaded to write responses.

    Args:
        options: The Options of the engine that this is the second half of.

    Raises:
        EngineError: Weights are missing, the vocabulary is too small, or the model answers a prompt
            otherwise when padding stands before it.
    """

    def __init__(
        self,
        path: Path,
        sampling: Sampling,
        ends: Sequence[int],
        vocab_size: int,
        request: RowRequest | None,
        options,
    ):
        self.sampling, self.ends, self.vocab_size = sampling, list(ends), vocab_size
        self.request, self.options = request, options
        self.model = load_model(path, options)
        self.device = self.model.get_input_embeddings().weight.device
        self._check_padding(path)

    @torch.inference_mode()
    def run(self, wanted: list[tuple[Prompt, int]]) -> list[Response]:
        """The responses to (prompt, number of the sample) pairs, in one batch.

        Raises:
            EngineError: They do not fit into memory together, or the logits are no numbers.
        """
        draws = [draws_of(self.sampling.seed, prompt.number, j) for prompt, j in wanted]
        choice = _Choice(self.sampling, draws, self.vocab_size, self.request)
        try:
            written = self._write([prompt.tokens for prompt, _ in wanted], choice)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the model ran out of memory on a batch of {len(wanted)} responses; lower "
                f"--batch-tokens (now {self.options.batch_tokens})"
            ) from error
        rows = choice.rows()
        responses = []
        for line, tokens in enumerate(written.cpu().numpy().astype(np.int32)):
            found = np.flatnonzero(np.isin(tokens, self.ends))
            count = int(found[0]) + 1 if len(found) else len(tokens)
            responses.append(
                Response(
                    STOP if len(found) else LENGTH,
                    tokens[:count].copy(),
                    None if self.request is None else _of_line(rows, line, count),
                )
            )
        return responses

    def _write(self, prompts: list[np.ndarray], choice: "_Choice", new: int | None = None):
        """[b, new] int64; after a response's end whatever comes."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)  # [b, s]
        mask = torch.zeros_like(ids)
        for line, (row, tokens) in enumerate(zip(ids, prompts, strict=True)):
            row[width - len(tokens) :] = torch.from_numpy(tokens.astype(np.int64))
            mask[line, width - len(tokens) :] = 1
        # In place of the model directory's own settings, which would be applied beside ours.
        self.model.generation_config = settings = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=new or self.sampling.max_new_tokens,
            eos_token_id=self.ends or None,
            pad_token_id=0,
        )
        written = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=settings,
            logits_processor=transformers.LogitsProcessorList([choice]),
        )
        return written[:, width:]

    @torch.inference_mode()
    def _check_padding(self, path: Path) -> None:
        """Refuses a model for which padding before a prompt is not as if it were not there."""
        generator = np.random.Generator(np.random.Philox(0))
        short = generator.integers(self.vocab_size, size=5).astype(np.int32)
        long = generator.integers(self.vocab_size, size=9).astype(np.int32)
        request = RowRequest(topk=1, vocab_size=self.vocab_size, temperatures=(0.5, 2.0))
        seen = []
        for prompts in ([short], [short, long]):
            draws = [draws_of(0, 0, 0) for _ in prompts]
            # Greedy: a draw could fall on either side of a border.
            choice = _Choice(Sampling(temperature=0), draws, self.vocab_size, request)
            self._write(prompts, choice, new=1)
            rows = _of_line(choice.rows(), 0, 1)
            values = [rows.topk_logprobs[0, 0], *(rows.log_z[tau][0] for tau in (0.5, 2.0))]
            seen.append(np.array(values))
        if np.abs(seen[0] - seen[1]).max() > 0.05 * max(1.0, np.abs(seen[0]).max()):
            raise EngineError(
                f"{type(self.model).__name__} in {path} answers a prompt otherwise when padding "
                "stands before it; generate with another engine (vllm, sglang)"
            )


def draws_of(seed: int, number: int, sample: int) -> np.random.Generator:
    """The random numbers of one response."""
    return np.random.Generator(np.random.Philox(key=[seed, number], counter=[0, 0, 0, sample]))


class _Choice(transformers.LogitsProcessor):
    """Decides the next token of each response, and keeps what was asked of its distribution."""

    def __init__(self, sampling: Sampling, draws: list, vocab_size: int, request):
        self.sampling, self.draws = sampling, draws
        self.vocab_size, self.request = vocab_size, request
        self._kept = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [b, ≥ v] fp32, the model's logits → all -inf but the next token of each line."""
        if scores.shape[-1] < self.vocab_size:
            raise EngineError(
                f"the model has {scores.shape[-1]} output rows, fewer than the vocabulary size "
                f"{self.vocab_size}: this is not the model of that tokenizer"
            )
        logits = scores[:, : self.vocab_size]
        if bool(torch.isnan(logits).any()):
            raise EngineError(
                "the model's logits hold NaN: a dtype it was not trained in (try --dtype bfloat16 "
                "or float32), or damaged weights"
            )
        uniforms = [draw.random() for draw in self.draws]
        chosen = draw_tokens(logits, self.sampling, uniforms)
        if self.request is not None:
            labels = chosen if self.request.labels else None
            self._kept.append(select(logits, self.request, labels=labels))
        decided = torch.full_like(scores, -torch.inf)
        return decided.scatter_(-1, chosen[:, None], 0.0)

    def rows(self) -> TeacherRows | None:
        """[steps, b, k] of all steps; None where nothing was asked."""
        if self.request is None:
            return None
        ids, logprobs, log_z, label_logprobs = zip(*self._kept, strict=True)
        return TeacherRows(
            torch.stack(ids).cpu().numpy(),
            torch.stack(logprobs).cpu().numpy(),
            {
                tau: torch.stack([step[tau] for step in log_z]).cpu().numpy()
                for tau in self.request.temperatures
            },
            torch.stack(label_logprobs).cpu().numpy() if self.request.labels else None,
        )


def _of_line(rows: TeacherRows, line: int, count: int) -> TeacherRows:
    """The first rows of one response, from [steps, b, …]."""
    return TeacherRows(
        rows.topk_ids[:count, line],
        rows.topk_logprobs[:count, line],
        {tau: values[:count, line] for tau, values in rows.log_z.items()},
        None if rows.label_logprobs is None else rows.label_logprobs[:count, line],
    )


def draw_tokens(
    logits: torch.Tensor, sampling: Sampling, uniforms: Sequence[float]
) -> torch.Tensor:
    """One token per row, by inverting its distribution function: [b, v] → [b] int64.

    Args:
        uniforms: One number in [0, 1) per row.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = (logits.double() / sampling.temperature).softmax(-1)
    ids = None
    if sampling.top_k or sampling.top_p < 1.0:
        chances, ids = chances.sort(dim=-1, descending=True, stable=True)
        if sampling.top_k:
            chances = chances[:, : sampling.top_k]
            chances = chances / chances.sum(-1, keepdim=True)
        before = chances.cumsum(-1) - chances
        chances = chances.masked_fill(before >= sampling.top_p, 0.0)
    ends = chances.cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.double, device=logits.device)[:, None]
    place = torch.searchsorted(ends, points * ends[:, -1:], right=True)
    # A point that rounding puts at the very end belongs to the last token that can come.
    last = (chances > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    place = torch.minimum(place, last)
    return (place if ids is None else ids.gather(-1, place)).squeeze(-1)

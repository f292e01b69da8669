"""Full-vocabulary KL from teacher to students on held-out sequences, in nats per supervised token,
and how often the student's first choice is the next token, and the teacher's; without the host.

This compares students, whatever loss trained them: a top-K loss and a full-vocabulary loss are
different sums, the held-out KL is one.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from rich.table import Table

from megatron_kd.models.weight_files import check_weight_files
from megatron_kd.tools.console import table_console


@dataclass
class Scores:
    """Means over the supervised positions."""

    kl: float = 0.0
    """KL(teacher ‖ student) over the whole vocabulary, nats."""
    accuracy: float = 0.0
    """Share of positions whose most likely token is the one that follows."""
    agreement: float = 0.0
    """Share of positions whose most likely token is the teacher's."""


def add_arguments(parser) -> None:
    parser.add_argument("--teacher", required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--students", nargs="+", required=True, metavar="DIR")
    parser.add_argument("--data", required=True, metavar="DIR", help="one split of prepared data")


def run(args) -> int:
    from megatron_kd.data.sequences import SequenceReader

    models = [args.teacher, *args.students]  # the teacher's own scores are what can be reached
    results = held_out_scores(args.teacher, models, SequenceReader(args.data))
    table = Table(title=f"KL(teacher ‖ student) on {args.data}")
    table.add_column("model")
    for column in ("nats/token", "next token", "teacher's first"):
        table.add_column(column, justify="right")
    for student, scores in results.items():
        table.add_row(
            student, f"{scores.kl:.4f}", f"{scores.accuracy:.2%}", f"{scores.agreement:.2%}"
        )
    table_console().print(table)
    return 0


def held_out_scores(
    teacher: str, students: list[str], sequences, *, limit: int | None = None
) -> dict[str, Scores]:
    """Scores of every student, by its directory; all models are in memory at once.

    Args:
        teacher, students: Hugging Face directories of causal language models of one tokenizer,
            whose padding rows do not count. The teacher may be among the students.
        sequences: Prepared sequences, by index. Block-packed documents are read one by one, as
            they were captured and trained.
        limit: Read only this many, evenly spaced.

    Raises:
        ValueError: A model has fewer output rows than the tokenizer ids, or nothing is supervised.
    """
    import torch  # slow to import, as transformers is: not for --help
    from transformers import AutoModelForCausalLM

    vocab_size = sequences.manifest["vocab_size"]

    def load(directory):
        check_weight_files(Path(directory))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        rows = model.config.get_text_config().vocab_size
        if rows < vocab_size:
            raise ValueError(
                f"{directory} has {rows} output rows, fewer than the {vocab_size} ids of the "
                "tokenizer that the sequences were prepared with: compare models of that tokenizer"
            )
        return model

    def log_softmax(model, inputs, kept):
        return torch.log_softmax(model(inputs).logits[0, :-1, :vocab_size][kept], -1)

    reference = load(teacher)
    models = {name: reference if name == teacher else load(name) for name in students}
    totals, tokens = {name: Scores() for name in students}, 0
    with torch.no_grad():
        for inputs, kept in _texts(sequences, limit):
            following = inputs[0, 1:][kept]
            log_p = log_softmax(reference, inputs, kept)
            tokens += len(following)
            for name, model in models.items():
                log_q = log_softmax(model, inputs, kept)
                first = log_q.argmax(-1)
                total = totals[name]
                total.kl += (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64).item()
                total.accuracy += (first == following).sum().item()
                total.agreement += (first == log_p.argmax(-1)).sum().item()
    if not tokens:
        raise ValueError("no position of the sequences is supervised; give a split with some")
    means = {field.name for field in fields(Scores)}
    return {
        name: Scores(**{mean: getattr(total, mean) / tokens for mean in means})
        for name, total in totals.items()
    }


def _texts(sequences, limit: int | None):
    """Every text that a model reads at once: (tokens [1, n], whether supervised [n − 1])."""
    import torch

    apart = sequences.manifest["packing"] == "block"
    count = len(sequences) if limit is None else min(limit, len(sequences))
    for index in [round(i * len(sequences) / count) for i in range(count)]:
        sample = sequences[index]
        tokens = torch.tensor(sample.tokens, dtype=torch.int64)
        kept = torch.tensor(sample.loss_mask, dtype=torch.bool)
        bounds = sample.cu_seqlens.tolist() if apart else [0, len(tokens)]
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            yield tokens[None, begin:end], kept[begin : end - 1]

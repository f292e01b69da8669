"""Full-vocabulary KL from teacher to students on held-out sequences, in nats per supervised token,
without the host.

This compares students, whatever loss trained them: a top-K loss and a full-vocabulary loss are
different sums, the held-out KL is one.
"""

import torch
from rich.console import Console
from rich.table import Table


def add_arguments(parser) -> None:
    parser.add_argument("--teacher", required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--students", nargs="+", required=True, metavar="DIR")
    parser.add_argument("--data", required=True, metavar="DIR", help="one split of prepared data")


def run(args) -> int:
    from megatron_kd.data.sequences import SequenceReader

    results = held_out_kl(args.teacher, args.students, SequenceReader(args.data))
    table = Table(title=f"held-out KL(teacher ‖ student), {args.data}")
    table.add_column("student")
    table.add_column("nats/token", justify="right")
    for student, value in results.items():
        table.add_row(student, f"{value:.4f}")
    Console().print(table)
    return 0


@torch.no_grad()
def held_out_kl(teacher: str, students: list[str], sequences) -> dict[str, float]:
    """Mean over the supervised positions of KL(teacher ‖ student) over the whole vocabulary.

    Args:
        teacher, students: Hugging Face directories of causal language models with one vocabulary.
        sequences: Prepared sequences, by index.

    Raises:
        ValueError: A student has another vocabulary than the teacher.
    """
    from transformers import AutoModelForCausalLM

    def load(directory):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    models = {name: load(name) for name in students}
    reference = load(teacher)
    totals, tokens = dict.fromkeys(students, 0.0), 0
    for index in range(len(sequences)):
        sample = sequences[index]
        inputs = torch.as_tensor(sample.tokens, dtype=torch.int64)[None]
        kept = torch.as_tensor(sample.loss_mask, dtype=torch.bool)
        log_p = torch.log_softmax(reference(inputs).logits[0, kept].double(), -1)
        tokens += int(kept.sum())
        for name, model in models.items():
            logits = model(inputs).logits[0, kept].double()
            if logits.shape != log_p.shape:
                raise ValueError(
                    f"{name} has a vocabulary of {logits.shape[-1]}, the teacher of "
                    f"{log_p.shape[-1]}; compare models with one vocabulary"
                )
            log_q = torch.log_softmax(logits, -1)
            totals[name] += (log_p.exp() * (log_p - log_q)).sum().item()
    return {name: total / tokens for name, total in totals.items()}

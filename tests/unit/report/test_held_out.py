"""Held-out scores against their definitions, position by position."""

import pytest
import torch
from small_report import TEXT, VOCAB, llama, write_sequences
from transformers import LlamaForCausalLM

from megatron_kd.cli import main
from megatron_kd.data.sequences import SequenceReader
from megatron_kd.tools.report.held_out import held_out_scores


def expected(teacher, student, texts):
    """(KL, accuracy, agreement) by the definitions; texts: (tokens, supervised rows) each."""
    models = [LlamaForCausalLM.from_pretrained(each).eval() for each in (teacher, student)]
    kl, right, agreed, count = 0.0, 0, 0, 0
    for tokens, rows in texts:
        with torch.no_grad():
            p, q = (model(torch.tensor([tokens])).logits[0].double() for model in models)
        for row in rows:
            a, b = p[row].softmax(-1), q[row].softmax(-1)
            kl += sum(float(x * (x / y).log()) for x, y in zip(a, b, strict=True))
            right += int(b.argmax()) == tokens[row + 1]
            agreed += int(b.argmax()) == int(a.argmax())
            count += 1
    return [value / count for value in (kl, right, agreed)]


@pytest.mark.parametrize(
    ("packing", "texts"),
    [
        ("naive", [(TEXT, [0, 2, 3, 6, 7])]),
        ("block", [(TEXT[:5], [0, 2, 3]), (TEXT[5:], [1, 2])]),
    ],
)
def test_scores_are_their_definitions(tmp_path, models, packing, texts):
    mask = [row in (0, 2, 3, 6, 7) for row in range(len(TEXT))]
    data = write_sequences(tmp_path / "validation", packing, [(TEXT, mask, [0, 5, len(TEXT)])])
    students = [models["a"], models["b"], models["teacher"]]
    scores = held_out_scores(models["teacher"], students, SequenceReader(data))
    for student in students:
        got = scores[student]
        want = expected(models["teacher"], student, texts)
        assert [got.kl, got.accuracy, got.agreement] == pytest.approx(want, abs=1e-5)
    assert scores[models["teacher"]].kl == pytest.approx(0, abs=1e-9)
    assert scores[models["teacher"]].agreement == 1


def test_a_limit_reads_evenly_spaced_sequences(tmp_path, models):
    mask = [True] * (len(TEXT) - 1) + [False]
    texts = [[(token + shift) % VOCAB for token in TEXT] for shift in range(5)]
    data = write_sequences(
        tmp_path / "data", "none", [(text, mask, [0, len(text)]) for text in texts]
    )
    rows = range(len(TEXT) - 1)
    for limit, read in ((2, [0, 2]), (5, range(5)), (9, range(5)), (None, range(5))):
        got = held_out_scores(models["teacher"], [models["a"]], SequenceReader(data), limit=limit)[
            models["a"]
        ]
        want = expected(models["teacher"], models["a"], [(texts[i], rows) for i in read])
        assert [got.kl, got.accuracy, got.agreement] == pytest.approx(want, abs=1e-5)


def test_padding_rows_do_not_count(tmp_path, models):
    wide = llama(tmp_path / "wide", 5, vocab=VOCAB + 3)
    model = LlamaForCausalLM.from_pretrained(wide)
    model.resize_token_embeddings(VOCAB)
    model.save_pretrained(tmp_path / "cut")
    mask = [True] * (len(TEXT) - 1) + [False]
    data = write_sequences(tmp_path / "data", "none", [(TEXT, mask, [0, len(TEXT)])])
    got = held_out_scores(models["teacher"], [wide], SequenceReader(data))[wide]
    want = expected(models["teacher"], tmp_path / "cut", [(TEXT, range(len(TEXT) - 1))])
    assert [got.kl, got.accuracy, got.agreement] == pytest.approx(want, abs=1e-5)


def test_another_vocabulary_and_nothing_to_score_are_refused(tmp_path, models):
    other = llama(tmp_path / "other", 5, vocab=VOCAB - 1)
    mask = [True] * (len(TEXT) - 1) + [False]
    data = write_sequences(tmp_path / "data", "none", [(TEXT, mask, [0, len(TEXT)])])
    with pytest.raises(ValueError, match="39 output rows, fewer than the 40 ids"):
        held_out_scores(models["teacher"], [other], SequenceReader(data))
    empty = write_sequences(tmp_path / "empty", "none", [(TEXT, [False] * 9, [0, len(TEXT)])])
    with pytest.raises(ValueError, match="no position of the sequences is supervised"):
        held_out_scores(models["teacher"], [models["a"]], SequenceReader(empty))


def test_the_command_shows_the_teachers_own_scores_beside_the_students(tmp_path, models, capsys):
    mask = [True] * (len(TEXT) - 1) + [False]
    data = write_sequences(tmp_path / "data", "none", [(TEXT, mask, [0, len(TEXT)])])
    teacher, student = models["teacher"], models["a"]
    arguments = ["held-out-kl", "--teacher", teacher, "--students", student, "--data", str(data)]
    assert main(arguments) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    of_teacher, of_student = ([cell.strip() for cell in row[2:5]] for row in rows[-2:])
    _, accuracy, _ = expected(teacher, teacher, [(TEXT, range(len(TEXT) - 1))])
    assert of_teacher == ["0.0000", f"{accuracy:.2%}", "100.00%"]
    kl, _, agreement = expected(teacher, student, [(TEXT, range(len(TEXT) - 1))])
    assert (of_student[0], of_student[2]) == (f"{kl:.4f}", f"{agreement:.2%}")

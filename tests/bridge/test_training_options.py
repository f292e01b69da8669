"""A frozen body, keeping the best checkpoint, early stopping, and what is measured on the way."""

import json

import pytest
import torch
from backend import TOLERANCE
from launch import Curves, run_cases
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.extended

RECOMPUTED = {
    "full": [
        "bridge.model.recompute_granularity=full",
        "bridge.model.recompute_method=uniform",
        "bridge.model.recompute_num_layers=1",
    ],
    "selective": [
        "bridge.model.recompute_granularity=selective",
        "bridge.model.recompute_modules=[mlp]",
    ],
}
TP2 = "bridge.model.tensor_model_parallel_size=2"
MLP_ONLY = "student.train_only=['*.mlp.*']"
# Far too fast: the validation loss rises again, so the best checkpoint is not the last.
OVERSHOOT = [
    "bridge.optimizer.optimizer=adam",
    "bridge.optimizer.lr=0.3",
    "bridge.optimizer.min_lr=0.3",
    "bridge.scheduler.lr_warmup_iters=6",
    "bridge.train.train_iters=12",
    "bridge.train.eval_interval=1",
    "bridge.checkpoint.save_interval=1",
    "selection.keep_best=true",
    "selection.patience=2",
]


@pytest.fixture(scope="module")
def runs(world) -> dict[str, Curves]:
    folder = world.parent / "options"
    one = run_cases(
        world,
        1,
        {
            "mlp-only": [MLP_ONLY, f"export.hf_path={folder}/mlp-only"],
            "mlp-only-recompute": [MLP_ONLY, "loss.gradient=recompute"],
            "mlp-only-full": [MLP_ONLY, *RECOMPUTED["full"]],
            "mlp-only-selective": [MLP_ONLY, *RECOMPUTED["selective"]],
            "overshoot": [
                *OVERSHOOT,
                f"bridge.checkpoint.save={folder}/overshoot/checkpoints",
                f"export.hf_path={folder}/overshoot/hf",
            ],
        },
    )
    two = run_cases(world, 2, {"mlp-only-tp2": [MLP_ONLY, TP2]})
    return one | two


def test_only_what_is_named_is_trained(world, runs):
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (world.parent / "student", world.parent / "options" / "mlp-only")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".mlp." in name}
    validation = runs["mlp-only"].validation()
    assert validation[-1] < validation[0]


@pytest.mark.parametrize("other", ["recompute", "full", "selective", "tp2"])
def test_a_frozen_body_has_one_curve_in_every_layout(runs, other):
    reference, compared = runs["mlp-only"], runs[f"mlp-only-{other}"]
    assert compared.train() == pytest.approx(reference.train(), rel=TOLERANCE.loss)
    assert compared.grad_norms() == pytest.approx(reference.grad_norms(), rel=TOLERANCE.norm)


def test_the_best_checkpoint_is_kept_and_the_run_stops_early(runs):
    curves = runs["overshoot"]
    values = curves.validation()[1:]  # one per iteration, from the first
    best = json.loads((curves.directory / "best_checkpoint.json").read_text())
    assert best["kd loss"] == min(values)
    assert values[best["iteration"] - 1] == min(values)
    assert len(values) == best["iteration"] + 2 < 12
    saved = curves.directory.parents[1] / "options" / "overshoot"
    assert (saved / "checkpoints" / f"iter_{best['iteration']:07d}").is_dir()
    assert (saved / "hf" / "model.safetensors").is_file()  # exported as at the end of a full run


def test_speed_and_waiting_are_recorded(runs):
    records = [record for record in runs["mlp-only"].records if record["kind"] == "train"]
    for record in records:
        assert 0 <= record["data_wait_s"] < record["seconds"]
        assert record["model_tflops_per_s"] > 0
        assert record["tokens_per_s"] == pytest.approx(4 * 32 / record["seconds"])

"""A checkpoint of one layout continues in another, on the same data, to the same losses; one of the
host's SGD continues at all.
"""

import pytest
from backend import TOLERANCE
from launch import run_cases

pytestmark = pytest.mark.extended

TP2 = ["bridge.model.tensor_model_parallel_size=2"]
COMMON = [
    "bridge.optimizer.optimizer=adam",
    "bridge.optimizer.lr=1e-3",
    "bridge.optimizer.min_lr=1e-4",
    "bridge.scheduler.lr_decay_style=cosine",
    "bridge.scheduler.lr_decay_iters=12",
    "bridge.scheduler.override_opt_param_scheduler=true",  # the first part is planned shorter
    "bridge.train.eval_interval=4",
    "bridge.checkpoint.save_interval=4",
]
WHOLE = ["bridge.train.train_iters=12"]  # 48 samples of 40: the second epoch begins on the way
PART = ["bridge.train.train_iters=4"]
# name → (layout before, layout after); all on two ranks
CHANGES = {
    "tensor to data parallel": (TP2, []),
    "data to tensor parallel": ([], TP2),
}

SGD = {"sgd": 0.9, "sgd-without-momentum": 0.0}


@pytest.fixture(scope="module")
def runs(world):
    cases = {"whole": COMMON + WHOLE + TP2}
    for name, (before, after) in CHANGES.items():
        output = world.parent / "runs" / name.replace(" ", "-")
        place = [f"output_dir={output}"]
        place += [f"bridge.checkpoint.{way}={output}/checkpoints" for way in ("save", "load")]
        cases[output.name] = COMMON + PART + place + before
        cases[f"{output.name}-continued"] = COMMON + WHOLE + place + after
    for name, momentum in SGD.items():
        output = world.parent / "runs" / name
        place = [f"output_dir={output}"]
        place += [f"bridge.checkpoint.{way}={output}/checkpoints" for way in ("save", "load")]
        sgd = [
            *COMMON,
            "bridge.optimizer.optimizer=sgd",
            "bridge.optimizer.lr=1e-2",
            f"bridge.optimizer.sgd_momentum={momentum}",
        ]
        cases[f"{name}-whole"] = sgd + WHOLE
        cases[name] = sgd + PART + place
        cases[f"{name}-continued"] = sgd + WHOLE + place
    return run_cases(world, 2, cases)


@pytest.mark.parametrize("name", ["sgd", "sgd-without-momentum"])
def test_sgd_resumes(runs, name):
    whole, continued = runs[f"{name}-whole"], runs[name]
    assert continued.train() == whole.train()  # to the bit
    assert continued.grad_norms() == whole.grad_norms()


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_continues_in_another_layout(runs, change):
    whole, changed = runs["whole"], runs[change.replace(" ", "-")]
    assert [r["iteration"] for r in changed.records if r["kind"] == "train"] == [*range(1, 13)]
    assert changed.train() == pytest.approx(whole.train(), rel=TOLERANCE.loss)
    assert changed.train("lm loss") == pytest.approx(whole.train("lm loss"), rel=TOLERANCE.loss)
    assert changed.grad_norms() == pytest.approx(whole.grad_norms(), rel=TOLERANCE.norm)
    assert changed.validation() == pytest.approx(whole.validation(), rel=TOLERANCE.loss)
    rates = [
        [r["learning_rate"] for r in run.records if r["kind"] == "train"]
        for run in (whole, changed)
    ]
    assert rates[0] == rates[1]

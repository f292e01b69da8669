"""A run in stages: each goes on from the last one's checkpoint as a run joined by hand would, and a
killed one resumes in any stage.
"""

import math

import pytest
import small_world
import yaml
from launch import DISTILL, Curves, host_python, run, start_ranks
from test_resume import kill_after_iteration
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.extended

FIRST, SECOND, THIRD = 6, 6, 8
TOTAL = FIRST + SECOND + THIRD
RATE = 1e-3
LATER_RATE = 3e-3
LONGER = 48


@pytest.fixture(scope="module")
def recipes(world):
    """(the recipe in stages, the same without stages, what the second stage changes)."""
    other = world.parent / "other-stage-cache"
    teacher = LlamaForCausalLM.from_pretrained(world.parent / "teacher").eval()
    for split, seed in (("train", 41), ("validation", 42)):
        samples = small_world.documents(12, seed=seed)
        small_world.write_cache(other / split, teacher, samples)
    common = yaml.safe_load(world.read_text())
    host = common["bridge"]
    del host["train"]["train_iters"], host["checkpoint"]
    host["model"]["tensor_model_parallel_size"] = 2
    host["optimizer"] = {"optimizer": "adam", "lr": RATE, "min_lr": 0.0}
    host["scheduler"] = {"lr_decay_style": "cosine", "lr_warmup_iters": 0}
    host["checkpoint"] = {"save_interval": 3}
    alone = world.parent / "without_stages.yaml"
    alone.write_text(yaml.safe_dump(common))
    second = {
        "cache": {"path": str(other)},
        "loss": {"impl": "sparse_chunked", "temperature": 2.0},
        "bridge": {"model": {"seq_length": LONGER}},
    }
    third = {
        "iterations": THIRD,
        "bridge": {"train": {"global_batch_size": 2}, "optimizer": {"lr": LATER_RATE}},
    }
    stages = [{"iterations": FIRST}, second | {"iterations": SECOND}, third]
    staged = world.parent / "stages.yaml"
    staged.write_text(yaml.safe_dump(common | {"stages": stages}))
    by_hand = [
        f"cache.path={other}",
        "loss.impl=sparse_chunked",
        "loss.temperature=2.0",
        f"bridge.model.seq_length={LONGER}",
    ]
    return staged, alone, by_hand


@pytest.fixture(scope="module")
def unbroken(recipes, world) -> Curves:
    """All stages in one go. It is read, never run again."""
    output = world.parent / "all-stages"
    start_ranks(2, DISTILL, recipes[0], f"output_dir={output}").check()
    return Curves(output)


def test_stages_are_runs_joined_by_hand(recipes, world, unbroken):
    _, alone, changes = recipes
    first, second = world.parent / "by-hand-1", world.parent / "by-hand-2"
    decay = f"bridge.scheduler.lr_decay_iters={TOTAL}"
    one = [f"output_dir={first}", f"bridge.train.train_iters={FIRST}", decay]
    start_ranks(2, DISTILL, alone, *one).check()
    two = [
        f"output_dir={second}",
        f"bridge.checkpoint.load={first}/checkpoints",
        f"bridge.train.train_iters={FIRST + SECOND}",
        decay,
        "bridge.scheduler.override_opt_param_scheduler=true",
        *changes,
    ]
    start_ranks(2, DISTILL, alone, *two).check()
    joined = [Curves(first), Curves(second)]
    for name in ("kd loss", "lm loss"):
        by_hand = [value for curve in joined for value in curve.train(name)]
        assert len(by_hand) == FIRST + SECOND
        assert unbroken.train(name)[: len(by_hand)] == by_hand  # to the bit
    norms = [value for curve in joined for value in curve.grad_norms()]
    assert unbroken.grad_norms()[: len(norms)] == norms


def test_one_curve_counts_through_all_stages(unbroken):
    train = [record for record in unbroken.records if record["kind"] == "train"]
    assert [record["iteration"] for record in train] == list(range(1, TOTAL + 1))


def test_the_learning_rate_follows_the_iteration_whatever_the_batch(unbroken):
    train = [record for record in unbroken.records if record["kind"] == "train"]
    for record in train:
        done = record["iteration"]
        top = RATE if done <= FIRST + SECOND else LATER_RATE
        # Written after the step, when the scheduler has set the rate of the next one.
        shape = 0.5 * (1 + math.cos(math.pi * done / TOTAL))
        assert record["learning_rate"] == pytest.approx(top * shape, rel=1e-6, abs=1e-12)


def test_killed_in_each_stage_it_resumes_to_the_bit(recipes, world, unbroken):
    output = world.parent / "killed-stages"
    command = [DISTILL, recipes[0], f"output_dir={output}"]
    for iteration in (FIRST - 2, FIRST + 2, FIRST + SECOND + 2):
        ranks = start_ranks(2, *command)
        kill_after_iteration(ranks, output, iteration=iteration)
    start_ranks(2, *command).check()
    after = Curves(output)
    for name in ("kd loss", "lm loss"):
        assert after.train(name) == unbroken.train(name)
    assert after.grad_norms() == unbroken.grad_norms()
    assert after.validation() == unbroken.validation()


def test_every_stage_is_checked_before_the_first_starts(recipes, world):
    recipe = yaml.safe_load(recipes[0].read_text())
    recipe["stages"][2]["cache"] = {"path": "/not/there"}
    wrong = world.parent / "wrong-stage.yaml"
    wrong.write_text(yaml.safe_dump(recipe | {"output_dir": str(world.parent / "never")}))
    alone = [str(wrong), "bridge.model.tensor_model_parallel_size=1"]
    for asked in ([], ["--dry-run"]):
        said = run([host_python(), str(DISTILL), *alone, *asked], succeeds=False)
        assert "stage 3 of 3" in said and "/not/there" in said
    assert not (world.parent / "never").exists()

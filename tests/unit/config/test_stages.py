"""Recipes in stages: what each stage becomes, and what is refused before the first one starts."""

import pytest
import yaml

from megatron_kd.config import from_recipe
from megatron_kd.stages import stages_of
from megatron_kd.typed_mapping import ConfigError

COMMON = {
    "output_dir": "out",
    "student": {"hf_path": "s"},
    "cache": {"path": "short"},
    "export": {"hf_path": "student"},
    "bridge": {"train": {"global_batch_size": 8}, "optimizer": {"lr": 1e-4}},
}
LONGER = {
    "iterations": 50,
    "cache": {"path": "long"},
    "loss": {"impl": "dense"},
    "bridge": {"model": {"seq_length": 32768}, "train": {"global_batch_size": 2}},
}


@pytest.fixture
def recipe(tmp_path):
    def make(*stages, **changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(COMMON | {"stages": list(stages)} | changes))
        return path

    return make


def test_a_stage_is_the_recipe_with_its_changes(recipe):
    first, second = stages_of(recipe({"iterations": 100}, LONGER))
    assert (first.number, first.count, first.first, first.last) == (1, 2, 0, 100)
    assert (second.number, second.count, second.first, second.last) == (2, 2, 100, 150)
    assert first.before is None and second.before is first.config
    assert first.config.cache.path == "short" and second.config.cache.path == "long"
    assert first.config.loss.impl == "fused_chunked" and second.config.loss.impl == "dense"
    assert second.config.bridge["model"]["seq_length"] == 32768
    assert second.config.bridge["optimizer"] == {"lr": 1e-4}
    assert first.config.output_dir == second.config.output_dir


def test_one_schedule_ends_with_the_last_stage_and_the_student_is_exported_then(recipe):
    stages = stages_of(recipe({"iterations": 100}, LONGER))
    assert [s.config.bridge["scheduler"]["lr_decay_iters"] for s in stages] == [150, 150]
    assert [s.config.export.hf_path for s in stages] == [None, "student"]
    own = LONGER | {"bridge": {"scheduler": {"lr_decay_iters": 120}}}
    stages = stages_of(recipe({"iterations": 100}, own))
    assert [s.config.bridge["scheduler"]["lr_decay_iters"] for s in stages] == [150, 120]


def test_interpolations_follow_a_stage(recipe):
    common = {"data": {"seed": 9}, "cache": {"path": "at-${data.seed}"}}
    file = recipe({"iterations": 1, "data": {"seed": 5}}, {"iterations": 1}, **common)
    assert [stage.config.cache.path for stage in stages_of(file)] == ["at-5", "at-9"]


def test_overrides_change_what_stages_share(recipe):
    file = recipe({"iterations": 100}, LONGER)
    stages = stages_of(file, ["bridge.train.micro_batch_size=2"])
    assert [s.config.bridge["train"]["micro_batch_size"] for s in stages] == [2, 2]
    with pytest.raises(ConfigError, match="override loss.impl: entry 2 of stages sets it too"):
        stages_of(file, ["loss.impl=dense"])


def test_a_recipe_without_stages_is_one(tmp_path):
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(COMMON))
    (stage,) = stages_of(path)
    assert stage.config == from_recipe(path) and stage.count == 1


def test_other_commands_say_that_they_take_one_run(recipe):
    with pytest.raises(ConfigError, match="is a run in stages"):
        from_recipe(recipe({"iterations": 1}))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages must be a list"),
        ("8K", "stages must be a list"),
        ([3], "entry 1 must be a mapping"),
        ([{"loss": {"impl": "dense"}}], "entry 1 needs `iterations`, a whole number"),
        ([{"iterations": 0}], "a whole number from 1, not 0"),
        ([{"iterations": True}], "a whole number from 1, not True"),
        ([{"iterations": 1}, {"iterations": 1, "student": {}}], "entry 2 cannot change student"),
        ([{"iterations": 1, "bridge": {"rng": {}}}], "cannot change bridge.rng"),
        (
            [{"iterations": 1, "bridge": {"optimizer": {"adam_beta2": 0.9}}}],
            "cannot change bridge.optimizer.adam_beta2",
        ),
        ([{"iterations": 1, "bridge": {"train": {"train_iters": 9}}}], "remove bridge.train.train"),
        ([{"iterations": 1, "data": {"dataloader": "cyclic"}}], "cannot change data.dataloader"),
        ([{"iterations": 1}, {"iterations": 1, "loss": {"impl": "no"}}], "stage 2 of 2: .*impl"),
    ],
)
def test_what_a_stage_cannot_be_is_refused(recipe, stages, message):
    file = recipe(stages=stages)
    with pytest.raises(ConfigError, match=message):
        stages_of(file)


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ({"bridge": {"train": {"train_iters": 9}}}, "train_iters and stages"),
        ({"bridge": {"train": {"rampup_batch_size": [1, 1, 8]}}}, "rampup_batch_size and stages"),
        ({"bridge": {"optimizer": {"decoupled_lr": 1e-3}}}, "decoupled_lr and stages"),
        ({"bridge": {"checkpoint": {"save": None}}}, "stages need checkpoints"),
        ({"selection": {"keep_best": True}}, "selection.keep_best compares"),
        ({"profile": "memory"}, "profile runs 15 iterations"),
        ({"data": {"dataloader": "batch"}}, "dataloader=batch cannot go on"),
    ],
)
def test_what_has_no_meaning_over_stages_is_refused(recipe, common, message):
    with pytest.raises(ConfigError, match=message):
        stages_of(recipe({"iterations": 1}, **common))

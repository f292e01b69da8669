"""The host's configuration of a run: made from a recipe or by the user, for a CPU or for GPUs, and
what building it reads.
"""

import json
import shutil
from pathlib import Path

import converted_students
import pytest
from launch import Curves, answers_of, start_ranks

OWN_CONTAINER = Path(__file__).with_name("own_container.py")


@pytest.fixture(scope="module")
def runs(world) -> dict[str, tuple[Curves, dict]]:
    """way → (curves, how often the manifest of each split was opened)."""
    found = {}
    for way in ("recipe", "container"):
        folder = world.parent / "runs" / f"by-{way}"
        ranks = start_ranks(1, OWN_CONTAINER, world, folder, way)
        ranks.check()
        (line,) = [x for x in ranks.log(0).splitlines() if x.startswith("OPENED ")]
        found[way] = Curves(folder), json.loads(line[7:])
    return found


def test_a_users_own_container_trains_as_the_recipe_does(runs):
    ours, users = runs["recipe"][0], runs["container"][0]
    assert len(ours.train()) == 6 and len(ours.validation()) >= 2
    assert users.train() == ours.train()
    assert users.validation() == ours.validation()
    assert users.grad_norms() == ours.grad_norms()


@pytest.mark.extended
def test_what_the_converter_drops_is_set_in_a_users_provider_too(world):
    """Frequencies are set on the built model, which no comparison of settings sees."""
    student = world.parent / "converted-for-containers"
    converted_students.write("llama, llama3 of another length", student)
    first = {}
    for way in ("recipe", "container"):
        folder = world.parent / "runs" / f"converted-by-{way}"
        start_ranks(1, OWN_CONTAINER, world, folder, way, f"student.hf_path={student}").check()
        first[way] = Curves(folder).train()[0]
    assert first["container"] == first["recipe"]


@pytest.mark.parametrize("way", ["recipe", "container"])
def test_a_start_opens_each_split_once(runs, way):
    assert runs[way][1] == {"train": 1, "validation": 1}


CHANGES = {
    "nothing required": ["ddp.overlap_grad_reduce", False],
    "what distillation requires": ["model.calculate_per_token_loss", True],
    "an average": ["ddp.average_in_collective", True],
    "sharding": ["dist.use_torch_fsdp2", True],
    "a deferred gradient": ["model.defer_embedding_wgrad_compute", True],
    "the host's adapters": ["peft", None],
    "a section bridge": ["kd.bridge", {"train": {"train_iters": 3}}],
}


@pytest.fixture(scope="module")
def of_users(world) -> dict[str, str]:
    answers = answers_of("refuse_containers.py", world, asked=list(CHANGES.values()))
    return dict(zip(CHANGES, answers, strict=True))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nothing required", "accepted"),
        ("what distillation requires", "accepted"),
        ("an average", "ddp.average_in_collective must be false: gradients are divided by tokens"),
        ("sharding", "dist.use_torch_fsdp2 must be false"),
        ("a deferred gradient", "model.defer_embedding_wgrad_compute must be false"),
        ("the host's adapters", "set student.lora"),
        ("a section bridge", "bridge.train: the host's configuration was handed over"),
    ],
)
def test_a_users_container_may_not_ask_for_what_distillation_cannot_have(of_users, case, said):
    assert said in of_users[case]


@pytest.fixture(scope="module")
def on_gpus(world, tmp_path_factory) -> dict:
    """Answers for a student whose directory says bf16, as published ones do."""
    student = tmp_path_factory.mktemp("bf16") / "student"
    shutil.copytree(world.parent / "student", student)
    config = json.loads((student / "config.json").read_text())
    config.pop("dtype", None)  # as newer transformers write it
    (student / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    cases = {
        "nothing said": [],
        "gradients in bf16": ["bridge.ddp.grad_reduce_in_fp32=false"],
        "mixed precision": ["bridge.mixed_precision=bf16_mixed"],
        "optimizer alone": ["bridge.optimizer.bf16=false"],
        "model alone": ["bridge.model.bf16=false", "bridge.optimizer.bf16=true"],
        "both": ["bridge.model.bf16=true", "bridge.optimizer.bf16=true"],
        "host alone": [
            "bridge.checkpoint.async_save=true",
            "bridge.checkpoint.use_persistent_ckpt_worker=false",
        ],
    }
    asked = [[f"student.hf_path={student}", *overrides] for overrides in cases.values()]
    return dict(zip(cases, answers_of("as_on_gpus.py", world, asked=asked), strict=True))


def test_the_optimizer_keeps_fp32_weights_beside_a_students_16_bit_ones(on_gpus):
    """Otherwise its first step on a GPU fails: a gradient in fp32 for a parameter in bf16."""
    assert on_gpus["nothing said"] == [True, True, True]
    assert on_gpus["gradients in bf16"] == [True, True, False]
    assert on_gpus["mixed precision"] == [True, True, True]
    assert on_gpus["both"][:2] == [True, True]


@pytest.mark.parametrize("case", ["optimizer alone", "model alone"])
def test_precisions_that_contradict_each_other_are_refused(on_gpus, case):
    assert "bridge.model.bf16 is" in on_gpus[case] and "bridge.mixed_precision" in on_gpus[case]


def test_what_the_host_refuses_is_refused_before_a_start_in_its_own_words(on_gpus):
    assert on_gpus["host alone"].startswith("Megatron-Bridge refuses this run: async_save")

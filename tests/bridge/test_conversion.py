"""The first KD loss of students whose settings the host's converters drop, against transformers in
fp64: what `host.versions.rotary` and `host.versions.windows` put right.
"""

from types import SimpleNamespace

import converted_students
import pytest
from comparison import plain_losses
from launch import Launch, Launches

FP32 = 1e-6
"""Relative; measured 2e-8 to 2e-7."""
FIRST_STEP = [
    "data.shuffle=false",
    "bridge.train.train_iters=1",
    "bridge.train.eval_iters=0",
    # What is shown here must not rest on the comparison that every run makes.
    "student.check_parity=false",
]
CORE = ("qwen2, window", "llama, llama3 of another length")


def case(name: str, ranks: int) -> str:
    return f"{name} on {ranks}"


@pytest.fixture(scope="module")
def curves(world):
    launches = []
    for ranks in (1, 2):
        for name in converted_students.STUDENTS:
            directory = world.parent / "converted" / name.replace(", ", "-").replace(" ", "-")
            if not directory.exists():
                converted_students.write(name, directory)
            overrides = [
                f"student.hf_path={directory}",
                f"bridge.model.tensor_model_parallel_size={ranks}",
                f"bridge.model.sequence_parallel={str(ranks > 1).lower()}",
                *FIRST_STEP,
            ]
            launches.append(Launch(ranks, {case(name, ranks): overrides}))
    return Launches(world, launches)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "name",
    [
        name if name in CORE else pytest.param(name, marks=pytest.mark.extended)
        for name in converted_students.STUDENTS
    ],
)
def test_the_first_loss_is_the_one_of_transformers(world, curves, name, ranks):
    directory = "converted/" + name.replace(", ", "-").replace(" ", "-")
    (loss,) = curves[case(name, ranks)].train()
    run = SimpleNamespace(student=directory, data="plain")
    expected, _ = plain_losses(world.parent, run, "train", range(4))
    assert loss == pytest.approx(expected.item(), rel=FP32, abs=0)

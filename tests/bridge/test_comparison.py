"""What `scripts/quickstart.sh --compare` shows on a real model, held on a small one: over 20 steps
the implementations and layouts give one curve, and the top-100 cache gives the student that the
resident teacher gives.
"""

import pytest
import torch
from launch import Curves, run_cases
from small_world import TRAIN_SAMPLES, VALIDATION_SAMPLES, build, documents, online, write_cache

from megatron_kd.data.sequences import SequenceReader
from megatron_kd.metrics_file import curve
from megatron_kd.tools.report.compare import relative_difference
from megatron_kd.tools.report.held_out import held_out_scores

pytestmark = pytest.mark.extended

STEPS = 20
TRAINING = [
    f"bridge.train.train_iters={STEPS}",
    "bridge.train.eval_interval=20",
    "bridge.train.eval_iters=1",
    "bridge.optimizer.optimizer=adam",
    "bridge.optimizer.lr=1e-2",
    "bridge.optimizer.min_lr=1e-3",
]
TP2 = "bridge.model.tensor_model_parallel_size=2"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The small world with a peaked teacher (top-100 mass above 0.9, as real ones have) and K =
    100.
    """
    directory = tmp_path_factory.mktemp("comparison")
    recipe = build(directory)
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(directory / "teacher").eval()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(2)
    teacher.save_pretrained(directory / "teacher")
    for split, count, seed in (("train", TRAIN_SAMPLES, 3), ("validation", VALIDATION_SAMPLES, 4)):
        samples = documents(count, seed)
        write_cache(directory / "cache100" / split, teacher, samples, topk=100)
    return recipe


@pytest.fixture(scope="module")
def runs(world) -> dict[str, Curves]:
    directory = world.parent
    cached = [*TRAINING, f"cache.path={directory}/cache100"]
    resident = [*online(directory, "fused_online"), *TRAINING]

    def exported(name):
        return f"export.hf_path={directory}/exported/{name}"

    one = run_cases(
        world,
        1,
        {
            "fused": [*cached, exported("offline")],
            "dense": [*cached, "loss.impl=dense"],
            "sparse": [*cached, "loss.impl=sparse_chunked"],
            "online": [*resident, exported("online")],
        },
    )
    two = run_cases(world, 2, {"tp2": [*cached, TP2], "dp2": cached})
    return one | two


@pytest.mark.parametrize("other", ["dense", "sparse", "tp2", "dp2"])
def test_twenty_steps_give_one_curve(runs, other):
    reference, compared = (
        curve(runs[name].records, "train", "kd loss") for name in ("fused", other)
    )
    assert len(compared[1]) == STEPS
    assert relative_difference(reference, compared) <= 1e-4


def test_the_cache_gives_the_student_that_the_resident_teacher_gives(world, runs):
    directory = world.parent
    assert runs["fused"].validation("teacher mass")[0] > 0.9
    students = [
        str(directory / name) for name in ("student", "exported/offline", "exported/online")
    ]
    scores = held_out_scores(
        str(directory / "teacher"), students, SequenceReader(directory / "data" / "validation")
    )
    before, offline, resident = (scores[student].kl for student in students)
    assert resident < 0.9 * before
    assert offline == pytest.approx(resident, rel=0.05)

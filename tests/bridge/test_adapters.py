"""Low-rank adapters on a frozen student: what is trained, in every layout, resumed and exported."""

import pytest
import torch
from backend import TOLERANCE
from comparison import weights
from launch import Curves, call_all, run_cases
from torch.distributed.checkpoint import FileSystemReader

from megatron_kd.config import LoraConfig
from megatron_kd.tools.planning.adapters import adapter_parameters
from megatron_kd.tools.planning.model_shape import shape_of_directory

pytestmark = pytest.mark.extended

DIM = 2
LORA = [
    f"student.lora.dim={DIM}",
    "student.lora.alpha=8",
    "bridge.optimizer.optimizer=adam",  # the host cannot load a checkpoint of SGD
]
TP2 = "bridge.model.tensor_model_parallel_size=2"
SP = "bridge.model.sequence_parallel=true"
PP2 = "bridge.model.pipeline_model_parallel_size=2"


def saved(folder, iterations) -> list[str]:
    """A run that saves at its end and goes on from what is there."""
    return [
        f"bridge.checkpoint.save={folder}/checkpoints",
        f"bridge.checkpoint.load={folder}/checkpoints",
        "bridge.scheduler.override_opt_param_scheduler=true",  # of 3 and of 6 iterations
        f"bridge.train.train_iters={iterations}",
    ]


@pytest.fixture(scope="module")
def runs(world) -> dict[str, Curves]:
    resumed = world.parent / "runs" / "lora-resumed"
    one = run_cases(
        world,
        1,
        {
            "lora": LORA,
            "lora-recompute": [*LORA, "bridge.model.recompute_granularity=full"]
            + ["bridge.model.recompute_method=uniform", "bridge.model.recompute_num_layers=1"],
            "lora-resumed": [*LORA, *saved(resumed, 3)],
        },
        export=["lora"],
    )
    two = run_cases(
        world,
        2,
        {"lora-tp2": [*LORA, TP2], "lora-sp": [*LORA, TP2, SP], "lora-pp2": [*LORA, PP2]},
        export=["lora-tp2"],
    )
    again = run_cases(
        world, 1, {"lora-resumed": [*LORA, *saved(resumed, 6)]}, export=["lora-resumed"]
    )
    return one | two | again


def test_adapters_learn_and_the_weights_stay(world, runs):
    """Each changed weight has changed by a matrix of the adapters' rank, and is one they are on."""
    before, after = weights(world.parent / "student"), runs["lora"].weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj." in name}
    for name in changed:
        change = torch.linalg.svdvals((after[name] - before[name]).double())
        assert change[DIM] < 1e-4 * change[0], name
        assert change[DIM - 1] > 1e-3 * change[0], name
    for curve in (runs["lora"].train(), runs["lora"].validation()):
        assert curve[-1] < curve[0]


@pytest.mark.parametrize("other", ["lora-tp2", "lora-sp", "lora-pp2", "lora-recompute"])
def test_adapters_have_one_curve_in_every_layout(runs, other):
    reference, compared = runs["lora"], runs[other]
    assert compared.train() == pytest.approx(reference.train(), rel=TOLERANCE.loss)
    assert compared.grad_norms() == pytest.approx(reference.grad_norms(), rel=TOLERANCE.norm)


def test_a_resumed_run_goes_on_with_its_adapters(runs):
    assert len(runs["lora-resumed"].train()) == 6
    assert runs["lora-resumed"].train() == runs["lora"].train()


def test_a_checkpoint_is_exported_with_its_adapters_merged(world, runs):
    run, output = runs["lora-resumed"].directory, world.parent / "lora-exported"
    export = ["export", "--run", str(run), "--output"]
    answers = call_all({"export": [*export, str(output)]})
    assert answers["export"][0] == 0, answers
    trained, exported = runs["lora-resumed"].weights(), weights(output)
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    (run / "resolved_config.yaml").rename(run / "elsewhere.yaml")
    student = ["--student", str(world.parent / "student")]
    answers = call_all({"export": [*export, str(output), *student]})
    assert answers["export"][0] == 1
    assert "the run's resolved_config.yaml" in answers["export"][1]


def test_the_plan_counts_what_a_checkpoint_holds(world, runs):
    (folder,) = (runs["lora-resumed"].directory / "checkpoints").glob("iter_0000006")
    held = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [n for n in held if ".adapter." in n and n.endswith(".weight")]
    saved = sum(held[n].size.numel() for n in names if not n.startswith("optimizer."))
    student = shape_of_directory(world.parent / "student", "student")
    layers = range(len(student.layers))
    assert adapter_parameters(student, LoraConfig(dim=DIM), layers) == saved > 0

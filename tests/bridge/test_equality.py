"""One run, however it is laid out and whichever implementation computes its loss.

SGD makes the comparison sharp: a gradient that is wrong by a factor shows in the next loss, where
Adam would hide it. The trained weights say the same tensor by tensor: with SGD their change is the
sum of the gradients.
"""

import comparison
import pytest
import torch
from backend import TOLERANCE
from features import FEATURES
from launch import Launch, Launches
from layouts import Run, by_ranks, core, selection

ONE_STEP = [
    "data.shuffle=false",
    "bridge.train.train_iters=1",
    "bridge.train.eval_iters=0",
    "bridge.optimizer.lr=1",
    "bridge.optimizer.min_lr=1",
    "bridge.optimizer.clip_grad=0",
]
CORE, SELECTION = core(), selection()


def unless_core(value, is_core: bool):
    """A test's parameter, marked where the core of the tests leaves it out."""
    return pytest.param(value, marks=() if is_core else pytest.mark.extended)


def runs_where(condition) -> list:
    return [unless_core(run, run in CORE) for run in (*CORE, *SELECTION) if condition(run)]


def features_where(condition) -> list:
    return [unless_core(name, f.core) for name, f in FEATURES.items() if condition(f)]


@pytest.fixture(scope="module")
def runs(world) -> Launches:
    """Every run by its name, started when a test first asks for it."""
    launches = [Launch(1, {"one step": ONE_STEP}, export=["one step"])]
    for ranks, group in by_ranks([*CORE, *SELECTION]).items():
        cases = {run.name: run.overrides(world.parent) for run in group}
        launches.append(Launch(ranks, cases, export=[run.name for run in group if run.exports]))
    for name, feature in FEATURES.items():
        launches.append(Launch(feature.ranks, {name: feature.resolved(world.parent)}))
    return Launches(world, launches)


@pytest.mark.parametrize("run", runs_where(lambda run: run != run.reference), ids=str)
def test_runs_are_equal(world, runs, run):
    a, b = runs[run.reference.name], runs[run.name]
    assert len(a.train()) == 6
    assert b.train() == pytest.approx(a.train(), rel=TOLERANCE.loss)
    assert b.train("lm loss") == pytest.approx(a.train("lm loss"), rel=TOLERANCE.loss)
    assert b.grad_norms() == pytest.approx(a.grad_norms(), rel=TOLERANCE.norm)
    if "eval_iters=0" not in " ".join(run.overrides(world.parent)):
        assert b.validation() == pytest.approx(a.validation(), rel=TOLERANCE.loss)
        assert len(b.validation()) == 3  # before the first step, and every three steps
    if not run.exports:
        return
    start = comparison.weights(world.parent / run.student)
    assert comparison.worst_weight_departure(start, a.weights(), b.weights()) < TOLERANCE.weight


@pytest.mark.parametrize("name", features_where(lambda feature: feature.equals))
def test_features_of_the_host_change_nothing(runs, name):
    feature = FEATURES[name]
    a, b = runs[feature.equals], runs[name]
    kept = slice(feature.since - 1, None)
    assert [r["iteration"] for r in b.records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6][kept]
    assert b.train() == pytest.approx(a.train()[kept], rel=TOLERANCE.loss)
    assert b.grad_norms() == pytest.approx(a.grad_norms()[kept], rel=TOLERANCE.norm)
    validations = len(b.validation())
    assert validations == (3 if feature.since == 1 else 2)
    assert b.validation() == pytest.approx(a.validation()[-validations:], rel=TOLERANCE.loss)


@pytest.mark.extended
def test_features_that_add_a_loss_are_felt(runs):
    """Else the equalities above would hold without them."""
    routed, plain = runs["router losses"].grad_norms(), runs["no router loss"].grad_norms()
    assert all(a > 1.5 * b for a, b in zip(routed, plain, strict=True))
    assert min(runs["heads"].grad_norms()) > 0.5


TRAINED = [(Run().name, True), (Run("online fused").name, True), ("adam", True), ("heads", True)]


@pytest.mark.parametrize("name", [unless_core(*trained) for trained in TRAINED])
def test_training_lowers_the_validation_loss(runs, name):
    validation = runs[name].validation()
    assert validation[-1] < validation[0]


@pytest.mark.parametrize(
    "run",
    [Run(), Run("dense", "TP 2 + SP"), Run("fused", "CP 2", data="masked")],
    ids=str,
)
def test_masses_are_reported(runs, run):
    curves = runs[run.name]
    teacher, student = curves.validation("teacher mass"), curves.validation("student mass")
    assert 0 < student[0] < 1 and 0 < teacher[0] < 1
    assert teacher == pytest.approx([teacher[0]] * len(teacher), rel=1e-6)


@pytest.mark.parametrize("run", runs_where(lambda run: run.data == "masked"), ids=str)
def test_batches_without_a_supervised_token_teach_nothing(runs, run):
    """Of the masked data every fourth batch is fully masked."""
    losses, norms = runs[run.name].train(), runs[run.name].grad_norms()
    assert losses[1] == losses[5] == norms[1] == norms[5] == 0.0
    assert min(losses[2:5]) > 1 and min(norms[2:5]) > 0.1


ORACLES = [(Run(), True), (Run(data="masked"), True), (Run("dense", "CP 2", data="block"), True)]


@pytest.mark.parametrize(
    "run", [unless_core(*oracle) for oracle in (*ORACLES, (Run(data="naive"), False))], ids=str
)
def test_the_first_validation_losses_are_those_of_plain_pytorch(world, runs, run):
    """The whole chain (cache, dataset, host, loss) against Hugging Face's model and the
    definition.
    """
    with torch.no_grad():
        kd, lm = comparison.plain_losses(world.parent, run, "validation", range(8))
    curves = runs[run.name]
    assert curves.validation()[0] == pytest.approx(kd.item(), rel=TOLERANCE.loss)
    assert curves.validation("lm loss")[0] == pytest.approx(lm.item(), rel=TOLERANCE.loss)


def test_the_first_gradients_are_those_of_plain_pytorch(world, runs):
    """One step of SGD at a rate of 1 changes every weight by its gradient."""
    student = comparison.student(world.parent / "student")
    kd, _ = comparison.plain_losses(world.parent, Run(), "train", range(4), student)
    kd.backward()
    curves = runs["one step"]
    assert curves.train() == pytest.approx([kd.item()], rel=TOLERANCE.loss)
    start, end = comparison.weights(world.parent / "student"), curves.weights()
    for name, parameter in student.named_parameters():
        change = (start[name].double() - end[name].double()) - parameter.grad
        rounding = TOLERANCE.rounding * start[name].abs().max()
        bound = TOLERANCE.weight * parameter.grad.abs().max() + rounding
        assert change.abs().max() < bound, name

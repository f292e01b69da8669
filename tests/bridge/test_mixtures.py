"""Caches of two teachers in one run, through the real host, against `oracle`: the shares, a loss of
its own for one of them, and what is reported of each.
"""

import math

import pytest
from launch import Launch, Launches, prepare_all
from oracle import Options, train
from small_world import (
    TRAIN_SAMPLES,
    build,
    llama,
    masked_documents,
    write_cache,
)

from megatron_kd.cache import MixedReader

LEARNING_RATE = 0.3
CAPTURED = 1.7
COMMON = [
    "cache.path=null",
    "data.shuffle=false",
    "bridge.train.eval_interval=8",
    f"bridge.optimizer.lr={LEARNING_RATE}",
    f"bridge.optimizer.min_lr={LEARNING_RATE}",
    "bridge.optimizer.clip_grad=1000",
]
SECOND = Options("reverse_kl", "bucket", CAPTURED, False, 0.5, 0.0)
SECOND_LOSS = f"loss: {{objective: reverse_kl, tail: bucket, temperature: {CAPTURED}}}"


def mixture(folder, *, weights=(1, 1), loss="", names=("first", "second")) -> str:
    entries = [
        f"{{path: {folder / place}, weight: {weight}, name: {name}{', ' + more if more else ''}}}"
        for place, weight, name, more in zip(
            ("cache", "other"), weights, names, ("", loss), strict=True
        )
    ]
    return f"cache.mixture=[{', '.join(entries)}]"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The small world, and beside its teacher's cache one of another teacher: on other samples,
    with fewer candidates and a normalizer more, and without validation samples."""
    directory = tmp_path_factory.mktemp("mixtures")
    recipe = build(directory)
    teacher = llama(directory / "other-teacher", layers=2, hidden=48, seed=11)
    samples = masked_documents(TRAIN_SAMPLES)
    write_cache(directory / "other/train", teacher, samples, topk=5, temperatures=[CAPTURED])
    return recipe


@pytest.fixture(scope="module")
def runs(world) -> Launches:
    folder = world.parent
    apart = [mixture(folder, loss=SECOND_LOSS), "bridge.train.train_iters=2"]
    together = [
        mixture(folder, weights=(7, 1)),
        "cache.share_by=tokens",
        "bridge.train.micro_batch_size=2",
        "bridge.train.train_iters=2",
    ]
    return Launches(
        world,
        [
            Launch(1, {"apart": [*COMMON, *apart]}),
            Launch(2, {"together": [*COMMON, *together]}),
        ],
    )


def check(found, steps, names):
    assert found.grad_norms() == pytest.approx([step.grad_norm for step in steps], rel=1e-4)
    for name in ("kd loss", *names):
        values = [step.losses.get(name, math.nan) for step in steps]
        expected = [value for value in values if not math.isnan(value)]  # without a token of it
        assert found.train(name) == pytest.approx(expected, rel=2e-5, abs=1e-6), name


NAMES = ("kd loss/first", "kd loss/second")


def test_each_teacher_has_its_own_loss_and_its_own_curve(world, runs):
    folder = world.parent
    sources = [(folder / "cache/train", 1), (folder / "other/train", 1)]
    mixed = MixedReader(sources, each_alone=True)
    first = Options()
    steps = train(
        folder,
        lambda index: (first, SECOND)[mixed.locate(index)[0]],
        [range(0, 4), range(4, 8)],
        cache=mixed,
        lr=LEARNING_RATE,
        source_of=lambda index: ("first", "second")[mixed.locate(index)[0]],
    )
    assert all(name in step.losses for step in steps for name in NAMES)
    found = runs["apart"]
    check(found, steps, NAMES)
    # Validation: the one cache that has such samples, under its own name and loss.
    assert found.validation("kd loss/first") == pytest.approx(found.validation(), rel=1e-6)
    assert len(found.validation()) >= 2 and not found.validation("kd loss/second")


@pytest.mark.extended
def test_shares_by_tokens_over_two_ranks(world, runs):
    """A batch without a sample of a teacher has no value in that teacher's curve."""
    folder = world.parent
    sources = [(folder / "cache/train", 7), (folder / "other/train", 1)]
    mixed = MixedReader(sources, share_by="tokens")
    steps = train(
        folder,
        Options(),
        [range(0, 4), range(4, 8)],
        cache=mixed,
        lr=LEARNING_RATE,
        source_of=lambda index: ("first", "second")[mixed.locate(index)[0]],
    )
    check(runs["together"], steps, NAMES)
    assert len(runs["together"].train(NAMES[1])) == 1


REFUSED = {
    "micro-batches of two": (
        {"loss": SECOND_LOSS},
        ["bridge.train.micro_batch_size=2"],
        "set bridge.train.micro_batch_size=1",
    ),
    "a bucket not captured": (
        {"loss": "loss: {tail: bucket, temperature: 3.0}"},
        [],
        "cache.mixture[1].loss.tail=bucket",
    ),
    "names alike": ({"names": ("a", "a")}, [], "names must differ"),
    "one name": ({"names": ("a", "null")}, [], "a name, or none"),
    "no such objective": ({"loss": "loss: {objective: jds}"}, [], "did you mean jsd?"),
    "a share of cross-entropy": ({"loss": "loss: {ce_weight: 0.5}"}, [], "set loss.ce_weight"),
    "a perplexity not captured": ({}, ["cache.filter={max_perplexity: 5}"], "--label-logprob"),
    "a bound that no sample meets": ({}, ["cache.filter={min_mass: 1.0}"], "none of its"),
    "a bound that some meet": ({}, ["cache.filter={min_mass: 0.1}"], "accepted"),
    "micro-batches of two with one loss": ({}, ["bridge.train.micro_batch_size=2"], "accepted"),
}


@pytest.fixture(scope="module")
def answers(world):
    return prepare_all(
        world,
        {
            name: [*COMMON, mixture(world.parent, **given), *more]
            for name, (given, more, _) in REFUSED.items()
        },
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_mixture_that_cannot_be_trained_is_refused(answers, name):
    assert REFUSED[name][2] in answers[name]

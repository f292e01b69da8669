"""Every option of the loss off its default, through the real host, against `oracle`.

Two steps of SGD: the first step's values and gradient norm are the oracle's, and the second step's
are those after the oracle's own update, so a gradient that is wrong in any weight shows.
"""

from dataclasses import astuple, dataclass
from itertools import combinations, product

import oracle
import pytest
import torch
from launch import Launch, Launches, prepare_all
from small_world import TRAIN_SAMPLES, build, documents, online, write_cache

CAPTURED = 1.7
"""The temperature whose normalizer the cache holds."""
LEARNING_RATE = 0.3
SHORT = [
    "data.shuffle=false",
    "bridge.train.train_iters=2",
    "bridge.train.eval_iters=0",
    f"bridge.optimizer.lr={LEARNING_RATE}",
    f"bridge.optimizer.min_lr={LEARNING_RATE}",
    "bridge.optimizer.clip_grad=1000",
]
BATCHES = [range(0, 4), range(4, 8)]

IMPLEMENTATIONS = {
    "dense": ["loss.impl=dense"],
    "sparse": ["loss.impl=sparse_chunked", "loss.chunk_size=5"],
    "in_forward": ["loss.impl=fused_chunked", "loss.gradient=in_forward", "loss.chunk_size=7"],
    "recompute": ["loss.impl=fused_chunked", "loss.gradient=recompute", "loss.chunk_size=7"],
    "online dense": ["loss.impl=dense"],
    "online fused": ["loss.impl=fused_online", "loss.chunk_size=7"],
}
OFFLINE = [name for name in IMPLEMENTATIONS if "online" not in name]
ONLINE = [name for name in IMPLEMENTATIONS if "online" in name]
OBJECTIVES = {"forward_kl": 0.5, "reverse_kl": 0.5, "jsd": 0.3}  # name → beta
TEMPERATURES = {  # name → (temperature, temperature_squared); the cache has one normalizer
    "1": (1.0, False),
    "captured": (CAPTURED, False),
    "captured_squared": (CAPTURED, True),
    "guessed": (0.6, False),
    "guessed_squared": (2.5, True),
}


@dataclass(frozen=True)
class Case:
    """One value of every factor."""

    impl: str
    ranks: int
    objective: str
    tail: str
    temperature: str
    ce_weight: float

    def __str__(self):
        return f"{self.impl} tp{self.ranks} ".replace(" ", "-") + "-".join(
            map(str, astuple(self)[2:])
        )

    @property
    def options(self) -> oracle.Options:
        temperature, squared = TEMPERATURES[self.temperature]
        return oracle.Options(
            self.objective,
            self.tail,
            temperature,
            squared,
            OBJECTIVES[self.objective],
            self.ce_weight,
        )

    def overrides(self, directory) -> list[str]:
        given = [f"loss.{name}={value}" for name, value in vars(self.options).items()]
        given += [f"bridge.model.tensor_model_parallel_size={self.ranks}", *SHORT]
        given.append(f"cache.path={directory}/cache-captured")
        mode = online(directory, "dense") if self.impl in ONLINE else []
        return [*mode, *given, *IMPLEMENTATIONS[self.impl]]

    @property
    def is_defined(self) -> bool:
        return self.tail != "bucket" or "guessed" not in self.temperature


def covering(*factors) -> list[Case]:
    """Cases in which every pair of two factors' values occurs, where any case can hold it."""

    def pairs(case):
        return set(combinations(enumerate(astuple(case)), 2))

    candidates = [
        case for case in (Case(*values) for values in product(*factors)) if case.is_defined
    ]
    before = [case for case in CORE if case.impl in factors[0]]
    missing = set().union(*map(pairs, candidates)).difference(*map(pairs, before))
    chosen = []
    while missing:
        chosen.append(max(candidates, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


TAILS = ["none", "renormalize", "bucket"]
CORE = [
    Case("in_forward", 1, "jsd", "bucket", "captured_squared", 0.3),
    Case("sparse", 1, "reverse_kl", "renormalize", "guessed", 0.3),
    Case("online fused", 1, "reverse_kl", "none", "captured_squared", 0.3),
    Case("recompute", 2, "jsd", "renormalize", "guessed_squared", 0.3),
    Case("dense", 2, "reverse_kl", "bucket", "captured", 0.0),
    Case("online fused", 2, "jsd", "none", "captured", 1.0),
]
ALL = list(
    dict.fromkeys(
        [
            *CORE,
            *covering(OFFLINE, [1, 2], OBJECTIVES, TAILS, TEMPERATURES, [0.0, 0.3]),
            *covering(
                ONLINE,
                [1, 2],
                OBJECTIVES,
                ["none"],
                ["1", "captured", "captured_squared"],
                [0, 0.3],
            ),
            # Cross-entropy alone: the divergence has no gradient, and is reported.
            *(Case(impl, 1, "jsd", "none", "captured", 1.0) for impl in IMPLEMENTATIONS),
        ]
    )
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("options")
    recipe = build(directory)
    teacher = AutoModelForCausalLM.from_pretrained(directory / "teacher").eval()
    samples = documents(TRAIN_SAMPLES, seed=3)
    write_cache(directory / "cache-captured/train", teacher, samples, temperatures=[CAPTURED])
    return recipe


@pytest.fixture(scope="module")
def runs(world) -> Launches:
    launches = []
    for chosen in (CORE, ALL[len(CORE) :]):
        for ranks in (1, 2):
            group = [case for case in chosen if case.ranks == ranks]
            launches.append(Launch(ranks, {str(c): c.overrides(world.parent) for c in group}))
    return Launches(world, launches)


@pytest.fixture(scope="module")
def teacher(world):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        world.parent / "teacher", dtype=torch.float64
    ).eval()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in CORE else pytest.mark.extended) for case in ALL],
    ids=str,
)
def test_two_steps_are_the_oracles(world, runs, teacher, case):
    found = runs[str(case)]
    source = (
        {"teacher": teacher}
        if case.impl in ONLINE
        else {"cache": world.parent / "cache-captured/train"}
    )
    steps = oracle.train(world.parent, case.options, BATCHES, lr=LEARNING_RATE, **source)
    names = list(steps[0].losses)
    if not case.ce_weight:
        names.remove("total loss")  # it is the divergence, and reported once
        assert not found.train("total loss")
    for name in names:
        expected = [step.losses[name] for step in steps]
        assert found.train(name) == pytest.approx(expected, rel=2e-5, abs=1e-6), name
    assert found.grad_norms() == pytest.approx([step.grad_norm for step in steps], rel=1e-4)


def test_every_pair_of_options_is_tried():
    """The list above covers what it says: a value of one factor with each value of another."""
    offline = [case for case in ALL if case.impl in OFFLINE]
    for impl, tail in product(OFFLINE, TAILS):
        assert any((c.impl, c.tail) == (impl, tail) for c in offline)
    for ranks, temperature, objective in product((1, 2), TEMPERATURES, OBJECTIVES):
        assert any((c.ranks, c.temperature) == (ranks, temperature) for c in offline)
        assert any((c.objective, c.temperature) == (objective, temperature) for c in offline)
    assert len(ALL) < 50


REFUSED = {  # name → (overrides, what the refusal says)
    "jsd at its end": (
        ["loss.objective=jsd", "loss.beta=0"],
        "loss.beta must lie strictly between",
    ),
    "jsd at its other end": (["loss.objective=jsd", "loss.beta=1"], "loss.beta must lie strictly"),
    "infinite temperature": (["loss.temperature=inf"], "loss.temperature must be greater than 0"),
    "more than cross-entropy": (["loss.ce_weight=1.5"], "loss.ce_weight must lie in [0, 1]"),
    "no such objective": (["loss.objective=jds"], "did you mean jsd?"),
    "a guessed bucket": (["loss.tail=bucket", "loss.temperature=2"], "--temperatures 2.0"),
    "a captured bucket": (["loss.tail=bucket", f"loss.temperature={CAPTURED}"], "accepted"),
    "the former spelling": (["loss.tail=renormalise"], "accepted"),
    "ends without jsd": (["loss.beta=0"], "accepted"),
}


@pytest.fixture(scope="module")
def answers(world):
    captured = f"cache.path={world.parent}/cache-captured"
    no_evaluation = "bridge.train.eval_iters=0"
    asked = {name: [captured, no_evaluation, *given] for name, (given, _) in REFUSED.items()}
    return prepare_all(world, asked)


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_formed_is_refused_before_anything_starts(answers, name):
    assert REFUSED[name][1] in answers[name]

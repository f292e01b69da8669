"""Losses between hidden states, offline from the cache and online through ModelOpt: the same curve
in every layout, the first value equal to plain PyTorch's.
"""

import pytest
import torch
from backend import TOLERANCE
from launch import Launch, Launches
from small_world import (
    TOPK,
    TRAIN_SAMPLES,
    VALIDATION_SAMPLES,
    VOCAB_SIZE,
    build,
    documents,
    online,
)

from megatron_kd.cache import CacheSpec, CacheWriter

TP2 = "bridge.model.tensor_model_parallel_size=2"
SP = "bridge.model.sequence_parallel=true"
PP2 = "bridge.model.pipeline_model_parallel_size=2"
NO_EVALUATION = "bridge.train.eval_iters=0"
LAST = "hidden_states.pairs=[[final_norm,final_norm]]"
PAIRS = "hidden_states.pairs=[[-1,3],[final_norm,final_norm]]"
COSINE_ALONE = ["hidden_states.loss=cosine", "hidden_states.logits_weight=0"]
ADAM = ["bridge.optimizer.optimizer=adam"]  # the host cannot load a checkpoint of SGD
BALANCED = ["hidden_states.balance=true", "hidden_states.weight=0.5"]


@torch.no_grad()
def write_hidden_cache(directory, teacher, samples) -> None:
    """The small world's cache, with the teacher's last hidden state in fp32."""
    spec = CacheSpec(
        vocab_size=VOCAB_SIZE,
        topk=TOPK,
        teacher="small",
        tokenizer="none",
        codec="fp16",
        hidden_size=teacher.config.hidden_size,
        hidden_dtype="float32",
    )
    with CacheWriter(directory, spec, shard_positions=256) as writer:
        for tokens, mask in samples:
            hidden = teacher.model(tokens[None]).last_hidden_state[0]
            values, ids = torch.log_softmax(teacher.lm_head(hidden), -1).topk(TOPK, dim=-1)
            writer.append(tokens, mask, ids, values, hidden=hidden)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("hidden")
    recipe = build(directory)
    teacher = AutoModelForCausalLM.from_pretrained(directory / "teacher").eval()
    for split, count, seed in (("train", TRAIN_SAMPLES, 3), ("validation", VALIDATION_SAMPLES, 4)):
        write_hidden_cache(directory / "cache-hidden" / split, teacher, documents(count, seed))
    return recipe


@pytest.fixture(scope="module")
def runs(world) -> Launches:
    cached = [f"cache.path={world.parent}/cache-hidden", LAST]
    resident = [*online(world.parent, "fused_online"), PAIRS]
    export = f"export.hf_path={world.parent}/exported"
    balanced = [*cached, *BALANCED, *ADAM]
    checkpoints = world.parent / "balanced-checkpoints"
    saved = [f"bridge.checkpoint.{way}={checkpoints}" for way in ("save", "load")]
    resumed = f"output_dir={world.parent}/runs/balanced-resumed"
    saved.append("bridge.scheduler.override_opt_param_scheduler=true")  # of 3 and of 6 iterations
    one = Launch(
        1,
        {
            "offline": [*cached, export],
            "offline-dense": [*cached, "loss.impl=dense"],
            "offline-micro-batch-4": [*cached, *BALANCED, "bridge.train.micro_batch_size=4"],
            "offline-balanced": [*cached, *BALANCED],
            "balanced-unbroken": balanced,
            "balanced-first-half": [*balanced, *saved, "bridge.train.train_iters=3", resumed],
            "balanced-resumed": [*balanced, *saved],
            "offline-alone": [*cached, *COSINE_ALONE],
            "online-last": [*online(world.parent, "fused_online"), LAST],
            "online": resident,
            "online-alone": [*resident, *COSINE_ALONE],
        },
    )
    two = Launch(
        2,
        {
            "offline-tp2": [*cached, TP2],
            "offline-sp": [*cached, TP2, SP],
            "offline-balanced-sp": [*cached, *BALANCED, TP2, SP],
            "offline-dp2": [*cached, *BALANCED],
            "offline-pp2": [*cached, PP2],
            "online-tp2": [*resident, TP2],
            "online-sp": [*resident, TP2, SP],
            "online-alone-sp": [*resident, *COSINE_ALONE, TP2, SP],
            "online-pp2": [*resident, PP2, NO_EVALUATION],
            "online-alone-dp2": [*resident, *COSINE_ALONE],
        },
    )
    return Launches(world, [one, two])


CORE = [("offline", "offline-dense"), ("online", "online-sp")]
EXTENDED = [
    ("offline", "offline-pp2"),
    ("offline-balanced", "offline-balanced-sp"),
    ("offline", "offline-tp2"),
    ("offline", "offline-sp"),
    ("offline-balanced", "offline-micro-batch-4"),
    ("offline-balanced", "offline-dp2"),
    ("online", "online-tp2"),
    ("online", "online-pp2"),
    ("online-alone", "online-alone-sp"),
    ("online-alone", "online-alone-dp2"),
]
EQUAL = [*CORE, *(pytest.param(*names, marks=pytest.mark.extended) for names in EXTENDED)]


@pytest.mark.parametrize(("reference", "other"), EQUAL, ids=lambda name: name)
def test_curves_are_equal(runs, reference, other):
    a, b = runs[reference], runs[other]
    assert len(a.train("hidden loss")) == 6
    for name in ("kd loss", "hidden loss", "total loss"):
        assert b.train(name) == pytest.approx(a.train(name), rel=TOLERANCE.loss)
        if b.validation():
            assert b.validation(name) == pytest.approx(a.validation(name), rel=TOLERANCE.loss)
    assert b.grad_norms() == pytest.approx(a.grad_norms(), rel=TOLERANCE.norm)


def plain_hidden_losses(world) -> dict[str, float]:
    """Mean squared errors of the first validation, by definition: of the last hidden states, and of
    the last layers' output before the final norm.
    """
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(world.parent / name, dtype=torch.float64).eval()
        for name in ("student", "teacher")
    )
    before_norm = {}
    for model in (student, teacher):
        model.model.layers[-1].register_forward_hook(
            lambda layer, inputs, output, model=model: before_norm.update({model: output})
        )
    generator = torch.Generator().manual_seed(20)  # as the projection starts
    projection = torch.randn(64, 32, generator=generator).double() / 32**0.5
    sums, tokens = {"final_norm": 0.0, "last layer": 0.0}, 0
    with torch.no_grad():
        for ids, mask in documents(VALIDATION_SAMPLES, seed=4):
            normed = [model.model(ids[None]).last_hidden_state for model in (student, teacher)]
            layers = [before_norm[model] for model in (student, teacher)]
            for name, (a, b) in (("final_norm", normed), ("last layer", layers)):
                errors = (a.reshape(len(ids), -1) @ projection.T - b.reshape(len(ids), -1)).square()
                sums[name] += errors.mean(-1)[mask].sum().item()
            tokens += mask.sum().item()
    return {name: value / tokens for name, value in sums.items()}


def test_the_first_value_is_that_of_plain_pytorch(world, runs):
    plain = plain_hidden_losses(world)
    for name in ("offline", "online-last"):
        first = runs[name].validation("hidden loss")[0]
        assert first == pytest.approx(plain["final_norm"], rel=TOLERANCE.loss), name
    first = runs["online"].validation("hidden loss")[0]  # the mean over both pairs
    assert first == pytest.approx(sum(plain.values()) / 2, rel=TOLERANCE.loss)


@pytest.mark.extended
def test_hidden_states_alone_leave_the_logits_out(runs):
    for name in ("offline-alone", "online-alone"):
        curves = runs[name]
        assert curves.train("total loss") == pytest.approx(curves.train("hidden loss"), rel=1e-6)
        assert curves.validation("hidden loss")[-1] < curves.validation("hidden loss")[0]


def test_a_balanced_loss_has_the_asked_share(runs):
    curves = runs["offline-balanced"]
    kd, hidden, total = (curves.train(name) for name in ("kd loss", "hidden loss", "total loss"))
    weights = [0.5] + [0.5 * abs(k) / h for k, h in zip(kd, hidden, strict=True)][:-1]
    expected = [k + w * h for k, h, w in zip(kd, hidden, weights, strict=True)]
    assert total == pytest.approx(expected, rel=1e-6)


@pytest.mark.extended
def test_a_resumed_run_balances_on(runs):
    runs["balanced-first-half"]
    unbroken, resumed = runs["balanced-unbroken"], runs["balanced-resumed"]
    assert len(resumed.train()) == len(unbroken.train()) == 6
    assert resumed.train("total loss") == unbroken.train("total loss")


def test_the_export_leaves_the_projection_out(world, runs):
    assert runs["offline"].train()
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        world.parent / "exported", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]

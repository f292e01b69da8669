"""One run, however it is laid out and whichever implementation computes its loss.

SGD makes the comparison sharp: a gradient that is wrong by a factor shows in the next loss, where
Adam would hide it.
"""

import pytest
from launch import Curves, run_cases
from small_world import online

TP2 = "bridge.model.tensor_model_parallel_size=2"
TP4 = "bridge.model.tensor_model_parallel_size=4"
PP2 = "bridge.model.pipeline_model_parallel_size=2"
DISTRIBUTED_OPTIMIZER = [
    "bridge.optimizer.optimizer=adam",
    "bridge.optimizer.lr=1e-3",
    "bridge.optimizer.min_lr=1e-3",
    "bridge.ddp.use_distributed_optimizer=true",
]
ADAM = DISTRIBUTED_OPTIMIZER[:3]
NO_EVALUATION = "bridge.train.eval_iters=0"


@pytest.fixture(scope="module")
def runs(world) -> dict[str, Curves]:
    directory = world.parent
    one = run_cases(
        world,
        1,
        {
            "fused": [],
            "dense": ["loss.impl=dense"],
            "sparse": ["loss.impl=sparse_chunked"],
            "recompute": ["loss.gradient=recompute", "loss.chunk_size=7"],
            "micro-batch-4": ["bridge.train.micro_batch_size=4"],
            "adam": ADAM,
            "online-dense": online(directory, "dense"),
            "online-fused": online(directory, "fused_online"),
        },
    )
    two = run_cases(
        world,
        2,
        {
            "fused-tp2": [TP2],
            "dense-tp2": [TP2, "loss.impl=dense"],
            "sparse-tp2": [TP2, "loss.impl=sparse_chunked"],
            "fused-dp2": [],
            "fused-pp2": [PP2],
            "adam-dp2-distributed-optimizer": DISTRIBUTED_OPTIMIZER,
            "online-fused-tp2": [*online(directory, "fused_online"), TP2],
            "online-dense-tp2": [*online(directory, "dense"), TP2],
            "online-fused-dp2": online(directory, "fused_online"),
            "online-fused-pp2": [*online(directory, "fused_online"), PP2, NO_EVALUATION],
        },
    )
    four = run_cases(
        world, 4, {"fused-tp4": [TP4], "fused-tp2-pp2": [TP2, PP2], "dense-tp2-dp2": [TP2]}
    )
    return one | two | four


PAIRS = [
    ("fused", other)
    for other in (
        "dense",
        "sparse",
        "recompute",
        "micro-batch-4",
        "fused-tp2",
        "dense-tp2",
        "sparse-tp2",
        "fused-dp2",
        "fused-pp2",
        "fused-tp4",
        "fused-tp2-pp2",
        "dense-tp2-dp2",
    )
]
PAIRS += [("adam", "adam-dp2-distributed-optimizer")]
PAIRS += [
    ("online-dense", other)
    for other in (
        "online-fused",
        "online-fused-tp2",
        "online-dense-tp2",
        "online-fused-dp2",
        "online-fused-pp2",
    )
]


@pytest.mark.parametrize(("reference", "other"), PAIRS, ids=lambda name: name)
def test_curves_are_equal(runs, reference, other):
    a, b = runs[reference], runs[other]
    assert len(a.train()) == 6
    assert b.train() == pytest.approx(a.train(), rel=1e-5)
    assert b.train("lm loss") == pytest.approx(a.train("lm loss"), rel=1e-5)
    assert b.grad_norms() == pytest.approx(a.grad_norms(), rel=1e-4)
    if b.validation():
        assert b.validation() == pytest.approx(a.validation(), rel=1e-5)
        assert len(b.validation()) == 3  # before the first step, and every three steps


def test_training_lowers_the_validation_loss(runs):
    for name in ("fused", "online-fused", "adam"):
        validation = runs[name].validation()
        assert validation[-1] < validation[0]


def test_masses_are_reported(runs):
    for curves in (runs["fused"], runs["dense-tp2"]):
        teacher, student = curves.validation("teacher mass"), curves.validation("student mass")
        assert 0 < student[0] < 1 and 0 < teacher[0] < 1
        assert teacher == pytest.approx([teacher[0]] * len(teacher), rel=1e-6)


def test_the_first_losses_are_those_of_plain_pytorch(world, runs):
    """The whole chain (cache, dataset, host, loss) against Hugging Face's model and the
    definition.
    """
    import small_world
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_kd.cache import CacheReader

    student = AutoModelForCausalLM.from_pretrained(
        world.parent / "student", dtype=torch.float64
    ).eval()
    cache = CacheReader(world.parent / "cache" / "validation")
    kd = lm = tokens = 0.0
    with torch.no_grad():
        for index in range(small_world.VALIDATION_SAMPLES):
            sample = cache[index]
            ids = torch.as_tensor(sample.tokens, dtype=torch.int64)
            rows = torch.as_tensor(sample.loss_mask).nonzero().squeeze(-1)
            log_q = torch.log_softmax(student(ids[None]).logits[0], -1)[rows]
            support = torch.as_tensor(sample.topk_ids, dtype=torch.int64)[rows]
            log_p = torch.as_tensor(sample.topk_logprobs, dtype=torch.float64)[rows]
            kd += (log_p.exp() * (log_p - log_q.gather(-1, support))).sum().item()
            lm -= log_q.gather(-1, ids[rows + 1, None]).sum().item()
            tokens += len(rows)
    assert runs["fused"].validation()[0] == pytest.approx(kd / tokens, rel=1e-5)
    assert runs["fused"].validation("lm loss")[0] == pytest.approx(lm / tokens, rel=1e-5)

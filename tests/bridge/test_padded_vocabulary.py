"""A student with more output rows than its tokenizer has ids, and models whose ids differ.

The definition of a loss over a padded student is the one over its first `VOCAB_SIZE` logits: the
rows beyond get no gradient, through any head, whichever rank holds them.
"""

import json
import shutil

import oracle
import pytest
from launch import Launch, Launches, prepare_all
from small_world import VOCAB_SIZE, online
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_kd.data.prepare.documents import vocabulary_hash
from megatron_kd.data.sequence_format import with_fingerprint

PADDED = VOCAB_SIZE + 12
LEARNING_RATE = 0.3
BATCHES = [range(0, 4), range(4, 8)]
SHORT = [
    "data.shuffle=false",
    "bridge.train.train_iters=2",
    "bridge.train.eval_iters=0",
    f"bridge.optimizer.lr={LEARNING_RATE}",
    f"bridge.optimizer.min_lr={LEARNING_RATE}",
    "bridge.optimizer.clip_grad=1000",
]
HEADS = {
    "dense": ["loss.impl=dense"],
    "sparse": ["loss.impl=sparse_chunked", "loss.chunk_size=5"],
    "in_forward": ["loss.impl=fused_chunked", "loss.gradient=in_forward", "loss.chunk_size=7"],
    "recompute": ["loss.impl=fused_chunked", "loss.gradient=recompute", "loss.chunk_size=7"],
}
OPTIONS = oracle.Options(tail="bucket", ce_weight=0.3)


def tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="w0")


WORDS = [f"w{number}" for number in range(VOCAB_SIZE)]


@pytest.fixture(scope="module")
def padded(world):
    """A world's folder whose student has 512 rows and a tokenizer of 500 ids."""
    folder = world.parent / "padded"
    source = LlamaForCausalLM.from_pretrained(world.parent / "student")
    config = LlamaConfig.from_pretrained(world.parent / "student")
    config.vocab_size = PADDED
    student = LlamaForCausalLM(config)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = source.state_dict()
    own = student.state_dict()
    for name, value in own.items():
        value[:VOCAB_SIZE].copy_(weights[name]) if name in names else value.copy_(weights[name])
        if name in names:  # padding that would take most of the mass
            value[VOCAB_SIZE:] = 3 * weights[name].abs().max()
    student.save_pretrained(folder / "student")
    tokenizer(WORDS).save_pretrained(folder / "student")
    return folder


@pytest.fixture(scope="module")
def curves(world, padded):
    launches = []
    for ranks in (1, 2):
        cases = {
            f"{head} on {ranks}": [
                f"student.hf_path={padded}/student",
                f"bridge.model.tensor_model_parallel_size={ranks}",
                "loss.tail=bucket",
                "loss.ce_weight=0.3",
                *changes,
                *SHORT,
            ]
            for head, changes in HEADS.items()
        }
        launches.append(Launch(ranks, cases))
    return Launches(world, launches)


@pytest.fixture(scope="module")
def expected(world, padded):
    return oracle.train(
        padded,
        OPTIONS,
        BATCHES,
        cache=world.parent / "cache/train",
        lr=LEARNING_RATE,
        vocab_size=VOCAB_SIZE,
    )


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("head", HEADS)
def test_rows_that_no_token_has_do_not_count(curves, expected, head, ranks):
    run = curves[f"{head} on {ranks}"]
    for name in ("kd loss", "lm loss", "total loss"):
        assert run.train(name) == pytest.approx(
            [step.losses[name] for step in expected], rel=2e-6
        ), name
    assert run.grad_norms() == pytest.approx([step.grad_norm for step in expected], rel=1e-5)


def student_with(folder, padded, words):
    """The padded student with a tokenizer of these words; None: without any."""
    shutil.copytree(padded / "student", folder)
    for path in folder.glob("*token*"):
        path.unlink()
    if words is not None:
        tokenizer(words).save_pretrained(folder)
    return folder


def data_that_names(folder, world, words):
    """The world's prepared data, as `prepare` describes it today."""
    shutil.copytree(world.parent / "data", folder)
    for path in folder.glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["fingerprint"]
        manifest["vocabulary"] = vocabulary_hash(tokenizer(words))
        path.write_text(json.dumps(with_fingerprint(manifest)))
    return folder


@pytest.fixture(scope="module")
def answers(world, padded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("students")
    exchanged = [*WORDS[:7], WORDS[8], WORDS[7], *WORDS[9:]]
    students = {
        "none": student_with(folder / "none", padded, None),
        "more": student_with(folder / "more", padded, [f"w{n}" for n in range(VOCAB_SIZE + 3)]),
        "exchanged": student_with(folder / "exchanged", padded, exchanged),
    }
    cases = {name: [f"student.hf_path={path}"] for name, path in students.items()}
    data = data_that_names(folder / "data", world, WORDS)
    for name in ("padded", "exchanged"):
        path = students.get(name, padded / "student")
        cases[f"data, {name}"] = [f"student.hf_path={path}", f"data.path={data}"]
    teacher = folder / "teacher"
    shutil.copytree(world.parent / "teacher", teacher)
    tokenizer(WORDS).save_pretrained(teacher)
    plain = folder / "student"
    shutil.copytree(world.parent / "student", plain)
    tokenizer(exchanged).save_pretrained(plain)
    cases["online"] = [
        *online(world.parent, "dense"),
        f"teacher.hf_path={teacher}",
        f"student.hf_path={plain}",
    ]
    return prepare_all(world, cases)


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "none": "no tokenizer that shows whether those from 500 on are padding",
        "more": "has tokens up to id 502, but the cache",
        "data, exchanged": "the vocabularies differ between the student ",
        "online": "the vocabularies differ between the student ",
    }.items(),
)
def test_what_cannot_be_padding_or_means_other_tokens_is_refused(answers, case, words):
    assert words in answers[case]


@pytest.mark.parametrize("case", ["exchanged", "data, padded"])
def test_nothing_else_is_refused(answers, case):
    assert answers[case] == "accepted"

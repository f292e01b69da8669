import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import write_model

from megatron_kd import cli
from megatron_kd.data.sequences import SequenceReader, SequenceWriter
from megatron_kd.models.channels import Selection, TeacherShape
from megatron_kd.models.importance import Importance, documents_of, measure, select_important
from megatron_kd.models.prune import write_student

TOKENS = torch.arange(3, 23)[None]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """Random prepared sequences of two documents each."""
    folder = tmp_path_factory.mktemp("data") / "train"
    folder.mkdir()
    writer, random = SequenceWriter(folder), np.random.default_rng(0)
    for _ in range(20):
        mask = np.ones(24, bool)
        mask[[9, 23]] = False
        writer.append(random.integers(0, 61, 24), mask, np.array([0, 10, 24]))
    writer.close(split="train", seq_length=23, packing="block", vocab_size=61, tokenizer="t")
    return folder.parent


def silence(model, *, ffn=(), groups=(), hidden=()):
    """Makes the given channels do nothing, in every layer."""
    shape = TeacherShape.of(model.config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, list(ffn)] = 0
            width = shape.head_dim * shape.heads_per_group
            for group in groups:
                layer.self_attn.o_proj.weight[:, group * width : (group + 1) * width] = 0
            for projection in (layer.mlp.down_proj, layer.self_attn.o_proj):
                projection.weight[list(hidden)] = 0
                if projection.bias is not None:
                    projection.bias[list(hidden)] = 0
        model.model.embed_tokens.weight[:, list(hidden)] = 0


def cut(teacher, output, *options):
    return cli.main(["init-student", "--teacher", str(teacher), "--output", str(output), *options])


@pytest.mark.parametrize("name", ["llama", "llama-biased", "mistral", "qwen2", "qwen3"])
def test_channels_that_do_nothing_go_first(name, calibration, tmp_path):
    """Then the student computes what the teacher does; with other channels kept it could not."""
    model = write_model(name, tmp_path / "first")
    silence(model, ffn=[0, 3, 7, 19], groups=[0], hidden=[2, 3, 11, 23])
    model.save_pretrained(tmp_path / "teacher")
    widths = ["--kv-groups", "2", "--ffn-size", "16", "--hidden-size", "20"]
    options = [*widths, "--calibration", str(calibration), "--calibration-tokens", "100"]
    assert cut(tmp_path / "teacher", tmp_path / "student", *options) == 0
    record = json.loads((tmp_path / "student" / "student.json").read_text())
    assert record["kv_groups"] == [1, 2]
    assert record["ffn_channels"] == [i for i in range(20) if i not in (0, 3, 7, 19)]
    assert record["hidden_channels"] == [i for i in range(24) if i not in (2, 3, 11, 23)]
    assert record["chosen_by"]["width"]["tokens"] >= 100
    assert str(tmp_path) not in json.dumps(record)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    assert student.config.hidden_size == 20 and student.config.intermediate_size == 16
    with torch.no_grad():
        torch.testing.assert_close(
            student(TOKENS).logits, model.eval()(TOKENS).logits, rtol=1e-4, atol=1e-4
        )


def test_without_the_norm_gains_it_would_not_hold(calibration, tmp_path):
    model = write_model("llama", tmp_path / "first").eval()
    silence(model, hidden=[2, 3, 11, 23])
    model.save_pretrained(tmp_path / "teacher")
    everything = (tuple(range(3)),) * 5, (tuple(range(20)),) * 5
    kept = tuple(i for i in range(24) if i not in (2, 3, 11, 23))
    selection = Selection(
        layers=tuple(range(5)), kv_groups=everything[0], ffn=everything[1], hidden=kept
    )
    write_student(tmp_path / "teacher", tmp_path / "student", selection, chosen_by={})
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    with torch.no_grad():
        assert (student(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-2


def test_layers_choose_channels_of_their_own(calibration, tmp_path):
    model = write_model("qwen3", tmp_path / "first")
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight[:, number] = 0
    model.save_pretrained(tmp_path / "teacher")
    options = [
        "--ffn-size",
        "19",
        "--calibration",
        str(calibration / "train"),
        "--layer-list",
        "1,4",
    ]
    assert cut(tmp_path / "teacher", tmp_path / "student", *options) == 0
    record = json.loads((tmp_path / "student" / "student.json").read_text())
    expected = [[i for i in range(20) if i != dropped] for dropped in (1, 4)]
    assert record["ffn_channels"] == expected and record["hidden_channels"] == "all"


def test_importance_is_what_it_says(calibration, tmp_path):
    """Against activations taken from the model by hand."""
    model = write_model("llama", tmp_path / "teacher").eval()
    documents = list(documents_of(SequenceReader(calibration / "train"), seed=1))[:3]
    assert sorted(map(len, documents)) in ([10, 10, 14], [10, 14, 14])
    found = measure(tmp_path / "teacher", documents, max_tokens=10**9)
    assert found.tokens == sum(map(len, documents))
    layer = model.model.layers[2]
    ffn, powers = torch.zeros(20), torch.zeros(11, 24)
    for document in documents:
        ids = torch.from_numpy(np.array(document, np.int64))[None]
        positions = torch.arange(len(document))[None]
        with torch.no_grad():
            state = model.model.embed_tokens(ids)
            turns = model.model.rotary_emb(state, positions)
            for number, each in enumerate(model.model.layers):
                powers[2 * number] += state.square().sum((0, 1))
                normed = each.input_layernorm(state)
                state = state + each.self_attn(normed, turns, attention_mask=None)[0]
                powers[2 * number + 1] += state.square().sum((0, 1))
                normed = each.post_attention_layernorm(state)
                inner = each.mlp.act_fn(each.mlp.gate_proj(normed)) * each.mlp.up_proj(normed)
                if each is layer:
                    ffn += inner.square().sum((0, 1))
                state = state + each.mlp(normed)
            powers[10] += state.square().sum((0, 1))
    wanted = (ffn / found.tokens).sqrt() * layer.mlp.down_proj.weight.norm(dim=0).detach()
    np.testing.assert_allclose(found.ffn[2], wanted, rtol=1e-4)
    shares = powers / powers.sum(dim=1, keepdim=True)
    np.testing.assert_allclose(found.hidden, shares.sum(dim=0), rtol=1e-4)
    name = "model.layers.2.post_attention_layernorm.weight"
    np.testing.assert_allclose(found.norm_input_power[name], powers[5] / found.tokens, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ffn-size", "10"], "need --calibration DATA"),
        (["--hidden-size", "10"], "need --calibration DATA"),
        (["--ffn-size", "21", "--calibration", "DATA"], "--ffn-size must lie between 1 and"),
        (["--hidden-size", "0", "--calibration", "DATA"], "--hidden-size must lie between 1 and"),
        (["--ffn-size", "9", "--calibration", "DATA", "--calibration-tokens", "0"], "at least 1"),
        (["--ffn-size", "9", "--calibration", "NOWHERE"], "megatron-kd prepare"),
    ],
)
def test_impossible_widths_are_refused(options, words, calibration, tmp_path, capsys):
    write_model("llama", tmp_path / "teacher")
    options = [str(calibration) if option == "DATA" else option for option in options]
    assert cut(tmp_path / "teacher", tmp_path / "student", *options) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "student").exists()


def test_another_tokenizers_data_is_refused(tmp_path):
    write_model("llama", tmp_path / "teacher")
    with pytest.raises(ValueError, match="the token 61, the teacher has 61"):
        measure(tmp_path / "teacher", [np.array([1, 61])], max_tokens=10)
    with pytest.raises(ValueError, match="no documents"):
        measure(tmp_path / "teacher", [], max_tokens=10)


@pytest.mark.parametrize(("max_tokens", "read"), [(1, 10), (10, 10), (11, 20), (99, 30)])
def test_reading_stops_after_the_document_that_reaches_the_limit(max_tokens, read, tmp_path):
    write_model("llama", tmp_path / "teacher")
    documents = [np.arange(3, 13)] * 3
    assert measure(tmp_path / "teacher", documents, max_tokens=max_tokens).tokens == read


def test_of_equally_important_channels_the_first_are_kept():
    """Which they are must not depend on the machine that sorts."""
    shape = TeacherShape(layers=2, heads=8, kv_groups=8, head_dim=4, ffn_size=64, hidden_size=32)
    ffn = np.ones((2, 64))
    ffn[1, 50:] = 2
    equal = Importance(
        ffn=ffn, kv_groups=np.ones((2, 8)), hidden=np.ones(32), norm_input_power={}, tokens=1
    )
    widths = dict(kv_groups=3, ffn_size=16, hidden_size=20)
    selection = select_important(shape, (0, 1), equal, **widths)
    assert selection.kv_groups == (tuple(range(3)),) * 2
    assert selection.ffn == (tuple(range(16)), (0, 1, *range(50, 64)))
    assert selection.hidden == tuple(range(20))


def held_out_loss(model_dir, sequences):
    """Mean cross-entropy in nats."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    total, count = 0.0, 0
    for sequence in sequences:
        ids = torch.from_numpy(np.array(sequence.tokens, np.int64))[None]
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["ffn_size", "kv_groups", "hidden_size"])
def test_importance_beats_chance_on_a_real_teacher(axis, smollm2_dir, tmp_path):
    prepare = ["prepare", "--input", "pydoc", "--seq-length", "512", "--max-tokens", "30000"]
    places = ["--tokenizer", str(smollm2_dir), "--output", str(tmp_path / "data")]
    assert cli.main([*prepare, *places, "--validation-fraction", "0.1"]) == 0
    train = SequenceReader(tmp_path / "data" / "train")
    validation = list(SequenceReader(tmp_path / "data" / "validation"))[:3]
    shape = TeacherShape(
        layers=30, heads=9, kv_groups=3, head_dim=64, ffn_size=1536, hidden_size=576
    )
    layers = tuple(range(30))
    full = dict(kv_groups=3, ffn_size=1536, hidden_size=576)
    widths = {**full, axis: dict(ffn_size=1280, kv_groups=2, hidden_size=512)[axis]}
    importance = measure(smollm2_dir, documents_of(train, seed=0), max_tokens=3000)
    random = np.random.default_rng(0)

    def pick(name):
        return tuple(sorted(random.permutation(full[name])[: widths[name]].tolist()))

    chance = Selection(
        layers=layers,
        kv_groups=tuple(pick("kv_groups") for _ in layers),
        ffn=tuple(pick("ffn_size") for _ in layers),
        hidden=pick("hidden_size"),
    )
    losses = {}
    for name, selection in (
        ("importance", select_important(shape, layers, importance, **widths)),
        ("chance", chance),
    ):
        write_student(smollm2_dir, tmp_path / name, selection, chosen_by={})
        losses[name] = held_out_loss(tmp_path / name, validation)
    print(axis, losses)
    assert losses["importance"] < losses["chance"] - 0.5

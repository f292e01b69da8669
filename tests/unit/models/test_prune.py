import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import CASES, write_model

from megatron_kd import cli
from megatron_kd.models.channels import (
    Selection,
    TeacherShape,
    evenly_spaced_layers,
)
from megatron_kd.models.prune import weight_files, write_student

TOKENS = torch.arange(3, 23)[None]


def cut(teacher, output, *options):
    return cli.main(["init-student", "--teacher", str(teacher), "--output", str(output), *options])


def load(path):
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_keeping_everything_keeps_the_logits(name, tmp_path):
    teacher = write_model(name, tmp_path / "teacher")
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layers", "5", "--heads", "6") == 0
    student = load(tmp_path / "student")
    with torch.no_grad():
        assert torch.equal(student(TOKENS).logits, teacher(TOKENS).logits)


@pytest.mark.parametrize("name", CASES)
def test_layers_alone_equal_the_teacher_without_the_others(name, tmp_path):
    teacher = write_model(name, tmp_path / "teacher")
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layer-list", "0,2,4") == 0
    student = load(tmp_path / "student")
    teacher.model.layers = torch.nn.ModuleList(teacher.model.layers[i] for i in (0, 2, 4))
    for position, layer in enumerate(teacher.model.layers):
        layer.self_attn.layer_idx = position
    kinds = teacher.config.layer_types if hasattr(teacher.config, "layer_types") else None
    if kinds is not None:
        teacher.config.layer_types = [kinds[i] for i in (0, 2, 4)]
        assert student.config.layer_types == teacher.config.layer_types
    if name == "qwen2-windowed":  # windows begin at layer 2: of the kept ones, behind layer 0
        assert student.config.max_window_layers == 1
    teacher.config.num_hidden_layers = teacher.model.config.num_hidden_layers = 3
    with torch.no_grad():
        assert torch.equal(student(TOKENS).logits, teacher(TOKENS).logits)


@pytest.mark.parametrize("name", CASES)
def test_heads_go_by_whole_groups(name, tmp_path):
    teacher = write_model(name, tmp_path / "teacher")
    shape = TeacherShape.of(teacher.config)
    selection = Selection(
        layers=(1, 4),
        kv_groups=((0, 2), (1, 2)),
        ffn=(tuple(range(20)),) * 2,
        hidden=tuple(range(24)),
    )
    write_student(tmp_path / "teacher", tmp_path / "student", selection, chosen_by={})
    student = load(tmp_path / "student")
    config = AutoConfig.from_pretrained(tmp_path / "student")
    assert (config.num_hidden_layers, config.num_attention_heads) == (2, 4)
    assert (config.num_key_value_heads, config.head_dim) == (2, shape.head_dim)
    width = shape.head_dim
    for position, (layer, groups) in enumerate(zip((1, 4), selection.kv_groups, strict=True)):
        theirs, ours = teacher.model.layers[layer], student.model.layers[position]
        kv = torch.cat([torch.arange(width) + g * width for g in groups])
        q = torch.cat([torch.arange(2 * width) + g * 2 * width for g in groups])
        got, want = ours.self_attn, theirs.self_attn
        assert torch.equal(got.q_proj.weight, want.q_proj.weight[q])
        assert torch.equal(got.k_proj.weight, want.k_proj.weight[kv])
        assert torch.equal(got.v_proj.weight, want.v_proj.weight[kv])
        assert torch.equal(got.o_proj.weight, want.o_proj.weight[:, q])
        assert got.o_proj.weight.shape == (24, 4 * width)
        if want.q_proj.bias is not None:
            assert torch.equal(got.q_proj.bias, want.q_proj.bias[q])
            assert torch.equal(got.v_proj.bias, want.v_proj.bias[kv])
        if want.o_proj.bias is not None:
            assert torch.equal(got.o_proj.bias, want.o_proj.bias)
        if hasattr(want, "q_norm"):
            assert torch.equal(got.q_norm.weight, want.q_norm.weight)
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)


@pytest.mark.parametrize("name", ["llama-biased", "qwen3"])
def test_a_group_that_writes_nothing_can_go(name, tmp_path):
    """The student computes the same once the dropped group's output columns are zero."""
    teacher = write_model(name, tmp_path / "first")
    width = TeacherShape.of(teacher.config).head_dim
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.self_attn.o_proj.weight[:, 2 * 2 * width :] = 0
    teacher.save_pretrained(tmp_path / "teacher")
    assert cut(tmp_path / "teacher", tmp_path / "student", "--kv-groups", "2") == 0
    student = load(tmp_path / "student")
    with torch.no_grad():
        torch.testing.assert_close(
            student(TOKENS).logits, teacher(TOKENS).logits, rtol=1e-5, atol=1e-5
        )


def test_even_spacing_keeps_first_and_last():
    assert evenly_spaced_layers(30, 10) == (0, 3, 6, 10, 13, 16, 19, 23, 26, 29)
    assert evenly_spaced_layers(5, 5) == (0, 1, 2, 3, 4)
    for total in range(2, 40):
        for keep in range(2, total + 1):
            layers = evenly_spaced_layers(total, keep)
            steps = {b - a for a, b in zip(layers, layers[1:], strict=False)}
            assert layers[0] == 0 and layers[-1] == total - 1 and len(layers) == keep
            assert max(steps) - min(steps) <= 1 and min(steps) >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "6"], "between 2 and the teacher's 5"),
        (["--layers", "1"], "--layer-list"),
        (["--layer-list", "0,2,2"], "ascending"),
        (["--layer-list", "3,1"], "ascending"),
        (["--layer-list", "0,5"], "0 to 4"),
        (["--layer-list", ""], "none"),
        (["--heads", "5"], "possible (heads/groups): 2/1, 4/2, 6/3"),
        (["--heads", "4", "--kv-groups", "3"], "possible"),
        (["--kv-groups", "4"], "possible"),
        (["--kv-groups", "0"], "possible"),
    ],
)
def test_impossible_cuts_are_refused_with_the_remedy(options, words, tmp_path, capsys):
    write_model("llama", tmp_path / "teacher")
    assert cut(tmp_path / "teacher", tmp_path / "student", *options) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "student").exists()


def test_other_architectures_are_refused(tmp_path, capsys):
    GPT2Config().save_pretrained(tmp_path / "teacher")
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layers", "2") == 1
    assert "gpt2" in capsys.readouterr().err


def test_nothing_is_overwritten_unasked(tmp_path, capsys):
    write_model("llama", tmp_path / "teacher")
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layers", "3") == 0
    before = (tmp_path / "student" / "model.safetensors").read_bytes()
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layers", "2") == 1
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "student" / "model.safetensors").read_bytes() == before
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layers", "2", "--overwrite") == 0
    assert AutoConfig.from_pretrained(tmp_path / "student").num_hidden_layers == 2
    assert cut(tmp_path / "teacher", tmp_path / "teacher", "--layers", "2", "--overwrite") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["student", "teacher"]


def test_provenance_names_the_teacher_without_its_place(tmp_path, capsys):
    teacher = write_model("qwen3", tmp_path / "teacher")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "teacher").rename(tmp_path / "elsewhere" / "other-name")
    assert cut(tmp_path / "elsewhere" / "other-name", tmp_path / "student", "--layers", "3") == 0
    text = (tmp_path / "student" / "student.json").read_text()
    record = json.loads(text)
    assert record["layers"] == [0, 2, 4] and record["kv_groups"] == "all"
    assert len(record["teacher"]["weights_xxh3_128"]) == 32
    assert "elsewhere" not in text and "other-name" not in text
    student = load(tmp_path / "student")
    sizes = [sum(p.numel() for p in model.parameters()) for model in (student, teacher)]
    assert [record["parameters"], record["teacher_parameters"]] == sizes
    assert f"{sizes[0] / sizes[1]:.0%} of the teacher's" in capsys.readouterr().out


def test_sharded_teacher(tmp_path):
    teacher = write_model("llama-biased", tmp_path / "whole")
    teacher.save_pretrained(tmp_path / "teacher", max_shard_size="20KB")
    assert len(list((tmp_path / "teacher").glob("*.safetensors"))) > 1
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layers", "5") == 0
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "student")(TOKENS).logits, teacher(TOKENS).logits)


def test_an_index_that_leads_elsewhere_is_refused(tmp_path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (tmp_path / "foreign.safetensors").write_bytes(b"")
    for name in ("../foreign.safetensors", str(tmp_path / "foreign.safetensors"), "absent"):
        index = {"weight_map": {"model.norm.weight": name}}
        (teacher / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="which is no file beside it"):
            weight_files(teacher)


def test_how_the_teacher_generates_goes_with_the_student(tmp_path):
    write_model("llama", tmp_path / "teacher")
    assert cut(tmp_path / "teacher", tmp_path / "student", "--layers", "3") == 0
    ours, theirs = (tmp_path / name / "generation_config.json" for name in ("student", "teacher"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_real_teacher(smollm2_dir, tmp_path):
    student_dir = tmp_path / "student"
    assert cut(smollm2_dir, student_dir, "--layers", "10", "--heads", "6", "--kv-groups", "2") == 0
    student = load(student_dir)
    assert student.model.layers[1].self_attn.o_proj.weight.shape == (576, 6 * 64)
    assert student.lm_head.weight.data_ptr() == student.model.embed_tokens.weight.data_ptr()
    ours, theirs = (AutoTokenizer.from_pretrained(d) for d in (student_dir, smollm2_dir))
    text = "The quick brown fox, 1234 times.  "
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.chat_template == theirs.chat_template
    assert student(torch.tensor([ours(text).input_ids])).logits.isfinite().all()

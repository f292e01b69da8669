"""Recipes: includes, overrides, and every refusal naming its key, what is allowed, and the nearest
match.
"""

from dataclasses import replace

import pytest
import yaml

from megatron_kd.config import from_recipe
from megatron_kd.losses.divergence import OBJECTIVES, objective_unit
from megatron_kd.typed_mapping import ConfigError, plain

MINIMAL = {"output_dir": "out", "student": {"hf_path": "s"}, "cache": {"path": "c"}}


def recipe(tmp_path, content, name="recipe.yaml"):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content))
    return path


def test_defaults_are_an_offline_fused_run(tmp_path):
    config = from_recipe(recipe(tmp_path, MINIMAL))
    assert (config.mode, config.loss.impl, config.loss.gradient) == (
        "offline",
        "fused_chunked",
        "auto",
    )
    assert config.loss.chunk_size == "auto" and config.bridge == {}


def test_own_keys_win_over_includes_and_overrides_win_over_both(tmp_path):
    recipe(tmp_path, {"loss": {"impl": "dense", "tail": "bucket", "beta": 0.1}}, "base.yaml")
    recipe(tmp_path, {"include": ["base.yaml"], "loss": {"beta": 0.2}}, "middle.yaml")
    path = recipe(tmp_path, MINIMAL | {"include": ["middle.yaml"], "loss": {"tail": "renormalise"}})
    config = from_recipe(path, ["loss.temperature=2", "bridge.train.train_iters=7"])
    divergence = config.loss.divergence
    assert (config.loss.impl, divergence.beta, divergence.tail) == ("dense", 0.2, "renormalize")
    assert divergence.temperature == 2.0
    assert config.bridge == {"train": {"train_iters": 7}}


def test_interpolations_are_resolved(tmp_path):
    path = recipe(tmp_path, MINIMAL | {"export": {"hf_path": "${output_dir}/hf"}})
    assert from_recipe(path, ["output_dir=elsewhere"]).export.hf_path == "elsewhere/hf"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("loss.imp=dense", ["loss.imp", "did you mean loss.impl"]),
        (
            "loss.impl=fused_chunk",
            ["loss.impl", "dense, sparse_chunked", "did you mean fused_chunked"],
        ),
        ("loss.temperature=warm", ["loss.temperature", "a number", "'warm'"]),
        ("loss.temperature=0", ["loss.temperature must", "greater than 0"]),
        ("loss.temperature=.inf", ["loss.temperature must", "finite"]),
        ("loss.temperature=.nan", ["loss.temperature must", "finite"]),
        ("loss.tempreature=2", ["unknown key loss.tempreature", "did you mean loss.temperature"]),
        ("loss.divergence=jsd", ["unknown key loss.divergence", "objective"]),
        ("loss.divergence.beta=0.5", ["unknown key loss.divergence"]),
        ("loss.objective=jsdd", ["loss.objective must be one of forward_kl", "did you mean jsd"]),
        ("loss.objective=3", ["loss.objective", "a string"]),
        ("loss.tail=buckets", ["loss.tail must be one of none", "did you mean bucket"]),
        ("loss.beta=1.5", ["loss.beta must", "[0, 1]"]),
        ("loss.ce_weight=1.5", ["loss.ce_weight", "[0, 1]"]),
        ("loss.chunk_size=0", ["loss.chunk_size", "1 or more"]),
        ("loss.chunk_size=big", ["loss.chunk_size", "integer", "auto"]),
        ("data.shuffle=perhaps", ["data.shuffle", "true or false"]),
        ("data.num_workers=-1", ["data.num_workers", "0 or more"]),
        ("mode=on-line", ["mode", "offline, online", "did you mean online"]),
        ("mode=online", ["teacher.hf_path", "required"]),
        ("loss.impl=fused_online", ["loss.impl", "mode=online"]),
        ("cache.path=null", ["cache.path", "megatron-kd capture"]),
        ("student=x", ["student", "mapping"]),
        ("student.lora.dim=0", ["student.lora.dim", "1 or more"]),
        ("student.lora.rank=8", ["unknown key student.lora.rank", "dim"]),
        ("student.lora.target_modules=[]", ["student.lora.target_modules", "linear_qkv"]),
        ("bridge.peft.dim=8", ["bridge.peft", "student.lora"]),
        ("tail", ["key=value"]),
        ("student.train_only=[*.mlp.*]", ["student.train_only=[*.mlp.*]", "quote"]),
    ],
)
def test_wrong_overrides_are_refused(tmp_path, override, expected):
    with pytest.raises(ConfigError) as error:
        from_recipe(recipe(tmp_path, MINIMAL), [override])
    for part in expected:
        assert part in str(error.value)


@pytest.mark.parametrize("beta", [0, 1])
def test_the_ends_of_beta_are_refused_for_jsd_alone(tmp_path, beta):
    path = recipe(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=r"^loss\.beta must lie strictly between 0 and 1"):
        from_recipe(path, ["loss.objective=jsd", f"loss.beta={beta}"])
    assert from_recipe(path, [f"loss.beta={beta}"]).loss.divergence.beta == beta


def test_the_former_spelling_of_a_tail_is_read(tmp_path):
    config = from_recipe(recipe(tmp_path, MINIMAL), ["loss.tail=renormalise"])
    assert config.loss.divergence.tail == "renormalize"


def test_a_configuration_is_written_as_the_recipe_it_was(tmp_path):
    keys = ["loss.objective=jsd", "loss.temperature=2", "loss.chunk_size=64", "loss.tail=bucket"]
    config = from_recipe(
        recipe(tmp_path, MINIMAL | {"student": {"hf_path": "s", "lora": {}}}), keys
    )
    written = plain(config)
    assert written["loss"] == {
        "impl": "fused_chunked",
        "objective": "jsd",
        "tail": "bucket",
        "temperature": 2.0,
        "temperature_squared": False,
        "beta": 0.5,
        "ce_weight": 0.0,
        "gradient": "auto",
        "chunk_size": 64,
    }
    assert from_recipe(recipe(tmp_path, written, "written.yaml")) == config


def test_an_objective_without_full_sums_is_refused_with_the_recipe(tmp_path, monkeypatch):
    unit = replace(objective_unit("forward_kl"), row_sums=None)
    monkeypatch.setitem(OBJECTIVES, "top_only", unit)
    path = recipe(tmp_path, MINIMAL)
    choice = ["loss.objective=top_only", "loss.impl=dense"]
    assert from_recipe(path, choice).loss.divergence.objective == "top_only"
    with pytest.raises(ConfigError, match=r"^loss\.objective top_only"):
        from_recipe(path, [*choice, "mode=online", "teacher.hf_path=t", "data.path=d"])


def test_online_refuses_what_reads_a_truncated_teacher(tmp_path):
    online = ["mode=online", "teacher.hf_path=t", "data.path=d"]
    path = recipe(tmp_path, MINIMAL)
    for impl in ("fused_chunked", "sparse_chunked"):
        with pytest.raises(ConfigError, match="dense, fused_online"):
            from_recipe(path, [*online, f"loss.impl={impl}"])
    with pytest.raises(ConfigError, match=r"loss\.tail"):
        from_recipe(path, [*online, "loss.impl=dense", "loss.tail=bucket"])
    assert from_recipe(path, [*online, "loss.impl=fused_online"]).mode == "online"


def test_adapters_go_with_nothing_else_that_freezes(tmp_path):
    path = recipe(tmp_path, MINIMAL)
    lora = "student.lora.dim=8"
    assert from_recipe(path, [lora]).student.lora.alpha == 32
    with pytest.raises(ConfigError, match=r"student\.train_only"):
        from_recipe(path, [lora, "student.train_only=['*.mlp.*']"])
    with pytest.raises(ConfigError, match="mode=offline"):
        from_recipe(path, [lora, "mode=online", "teacher.hf_path=t", "data.path=d"])


def test_missing_and_circular_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        from_recipe(tmp_path / "absent.yaml")
    path = recipe(tmp_path, MINIMAL | {"include": ["recipe.yaml"]})
    with pytest.raises(ConfigError, match="includes itself"):
        from_recipe(path)
    path.write_text("loss: [unclosed")
    with pytest.raises(ConfigError, match="not valid YAML"):
        from_recipe(path)


def test_a_missing_required_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"student\.hf_path is required"):
        from_recipe(recipe(tmp_path, {"output_dir": "o", "student": {}, "cache": {"path": "c"}}))

"""Recipes: includes, overrides, and every refusal naming its key, what is allowed, and the nearest
match.
"""

import dataclasses
import typing
from dataclasses import replace

import pytest
import yaml

from megatron_kd.config import DistillConfig, from_recipe
from megatron_kd.losses import Divergence
from megatron_kd.losses.divergence import OBJECTIVES, objective_unit
from megatron_kd.tools.benchmark.cases import BenchmarkConfig
from megatron_kd.tools.report.study import StudyConfig
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("student.lora.dim=true", "student.lora.dim must be an integer, not True"),
        ("student.lora.dropout=1", "student.lora.dropout must be less than 1, not 1"),
        ("student.load_weights=1", "student.load_weights must be true or false, not 1"),
        ("student.hf_path=3", "student.hf_path must be a string, not 3"),
        ("student.train_only=mlp", "student.train_only must be a list, not 'mlp'"),
        ("student.train_only=[1]", "student.train_only[0] must be a string, not 1"),
        ("cache.topk=0", "cache.topk must be 1 or more, not 0"),
        ("cache.mixture=[{path: c}]", "cache.mixture[0].weight is required"),
        ("cache.mixture=[{path: c, weight: 0}]", "cache.mixture[0].weight must be greater than 0"),
        ("cache.mixture=[{path: c, weight: 1, wight: 1}]", "mean cache.mixture[0].weight?"),
        ("cache.mixture=[{path: c, weight: 1, name: a/b}]", "cache.mixture[0].name"),
        ("cache.share_by=rows", "cache.share_by must be"),
        ("data.num_workers=2.0", "data.num_workers must be an integer, not 2.0"),
        ("hidden_states.weight=.nan", "hidden_states.weight must be 0 or more, not nan"),
        ("hidden_states.pairs=[[1]]", "hidden_states.pairs[0] must be a list of 2 or more"),
        ("hidden_states.pairs=[[1,2,3]]", "hidden_states.pairs[0] must be a list of 2 at most"),
        ("hidden_states.pairs=[[1,norm]]", "hidden_states.pairs[0][1] must be an integer"),
        ("hidden_states.logits_weight=2", "hidden_states.pairs is empty"),
        ("hidden_states.los=mse", "did you mean hidden_states.loss?"),
        ("selection.min_improvement=-1", "selection.min_improvement must be 0 or more, not -1"),
        ("loss.temperature_squared=1", "loss.temperature_squared must be true or false, not 1"),
        ("loss.divergence={}", "unknown key loss.divergence"),
        ("outputs=1", "unknown key outputs; did you mean output_dir?"),
        ("bridge=3", "bridge must be a mapping, not 3"),
    ],
)
def test_a_wrong_value_is_one_sentence(tmp_path, override, message):
    with pytest.raises(ConfigError) as error:
        from_recipe(recipe(tmp_path, MINIMAL), [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_several_faults_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        from_recipe(recipe(tmp_path, MINIMAL), ["data.seed=x", "cache.topk=0", "mod=online"])
    assert [line.split()[0] for line in str(error.value).splitlines()] == [
        "cache.topk",
        "data.seed",
        "unknown",
    ]


def test_numbers_may_be_written_with_an_exponent(tmp_path):
    path = recipe(tmp_path, MINIMAL | {"selection": {"min_improvement": "1e-4"}})
    assert from_recipe(path, ["loss.temperature=2e0"]).selection.min_improvement == 1e-4


def sections_below(cls):
    yield cls
    for hint in typing.get_type_hints(cls).values():
        for kind in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(kind) and kind is not Divergence:
                yield from sections_below(kind)


@pytest.mark.parametrize("top", [DistillConfig, BenchmarkConfig, StudyConfig])
def test_every_field_of_a_section_has_a_strict_type(top):
    for cls in sections_below(top):
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            loose = {bool, int, float} & {hint, *typing.get_args(hint)}
            strict = typing.get_origin(hint) is typing.Annotated
            assert strict or not loose, f"{cls.__name__}.{name}: use Flag, Integer or Number"


def test_a_resolved_configuration_is_a_recipe_again(tmp_path):
    config = from_recipe(
        recipe(tmp_path, MINIMAL),
        ["loss.tail=bucket", "student.lora.dim=8", "hidden_states.pairs=[[final_norm,final_norm]]"],
    )
    assert from_recipe(recipe(tmp_path, plain(config), "again.yaml")) == config


def test_a_shipped_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = from_recipe("recipes/llama-8k-offline.yaml")
    assert config.loss.impl == "fused_chunked"
    mine = recipe(tmp_path, MINIMAL | {"include": ["../configs/loss/dense.yaml"]})
    assert from_recipe(mine).loss.impl == "dense"
    (tmp_path / "recipes").mkdir()
    recipe(tmp_path / "recipes", MINIMAL | {"output_dir": "mine"}, "llama-8k-offline.yaml")
    assert from_recipe("recipes/llama-8k-offline.yaml").output_dir == "mine"
    with pytest.raises(ConfigError, match=r"no recipe at recipes/llama\.yaml"):
        from_recipe("recipes/llama.yaml")
    with pytest.raises(ConfigError, match="no recipe at elsewhere"):
        from_recipe("elsewhere/recipes/llama-8k-offline.yaml")

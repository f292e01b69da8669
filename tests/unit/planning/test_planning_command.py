"""The command on recipes and configurations, and what it refuses."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from megatron_kd.cache import CacheSpec, CacheWriter
from megatron_kd.cache.codecs import bytes_per_position
from megatron_kd.cli import main
from megatron_kd.config import from_recipe
from megatron_kd.tools.planning.gpus import gpu
from megatron_kd.tools.planning.memory_figure import COLORS, figure_of
from megatron_kd.tools.planning.model_shape import shape_of_directory
from megatron_kd.tools.planning.plan_command import add_arguments, make_plan, plan_figure
from megatron_kd.tools.planning.run_settings import Recompute, from_config

GIB = 1 << 30


@pytest.fixture
def recipe(tmp_path, llama_directory):
    """Makes a recipe around a small student."""

    def make(student=None, **bridge):
        content = {
            "output_dir": str(tmp_path / "run"),
            "student": {"hf_path": str(student or llama_directory())},
            "cache": {"path": str(tmp_path / "cache")},
            "bridge": {
                "model": {"seq_length": 256},
                "train": {"train_iters": 10, "global_batch_size": 8, "micro_batch_size": 2},
            }
            | bridge,
        }
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(content))
        return str(file)

    return make


def plan_of(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plan, _ = make_plan(parser.parse_args(arguments))
    return plan


def settings_of(file, *overrides, ranks=None):
    config = from_recipe(file, overrides)
    student = shape_of_directory(config.student.hf_path, "student")
    return from_config(config, student, ranks=ranks, topk=None)


@pytest.mark.parametrize(
    ("override", "assumption"),
    [
        ("student.lora.dim=4", "trained: 0.0118M parameters of adapters"),
        ("student.train_only=['*.mlp.*']", "though student.train_only freezes a part"),
    ],
)
def test_says_what_it_takes_for_trained(recipe, override, assumption, capsys):
    assert main(["plan", recipe()]) == 0
    assert "trained" not in capsys.readouterr().out
    assert main(["plan", recipe(), override]) == 0
    assert assumption in " ".join(capsys.readouterr().out.split())


def test_prints_tables_and_draws(recipe, llama_directory, tmp_path, capsys):
    file = recipe()
    teacher = llama_directory("teacher", num_hidden_layers=8)
    png = tmp_path / "plan.png"
    options = ["--gpu", "h100", "--teacher", str(teacher), "--png", str(png)]
    assert main(["plan", file, "bridge.model.recompute_granularity=full", *options]) == 0
    shown = capsys.readouterr().out
    for text in (
        "weights",
        "activations",
        "longest sequence",
        "fused_chunked ◂",
        "fused_online",
        "Cache: 20,480 rows",
        "Capture:",
        "18 bytes per parameter",
        "selective (mlp)",
    ):
        assert text in shown
    drawn = (255 * imread(png)[..., :3]).round().astype(int)
    for component in ("weights", "optimizer"):
        assert (drawn == [round(255 * x) for x in to_rgb(COLORS[component])]).all(-1).any()
    plan = plan_of(file, "--teacher", str(teacher))
    (axes,) = plan_figure(plan).axes
    losses = ["online_dense", "fused_online", "dense", "sparse_chunked", "fused_chunked"]
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [loss.replace("_", "\n") for loss in losses]
    peaks = [text.get_text() for text in axes.texts]
    assert peaks == [f"{plan.fullest(loss).total / GIB:.3g}" for loss in losses]


def test_bars_stack_to_the_planned_peaks(recipe):
    plan = plan_of(recipe(), "--gpu", "l40s")
    bars = {impl: plan.fullest(impl) for impl in plan.impls}
    limit_gib = max(bar.total for bar in bars.values()) / GIB
    (axes,) = figure_of(bars, title="t", limit_gib=limit_gib, limit_name="limit").axes
    tops = [0.0] * len(bars)
    for container in axes.containers:
        component = container.get_label()
        for place, (bar, memory) in enumerate(zip(container, bars.values(), strict=True)):
            assert bar.get_height() == pytest.approx(memory.parts[component] / GIB)
            assert bar.get_y() == pytest.approx(tops[place])
            tops[place] += bar.get_height()
    assert tops == pytest.approx([bar.total / GIB for bar in bars.values()], rel=0.02)
    shown = [text.get_text() for text in axes.texts]
    assert shown == [*(f"{bar.total / GIB:.3g}" for bar in bars.values()), " limit"]
    (line,) = axes.get_lines()
    assert line.get_ydata() == [limit_gib, limit_gib]


def test_reads_the_bridge_section(recipe):
    file = recipe(
        ddp={"use_distributed_optimizer": True},
        optimizer={"use_precision_aware_optimizer": True, "exp_avg_dtype": "torch.bfloat16"},
    )
    plain = settings_of(file)
    assert (plain.ranks, plain.sequence_length, plain.micro_batches) == (1, 256, 4)
    assert (plain.value_bytes, plain.gradient_bytes, plain.state_bytes) == (2, 4, 10)
    assert plain.distributed_optimizer
    run = settings_of(
        file,
        "bridge.model.tensor_model_parallel_size=2",
        "bridge.model.sequence_parallel=true",
        "bridge.model.recompute_granularity=selective",
        "bridge.model.recompute_modules=[mlp]",
        "bridge.ddp.grad_reduce_in_fp32=false",
        ranks=4,
    )
    assert (run.tensor_parallel, run.data_parallel, run.micro_batches) == (2, 2, 2)
    assert run.sequence_parallel and run.gradient_bytes == 2
    assert run.recompute == Recompute(mode="selective", modules=("mlp",))
    named = settings_of(
        file, "bridge.mixed_precision=bf16_mixed", "bridge.ddp.grad_reduce_in_fp32=false"
    )
    assert named.gradient_bytes == 4  # the host's named precision sets it again
    assert not settings_of(file, "bridge.mixed_precision=bf16_mixed").loss_recomputes
    assert settings_of(file, "bridge.mixed_precision=fp16_mixed").loss_recomputes
    assert settings_of(file, "bridge.mixed_precision={fp16: true}").loss_recomputes
    fp32 = settings_of(file, "bridge.mixed_precision=fp32")
    assert (fp32.value_bytes, fp32.gradient_bytes, fp32.state_bytes) == (4, 4, 6)  # no main weights


def test_the_fewest_ranks_hold_whole_replicas_and_whole_experts(recipe):
    layout = ["bridge.model.tensor_model_parallel_size=4"]
    layout += ["bridge.model.expert_model_parallel_size=6", "bridge.train.global_batch_size=12"]
    layout += ["bridge.model.expert_tensor_parallel_size=1"]
    assert settings_of(recipe(), *layout).ranks == 12
    stages = settings_of(recipe(), *layout, "bridge.model.pipeline_model_parallel_size=2")
    assert stages.ranks == 24


def test_experts_are_split_over_tensor_ranks_too_unless_said_otherwise(recipe):
    """The host takes the tensor-parallel size for an expert tensor-parallel size left open."""
    layout = ["bridge.model.tensor_model_parallel_size=4", "bridge.train.global_batch_size=8"]
    layout += ["bridge.model.expert_model_parallel_size=2"]
    settings = settings_of(recipe(), *layout)
    assert (settings.expert_tensor_parallel, settings.ranks) == (4, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bridge.ddp.use_megatron_fsdp=true", "use_megatron_fsdp is not covered"),
        ("bridge.mixed_precision=bf16_with_fp8_mixed", "plan with bf16_mixed"),
        ("bridge.optimizer.optimizer=muon", "optimizer=muon is not covered"),
        ("bridge.model.recompute_granularity=ful", "must be full, selective or null"),
        ("bridge.model.seq_length=0", "positive number of tokens"),
        ("bridge.train.global_batch_size=7", "not a multiple of"),
        ("student.hf_path=nowhere", "no config.json in nowhere"),
        ("loss.impl=fussed", "loss.impl"),
    ],
)
def test_refuses_in_one_line(recipe, override, message, capsys):
    assert main(["plan", recipe(), override]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h20"], "did you mean h200"),
        (["--ranks", "0"], "--ranks must be 1 or more"),
        (["--efficiency", "1.5"], "--efficiency must lie"),
        (["--codec", "zip"], "codec must be one of compact, fp16, not zip"),
    ],
)
def test_refuses_options(recipe, options, message, capsys):
    assert main(["plan", recipe(), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("codec", ["compact", "fp16"])
def test_cache_size_against_a_written_cache(tmp_path, codec):
    vocab, k, positions = 49152, 100, 128
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((positions, vocab))
    ids = np.argsort(-logits, axis=1)[:, :k]
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    spec = CacheSpec(vocab_size=vocab, topk=k, teacher="t", tokenizer="t", codec=codec)
    with CacheWriter(tmp_path / "cache", spec) as writer:
        writer.append(
            rng.integers(0, vocab, positions).astype(np.int32),
            np.ones(positions, bool) & (np.arange(positions) < positions - 1),
            ids.astype(np.int32),
            np.take_along_axis(logprobs, ids, 1).astype(np.float32),
        )
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    written = sum(shard["bytes"] for shard in manifest["shards"]) / manifest["positions"]
    # A small shard's header takes some 20 bytes of every position.
    header = 2500 / manifest["positions"]
    assert bytes_per_position(codec, vocab, k) == pytest.approx(written - header, rel=0.1)


def test_data_on_disk_says_length_and_size(recipe, tmp_path, capsys):
    file = recipe(model={})
    assert main(["plan", file]) == 1
    assert "seq_length must be" in capsys.readouterr().err
    split = tmp_path / "cache" / "train"
    split.mkdir(parents=True)
    manifest = {"samples": 10, "positions": 1000, "topk": 20, "data": {"seq_length": 128}}
    (split / "manifest.json").write_text(json.dumps(manifest))
    settings = settings_of(file)
    assert (settings.sequence_length, settings.topk) == (128, 20)
    assert main(["plan", file]) == 0
    assert "Cache: 1,000 rows" in capsys.readouterr().out


def test_prepared_data_says_how_many_rows_a_cache_of_it_has(recipe, tmp_path, capsys):
    for split, tokens in (("train", 900), ("validation", 90), ("test", 9)):
        folder = tmp_path / "data" / split
        folder.mkdir(parents=True)
        manifest = {"samples": 10, "supervised_tokens": tokens, "seq_length": 128}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert main(["plan", recipe(model={}), f"data.path={tmp_path / 'data'}"]) == 0
    shown = capsys.readouterr().out
    assert "Data: 30 sequences, 3,840 tokens (the data on disk)" in shown
    assert "Cache: 999 rows" in shown


@pytest.mark.parametrize(
    ("override", "marked"),
    [
        ("bridge.model.recompute_modules=[mlp]", "none"),  # of no effect without a granularity
        ("bridge.model.recompute_granularity=full", "full"),
        ("bridge.model.recompute_granularity=selective", "selective (core_attn)"),
    ],
)
def test_the_recipes_recompute_mode_is_marked(recipe, override, marked, capsys):
    assert main(["plan", recipe(), override]) == 0
    table = capsys.readouterr().out.split("By recompute mode")[1]
    rows = [line.strip("│ ").split("│")[0].strip() for line in table.splitlines()]
    assert [row for row in rows if "◂" in row] == [f"{marked} ◂"]


def test_an_online_recipe_needs_a_teacher_and_marks_its_loss(recipe, llama_directory, capsys):
    file = recipe()
    online = ["mode=online", "loss.impl=dense", "data.path=data", "bridge.model.seq_length=64"]
    assert main(["plan", file, *online]) == 1
    assert "teacher.hf_path is required" in capsys.readouterr().err
    assert main(["plan", file, *online, f"teacher.hf_path={llama_directory('teacher')}"]) == 0
    assert "online_dense ◂" in capsys.readouterr().out


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_plan_of_a_known_architecture_imports_no_framework(recipe, llama_directory, mode):
    """Importing PyTorch and transformers takes longer than all the rest of a plan."""
    code = (
        "import sys; from megatron_kd.cli import main; status = main(['plan', *sys.argv[1:]]); "
        "heavy = {'torch', 'transformers', 'megatron', 'modelopt', 'matplotlib'} & set(sys.modules)"
        "; sys.exit(status or ', '.join(heavy) or None)"
    )
    arguments = [recipe()]
    if mode == "online":
        arguments += ["mode=online", "loss.impl=fused_online", "loss.objective=jsd"]
        arguments += ["data.path=data", f"teacher.hf_path={llama_directory('teacher')}"]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_gpu_names_and_plan_object(recipe):
    assert gpu("H200").name == "H200"
    plan = plan_of(recipe(), "--ranks", "4")
    assert plan.settings.data_parallel == 4 and plan.impls == (
        "dense",
        "sparse_chunked",
        "fused_chunked",
    )


def test_each_stage_has_its_own_plan(recipe, capsys):
    file = recipe()
    content = yaml.safe_load(Path(file).read_text())
    del content["bridge"]["train"]["train_iters"]
    longer = {"iterations": 4, "bridge": {"model": {"seq_length": 2048}}}
    content["stages"] = [{"iterations": 6}, longer]
    Path(file).write_text(yaml.safe_dump(content))
    assert main(["plan", file]) == 0
    first, second = capsys.readouterr().out.split("stage 2 of 2: iterations 7 to 10")
    assert "stage 1 of 2: iterations 1 to 6" in first
    assert "6 steps take" in first and "4 steps take" in second
    assert "All stages: 10 steps take" in second
    assert "48 sequences, 12,288 tokens" in first
    assert "32 sequences, 65,536 tokens" in second

"""Every recipe but the quickstarts: `distill --dry-run` resolves it against the published
shapes, for the ranks it is meant for.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from warm import warm_python

from megatron_kd.cache import CacheSpec, CacheWriter
from megatron_kd.data.sequences import SequenceWriter
from megatron_kd.tools.gpu_check.published_models import MODELS
from megatron_kd.tools.planning.model_shape import shape_of_directory

REPOSITORY = Path(__file__).parents[3]

# recipe → (ranks, student, tensor, pipeline, expert parallel, sequence length).
RECIPES = {
    "llama-8k-offline": (1, "llama-3.23b", 1, 1, 1, 8192),
    "llama-8k-online": (1, "llama-3.23b", 1, 1, 1, 8192),
    "llama-32k-offline": (1, "llama-3.23b", 1, 1, 1, 32768),
    "llama-32k-online": (1, "llama-3.23b", 1, 1, 1, 32768),
    "gpt-oss-20b-32k-one-node": (8, "gpt-oss-20b", 2, 1, 4, 32768),
    "gpt-oss-20b-32k-four-nodes": (32, "gpt-oss-20b", 4, 4, 2, 32768),
    "qwen3-8b-to-4b": (8, "Qwen3-4B", 2, 1, 1, 8192),
    "minitron-8b-to-4b": (8, "Minitron-4B-Base", 4, 1, 1, 4096),
}
CACHES = {
    "smoltalk-llama-8k": (128256, 8192),
    "smoltalk-llama-32k": (128256, 32768),
    "smoltalk-gpt-oss-32k": (201088, 32768),
    "smoltalk-qwen3-8k": (151936, 8192),
    "minitron-4k": (256000, 4096),
}

# The command itself, once per recipe, in one process: importing the host takes longest.
DRY_RUNS = """
import contextlib, io, json, sys
from megatron_kd.cli import main
for recipe, *overrides in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["distill", recipe, "--dry-run", *overrides])
    print("DONE " + json.dumps([recipe, status, printed.getvalue()]))
"""


def packing_of(name: str) -> str:
    """As the recipes' own instructions prepare it."""
    return "naive" if "gpt-oss" in name else "block"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """models/, data/ and caches/ as the recipes name them: real configurations, one sample."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, (config, _) in MODELS.items():
        (folder / "models" / name).mkdir(parents=True)
        (folder / "models" / name / "config.json").write_text(json.dumps(config))
    tokens, mask = np.arange(8, dtype=np.int32), np.array([True] * 7 + [False])
    for name, (vocab_size, length) in CACHES.items():
        for split in ("train", "validation"):
            spec = CacheSpec(
                vocab_size=vocab_size,
                topk=100,
                teacher="published",
                tokenizer="published",
                packing=packing_of(name),
                data={"seq_length": length},
            )
            with CacheWriter(folder / "caches" / name / split, spec) as writer:
                ids = np.tile(np.arange(vocab_size - 100, vocab_size), (8, 1))
                writer.append(tokens, mask, ids, np.full((8, 100), np.log(0.009), np.float32))
            data = folder / "data" / name / split
            data.mkdir(parents=True)
            sequences = SequenceWriter(data)
            sequences.append(tokens, mask, [0, 8])
            sequences.close(
                split=split,
                seq_length=length,
                packing=packing_of(name),
                tokenizer="published",
                vocab_size=vocab_size,
                template=None,
            )
    return folder


@pytest.fixture(scope="module")
def resolved(workplace) -> dict[str, dict]:
    recipes = [[str(REPOSITORY / "recipes" / f"{name}.yaml")] for name in RECIPES]
    of_experts = REPOSITORY / "recipes" / "gpt-oss-20b-32k-one-node.yaml"
    recipes.append([str(of_experts), "bridge.model.expert_tensor_parallel_size=2"])
    done = subprocess.run(
        [warm_python("host"), "-c", DRY_RUNS, json.dumps(recipes)],
        cwd=workplace,
        env=os.environ | {"MEGATRON_KD_BACKEND": "cpu", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [json.loads(x[5:]) for x in done.stdout.splitlines() if x.startswith("DONE ")]
    assert done.returncode == 0 and len(lines) == len(recipes), done.stderr[-6000:]
    # The last is refused by the host alone, which is asked although this machine has no GPU.
    assert [status for _, status, _ in lines] == [0] * len(RECIPES) + [2], done.stderr[-6000:]
    assert "Bias in Moe is only supported when ETP==1" in done.stderr
    del lines[-1]
    return {Path(recipe).stem: yaml.safe_load(printed) for recipe, _, printed in lines}


@pytest.mark.extended
def test_an_installed_package_runs_its_own_recipes_from_any_folder(workplace, tmp_path):
    """What `pip install` puts down is enough: no checkout, another working directory."""
    checkout, wheels, target = tmp_path / "checkout", tmp_path / "wheels", tmp_path / "installed"
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        if name.startswith(("megatron_kd/", "recipes/", "configs/")) or "/" not in name:
            if (REPOSITORY / name).is_file():
                (checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, checkout / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    build = ["wheel", *alone, "--no-build-isolation", "--wheel-dir", wheels, checkout]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", *alone, "--target", target, wheel], check=True)
    shutil.rmtree(checkout)

    environment = os.environ | {
        "PYTHONPATH": str(target),
        "MEGATRON_KD_BACKEND": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    where = "import megatron_kd; print(megatron_kd.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.stdout.startswith(str(target))
    command = ["distill", "--dry-run", "recipes/llama-8k-offline.yaml", "loss.impl=dense"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_kd", *command],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["loss"]["impl"] == "dense"
    assert printed["bridge"]["model"]["num_layers"] == MODELS["llama-3.23b"][0]["num_hidden_layers"]


def test_every_recipe_is_listed_here():
    found = {path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")}
    at_laptop_size = {name for name in found if name.startswith(("quickstart", "study"))}
    assert found - at_laptop_size == set(RECIPES)


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_shapes_are_the_published_ones(resolved, name):
    _, student, *_, length = RECIPES[name]
    config, _ = MODELS[student]
    model = resolved[name]["bridge"]["model"]
    assert model["num_layers"] == config["num_hidden_layers"]
    assert model["hidden_size"] == config["hidden_size"]
    assert model["ffn_hidden_size"] == config["intermediate_size"]
    assert model["num_attention_heads"] == config["num_attention_heads"]
    assert model["num_query_groups"] == config["num_key_value_heads"]
    assert model["kv_channels"] == config["head_dim"]
    assert model["vocab_size"] == config["vocab_size"]
    assert model["share_embeddings_and_output_weights"] == config["tie_word_embeddings"]
    assert (model["num_moe_experts"] or 0) == config.get("num_local_experts", 0)
    samples = resolved[name]["bridge"]["dataset"]["samples"]
    assert model["seq_length"] == samples["sequence_length"] == length


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_layouts_divide_the_model(resolved, name):
    ranks, _, tensor, pipeline, expert, _ = RECIPES[name]
    bridge = resolved[name]["bridge"]
    model, train = bridge["model"], bridge["train"]
    assert model["tensor_model_parallel_size"] == tensor
    assert model["pipeline_model_parallel_size"] == pipeline
    assert model["expert_model_parallel_size"] == expert
    replicas, left = divmod(ranks, tensor * pipeline)
    assert not left
    for size in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length"):
        assert model[size] % tensor == 0
    assert model["num_layers"] % pipeline == 0
    assert (model["num_moe_experts"] or expert) % expert == 0
    assert ranks % (expert * pipeline) == 0  # the host's expert ranks fill what pipeline leaves
    assert resolved[name]["launch"] == {
        "nodes": max(1, ranks // 8),
        "ranks_per_node": min(ranks, 8),
    }
    assert train["global_batch_size"] % (train["micro_batch_size"] * replicas) == 0
    assert expert == 1 or tensor == 1 or model["sequence_parallel"]


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_the_optimiser_is_the_papers(resolved, name):
    bridge = resolved[name]["bridge"]
    optimizer, scheduler = bridge["optimizer"], bridge["scheduler"]
    assert (optimizer["lr"], optimizer["min_lr"]) == (2e-6, 2e-7)
    assert (optimizer["adam_beta1"], optimizer["adam_beta2"]) == (0.9, 0.999)
    assert (optimizer["adam_eps"], optimizer["weight_decay"], optimizer["clip_grad"]) == (
        1e-8,
        0.1,
        1,
    )
    assert (scheduler["lr_decay_style"], scheduler["lr_warmup_iters"]) == ("cosine", 10)
    train = bridge["train"]
    assert (train["global_batch_size"], train["micro_batch_size"]) == (32, 1)
    assert bridge["rng"]["seed"] == 1234
    assert bridge["mixed_precision"] == "bf16_mixed"
    assert bridge["ddp"]["grad_reduce_in_fp32"] is True


@pytest.mark.parametrize("name", MODELS)
def test_configurations_have_the_published_size(workplace, name):
    """Counted on the architecture itself, on the meta device."""
    billions = shape_of_directory(workplace / "models" / name, name).parameters / 1e9
    assert billions == pytest.approx(MODELS[name][1], abs=0.006)


@pytest.mark.extended
def test_losses_and_modes(resolved):
    assert resolved["llama-8k-online"]["loss"]["impl"] == "fused_online"
    assert resolved["llama-8k-online"]["bridge"]["model"]["seq_length"] == 8192
    assert resolved["gpt-oss-20b-32k-four-nodes"]["loss"]["impl"] == "dense"
    for name in ("llama-8k-offline", "llama-32k-offline", "gpt-oss-20b-32k-one-node"):
        assert resolved[name]["loss"]["impl"] == "fused_chunked"
    for name, recipe in resolved.items():
        assert recipe["mode"] == ("online" if name.endswith("online") else "offline")


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name, (ranks, *_) in RECIPES.items() if ranks > 1])
def test_several_replicas_split_the_optimizer_and_hide_their_messages(resolved, name):
    bridge = resolved[name]["bridge"]
    for section in ("ddp", "optimizer"):
        assert bridge[section]["use_distributed_optimizer"] is True
        assert bridge[section]["overlap_param_gather"] is True
    assert bridge["ddp"]["overlap_grad_reduce"] is True
    assert (bridge["train"]["manual_gc"], bridge["train"]["manual_gc_interval"]) == (True, 100)

"""Every recipe as its GPUs would run it, on a CPU, at small shapes: two steps, an evaluation, a
checkpoint, and the export where the recipe asks for one.

Precision, optimizer, overlaps, fusions and layout are the recipe's own; the number of ranks, layers
and channels is not.
"""

import math
from pathlib import Path

import pytest
import torch
from launch import EXPORT, REPOSITORY, Curves, start_ranks
from small_world import SEQUENCE_LENGTH, VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_kd.recipe_file import merged_recipe

RUN = Path(__file__).with_name("run_as_on_gpus.py")
RECIPES = {path.stem: path for path in sorted((REPOSITORY / "recipes").glob("*.yaml"))}
AT_MOST = 2  # ranks along each dimension of a layout

SIZES = {"model": ["seq_length"], "train": ["train_iters"], "checkpoint": ["save_interval"]}

# model_type and what is special to each student of a recipe.
STUDENTS = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "nemotron": {"partial_rotary_factor": 0.5, "hidden_act": "relu2"},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
FAMILY = {"Qwen3-4B": "qwen3", "Minitron-4B-Base": "nemotron", "gpt-oss-20b": "gpt_oss"}


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> Path:
    """A directory for each family: random weights in bf16, as published ones are."""
    folder = tmp_path_factory.mktemp("students")
    for family, special in STUDENTS.items():
        torch.manual_seed(5)
        config = AutoConfig.for_model(
            family,
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            pad_token_id=None,
            bos_token_id=1,
            eos_token_id=2,
            **({"tie_word_embeddings": False} | special),
        )
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(folder / family)
    return folder


def case(world: Path, students: Path, name: str, folder: Path) -> tuple[int, list[str]]:
    """(ranks, overrides) of a recipe at small shapes."""
    recipe = merged_recipe(RECIPES[name])
    model = recipe["bridge"].get("model", {})
    sizes = {
        kind: min(AT_MOST, model.get(f"{kind}_model_parallel_size", 1))
        for kind in ("tensor", "pipeline", "expert")
    }
    replica = sizes["tensor"] * sizes["pipeline"]
    distributed = recipe["bridge"].get("ddp", {}).get("use_distributed_optimizer", False)
    ranks = math.lcm(replica, sizes["pipeline"] * sizes["expert"])
    if distributed and ranks < 2:
        ranks = 2
    packing = "naive" if "gpt-oss" in name else "block"
    family = FAMILY.get(Path(recipe["student"]["hf_path"]).name, "llama")
    overrides = [
        f"output_dir={folder}",
        f"launch={{nodes: 1, ranks_per_node: {ranks}}}",
        f"student.hf_path={students / family}",
        f"cache.path={world / packing / 'cache'}",
        "data.num_workers=0",
        "progress=false",
        f"bridge.model.seq_length={SEQUENCE_LENGTH}",
        "bridge.tokenizer.tokenizer_type=NullTokenizer",
        "bridge.tokenizer.tokenizer_model=null",
        f"bridge.tokenizer.vocab_size={VOCAB_SIZE - 1}",
        "bridge.train.train_iters=2",
        "bridge.train.global_batch_size=4",
        "bridge.train.eval_interval=2",
        "bridge.train.eval_iters=1",
        "bridge.scheduler.lr_warmup_iters=1",
        *(f"bridge.model.{kind}_model_parallel_size={size}" for kind, size in sizes.items()),
    ]
    if recipe["cache"].get("topk"):
        overrides.append("cache.topk=24")
    if recipe["bridge"].get("checkpoint", {}).get("save", "") is not None:
        overrides.append("bridge.checkpoint.save_interval=2")
    if recipe["mode"] == "online":
        overrides += [f"teacher.hf_path={world}/teacher", f"data.path={world / packing / 'data'}"]
    if "export" in recipe:
        overrides.append(f"export.hf_path={folder / EXPORT}")
    return ranks, overrides


def distinct() -> list[str]:
    """One name for each group of recipes that small shapes make equal."""
    seen = {}
    for name, path in RECIPES.items():
        recipe = merged_recipe(path)
        bridge = recipe["bridge"]
        for section, keys in SIZES.items():
            for key in keys:
                bridge.get(section, {}).pop(key, None)
        for key in ("output_dir", "launch", "cache", "data", "export"):
            recipe.pop(key, None)
        seen.setdefault(str(recipe), name)
    return list(seen.values())


@pytest.mark.extended
@pytest.mark.parametrize("name", distinct())
def test_a_recipe_trains_as_it_would_on_gpus(world, students, tmp_path, name):
    ranks, overrides = case(world.parent, students, name, tmp_path)
    started = start_ranks(ranks, RUN, RECIPES[name], *overrides)
    started.check()
    curves = Curves(tmp_path)
    assert len(curves.train()) == 2 and all(map(math.isfinite, curves.train()))
    assert all(0 < norm < math.inf for norm in curves.grad_norms())
    # Model and optimizer are in bf16, and the weight gradient is summed by the fused product.
    assert "RAN [True, True, True]" in started.log(0).splitlines()


@pytest.mark.extended
def test_a_configuration_that_fails_on_gpus_fails_here(world, students, tmp_path):
    """A 16-bit student beside an optimizer that knows of no 16 bits."""
    _, overrides = case(world.parent, students, "study", tmp_path)
    started = start_ranks(1, RUN, "--bare-precision", RECIPES["study"], *overrides)
    assert started.wait() != 0
    assert "attempting to assign a gradient with dtype" in started.log(0)

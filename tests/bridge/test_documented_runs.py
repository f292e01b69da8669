"""The pages' commands, run in order as they stand there, on a small teacher with a real tokenizer.
Only sizes change, and each change must find what it replaces.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY, environment
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow

TIMEOUT_S = 1200
CHAT = (
    '{"messages": [{"role": "user", "content": "How many is %d and %d?"}, '
    '{"role": "assistant", "content": "It is %d, which is what one gets by adding them."}]}\n'
)
SMALLER = {
    "README.md": [
        ("--seq-length 8192", "--seq-length 64"),
        ("--layers 16", "--layers 2"),
        ("--nproc-per-node 8", "--nproc-per-node 2"),
    ],
    "docs/tutorial.md": [
        ("TEACHER=/models/Qwen3-8B ", "TEACHER=$PWD/TEACHER "),
        ("DATA=/data/chats.jsonl ", "DATA=$PWD/chats.jsonl "),
        ("WORK=/scratch/distil\n", "WORK=$PWD/work\n"),
        ("--seq-length 8192", "--seq-length 64"),
        ("--layers 24 --ffn-size 8192", "--layers 2 --ffn-size 32"),
    ],
    "docs/generate.md": [
        ("TEACHER=/models/Qwen3-8B ", "TEACHER=$PWD/TEACHER "),
        ("PROMPTS=/data/chats.jsonl ", "PROMPTS=$PWD/chats.jsonl "),
        ("WORK=/scratch/distil\n", "WORK=$PWD/work\n"),
        ("--max-new-tokens 512", "--max-new-tokens 16"),
        ("--seq-length 2048", "--seq-length 96"),
    ],
    "docs/packing.md": [
        ("--input pydoc", "--max-tokens 20000 --input pydoc"),
        ("--output data", "--output data --overwrite"),
    ],
}
SMALLER_RECIPE = [
    ("/scratch/distil", "{folder}/work"),
    ("train_iters: 1000, global_batch_size: 32", "train_iters: 4, global_batch_size: 4"),
    ("eval_interval: 100, eval_iters: 4", "eval_interval: 2, eval_iters: 1"),
    ("save_interval: 100", "save_interval: 2"),
]
STUDY = """
recipe: mine.yaml
command: torchrun --standalone --nproc-per-node 1 scripts/distill.py
output_dir: studied
teacher: TEACHER
held_out: work/data/validation
seeds: [1]
runs: {fused: {}, dense: {overrides: [loss.impl=dense]}}
sections: {losses: {title: Losses, kind: curves, runs: [fused, dense]}}
"""


def changed(text: str, changes: list[tuple[str, str]]) -> str:
    for old, new in changes:
        assert old in text, f"the page no longer says {old!r}"
        text = text.replace(old, new)
    return text


def blocks(page: str, language: str) -> list[str]:
    text = (REPOSITORY / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def without_downloads(script: str) -> str:
    """evaluate.sh's benchmarks come from the network; tests/slow/test_evaluation.py runs it."""
    lines = script.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("scripts/evaluate.sh"))


def run_script(script: str, folder: Path) -> str:
    """Run as in a checkout whose virtual environment is active; returns the output."""
    values = environment()
    values["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{values['PATH']}"
    done = subprocess.run(
        ["bash", "-euxc", script],
        env=values,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture
def checkout(tmp_path, smollm2_tokenizer) -> Path:
    """What the commands read of a checkout, beside a teacher, chats and a corpus."""
    for name in ("scripts", "configs", "recipes"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "chats.jsonl").write_text("".join(CHAT % (i, 2 * i, 3 * i) for i in range(120)))
    (tmp_path / "corpus").mkdir()
    lines = [json.dumps({"text": f"Line {i}, after the one before."}) for i in range(400)]
    (tmp_path / "corpus" / "text.jsonl").write_text("\n".join(lines))
    config = LlamaConfig(
        vocab_size=len(smollm2_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        bos_token_id=smollm2_tokenizer.bos_token_id,
        eos_token_id=smollm2_tokenizer.eos_token_id,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "TEACHER")
    smollm2_tokenizer.save_pretrained(tmp_path / "TEACHER")
    return tmp_path


def test_readme(checkout):
    (script,) = (b for b in blocks("README.md", "bash") if "megatron-kd prepare" in b)
    (checkout / "recipes").unlink()
    (checkout / "recipes").mkdir()
    (checkout / "recipes" / "mine.yaml").write_text(
        "mode: offline\noutput_dir: runs/mine\nstudent: {hf_path: student}\ncache: {path: cache}\n"
        "bridge:\n  model: {tensor_model_parallel_size: 2}\n"
        "  train: {train_iters: 2, global_batch_size: 2, eval_interval: 2, eval_iters: 1}\n"
        "  checkpoint: {save_interval: 2}\n"
    )
    output = run_script(without_downloads(changed(script, SMALLER["README.md"])), checkout)
    assert "validation kd loss" in output
    assert (checkout / "student-trained" / "config.json").is_file()


def test_tutorial(checkout):
    page = "docs/tutorial.md"
    (recipe,) = blocks(page, "yaml")
    recipe = changed(recipe, SMALLER_RECIPE).replace("{folder}", str(checkout))
    (checkout / "mine.yaml").write_text(recipe)
    (checkout / "my-study.yaml").write_text(STUDY)
    script = changed("".join(blocks(page, "bash")), SMALLER[page])
    output = run_script(without_downloads(script), checkout)
    assert "#SBATCH" in output
    assert (checkout / "work" / "best" / "config.json").is_file()
    assert (checkout / "work" / "run" / "hf" / "config.json").is_file()
    for made in ("plan.png", "cache-train.png", "results/study.csv", "results/study_losses.png"):
        assert (checkout / made).is_file(), made


def test_generate_page(checkout):
    page = "docs/generate.md"
    output = run_script(changed("".join(blocks(page, "bash")), SMALLER[page]), checkout)
    assert "120 responses" in output and "train: complete" in output
    assert (checkout / "work" / "captured" / "cache" / "validation" / "manifest.json").is_file()


def test_packing_page(checkout):
    page = "docs/packing.md"
    run_script(changed("".join(blocks(page, "bash")), SMALLER[page]), checkout)
    assert (checkout / "data" / "validation").is_dir()

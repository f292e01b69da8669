"""Twenty real steps of every recipe on random weights, and a whole step beside the host's own.

Models have the published shapes and no published weights; the teacher's rows are random. So a loss
means nothing here; that it is finite, the time of a step and the memory do.
"""

import functools
import importlib.util
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from megatron_kd.metrics_file import read_metrics
from megatron_kd.recipe_file import find_recipe, merged_recipe
from megatron_kd.tools.gpu_check.part import FAILED, SKIPPED, Outcome, Settings, table
from megatron_kd.tools.gpu_check.published_models import MODELS, SMOLLM2

STEPS = 20
SAMPLES = {"train": 4, "validation": 2}
PIPELINE, EXPERTS = "pipeline_model_parallel_size", "expert_model_parallel_size"
REPLICA = ("tensor_model_parallel_size", PIPELINE, "context_parallel_size")
WHOLE_STEP = "llama-8k-offline"
SMALL_LENGTH, SMALL_TOPK = 64, 16
SMALL_SHAPE = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
NOT_ON_A_CPU = {"nemotron": "its norm is Transformer Engine's alone"}
HEADS = ["step", "ms per step", "peak GiB per GPU", "first loss", "last loss"]


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(
        path.stem for path in find_recipe("recipes/quickstart.yaml").parent.glob("*.yaml")
    )


def recipe(name: str):
    """The part that runs one recipe."""

    def run(settings: Settings) -> Outcome:
        plan = _Plan(name, settings)
        reason = plan.reason_to_skip()
        if reason:
            return Outcome(SKIPPED, [reason])
        return _outcome(settings, [(name, plan.train("run"))])

    return run


def whole_step(settings: Settings) -> Outcome:
    """The same student and data: our losses' step, and the host's own cross-entropy step."""
    plan = _Plan(WHOLE_STEP, settings, folder="whole_step", packing="naive")
    reason = plan.reason_to_skip()
    if reason:
        return Outcome(SKIPPED, [reason])
    runs = [
        ("host's own cross-entropy", plan.train("own", module="megatron_kd.host.plain_training")),
        ("distillation, fused_chunked", plan.train("fused")),
        ("distillation, sparse_chunked", plan.train("sparse", "loss.impl=sparse_chunked")),
    ]
    outcome = _outcome(settings, runs)
    if outcome.status != FAILED:
        own, fused = (_seconds(read_metrics(folder)) for _, (folder, _) in runs[:2])
        outcome.lines += [
            "",
            f"A fused distillation step takes {fused / own:.3f} × the host's own.",
        ]
    return outcome


class _Plan:
    """A recipe at this machine's size: what it names, made, and its command line."""

    def __init__(self, name: str, settings: Settings, *, folder=None, packing=None):
        self.name, self.settings = name, settings
        self.recipe = merged_recipe(find_recipe(f"recipes/{name}.yaml"))
        self.place = Path(settings.folder) / (folder or f"recipe_{name}")
        self.packing = packing or ("naive" if "gpt-oss" in name else "block")
        model = self.recipe["bridge"].get("model", {})
        most = 2 if settings.small else math.inf
        self.sizes = {key: min(most, model.get(key, 1)) for key in (*REPLICA, EXPERTS)}
        replica = math.prod(self.sizes[key] for key in REPLICA)
        launch = self.recipe.get("launch") or {}
        self.ranks = launch.get("nodes", 1) * launch.get("ranks_per_node", replica)
        if settings.small:
            self.ranks = math.lcm(replica, self.sizes[PIPELINE] * self.sizes[EXPERTS])
        self.replicas = self.ranks // replica
        self.length = SMALL_LENGTH if settings.small else model.get("seq_length", 256)
        self.topk = SMALL_TOPK if settings.small else 100

    def reason_to_skip(self) -> str | None:
        if importlib.util.find_spec("megatron") is None:
            return "Megatron-Bridge is not installed."
        if self.ranks > self.settings.ranks:
            return f"Takes {self.ranks} ranks; --ranks says {self.settings.ranks}."
        family = self._config(self.recipe["student"]["hf_path"])["model_type"]
        if self.settings.device == "cpu" and family in NOT_ON_A_CPU:
            return f"Not on the CPU backend: {NOT_ON_A_CPU[family]}."
        return None

    def _config(self, directory: str) -> dict:
        name = Path(directory).name
        config = dict(MODELS[name][0] if name in MODELS else SMOLLM2)
        if self.settings.small:
            config |= SMALL_SHAPE
            if "num_local_experts" in config:
                config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        return config

    @functools.cached_property
    def made(self) -> list[str]:
        """Overrides that name the models and data, which are written first."""
        student = self.place / "student"
        config = self._config(self.recipe["student"]["hf_path"])
        student.mkdir(parents=True, exist_ok=True)
        (student / "config.json").write_text(json.dumps(config))
        overrides = [f"student.hf_path={student}"]
        vocabulary = config["vocab_size"]
        if self.recipe["mode"] == "online":
            teacher = self.place / "teacher"
            _write_random_model(
                teacher, self._config(self.recipe["teacher"]["hf_path"]), self.settings.device
            )
            overrides += [f"teacher.hf_path={teacher}", f"data.path={self.place}/data"]
        for split, count in SAMPLES.items():
            self._write_samples(split, count, vocabulary)
        return [
            *overrides,
            f"cache.path={self.place}/cache",
            "bridge.tokenizer.tokenizer_type=NullTokenizer",
            "bridge.tokenizer.tokenizer_model=null",
            f"bridge.tokenizer.vocab_size={vocabulary - 1}",
        ]

    def _write_samples(self, split: str, count: int, vocabulary: int) -> None:
        """Random tokens and rows, full length, all supervised: a cache, and the same as data."""
        from megatron_kd.cache import CacheSpec, CacheWriter
        from megatron_kd.data.sequences import SequenceWriter

        cache, data = self.place / "cache" / split, self.place / "data" / split
        if (cache / "manifest.json").is_file() or data.is_dir():
            return
        draw = np.random.default_rng(0)
        kept = {"seq_length": self.length}
        spec = CacheSpec(
            vocab_size=vocabulary,
            topk=self.topk,
            teacher="random",
            tokenizer="none",
            packing=self.packing,
            data=kept,
        )
        data.mkdir(parents=True)
        sequences = SequenceWriter(data)
        part = vocabulary // self.topk
        with CacheWriter(cache, spec) as writer:
            for _ in range(count):
                tokens = draw.integers(3, vocabulary, self.length, dtype=np.int32)
                mask = np.arange(self.length) < self.length - 1
                ids = draw.integers(0, part, (self.length, self.topk))
                ids += np.arange(self.topk) * part
                scores = -np.sort(-draw.normal(size=(self.length, self.topk)), axis=-1)
                logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True)) - 0.1
                bounds = [0, self.length]
                writer.append(tokens, mask, ids, logprobs.astype(np.float32), cu_seqlens=bounds)
                sequences.append(tokens, mask, np.array(bounds))
        sequences.close(
            split=split,
            seq_length=self.length,
            packing=self.packing,
            tokenizer="none",
            vocab_size=vocabulary,
            template=None,
        )

    def train(self, run: str, *overrides: str, module: str = "") -> tuple[Path, int]:
        """Train from the start; returns the run's folder, which holds its log, and the status."""
        folder = self.place / run
        folder.mkdir(parents=True, exist_ok=True)
        bridge = {
            "model.seq_length": self.length,
            "train.train_iters": STEPS,
            "train.global_batch_size": self.replicas,
            "train.micro_batch_size": 1,
            "train.eval_interval": STEPS,
            "train.eval_iters": 1,
            "scheduler.lr_warmup_iters": 2,
            "checkpoint.save": "null",
            "checkpoint.load": "null",
            **{f"model.{key}": size for key, size in self.sizes.items()},
        }
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(self.ranks), "-m"]
        words += [module] if module else ["megatron_kd", "distill"]
        words += [str(find_recipe(f"recipes/{self.name}.yaml")), *self.made]
        words += [f"output_dir={folder}", "progress=false", "student.load_weights=false"]
        words += [f"launch={{nodes: 1, ranks_per_node: {self.ranks}}}"]
        words += [f"bridge.{key}={value}" for key, value in bridge.items()]
        if "topk" in self.recipe["cache"]:
            words.append(f"cache.topk={self.topk}")
        if "export" in self.recipe:
            words.append("export.hf_path=null")
        environment = _environment(self.settings)
        with (folder / "log").open("w") as log:
            done = subprocess.run(
                [*words, *overrides], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        return folder, done.returncode


def _environment(settings: Settings) -> dict[str, str]:
    import os

    own = {"MEGATRON_KD_BACKEND": settings.device, "PYTHONWARNINGS": "ignore"}
    return os.environ | {"OMP_NUM_THREADS": "1"} | own


def _write_random_model(directory: Path, config: dict, device: str) -> None:
    """A Hugging Face directory with random bf16 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if list(directory.glob("*.safetensors")):
        return
    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **fields), dtype=torch.bfloat16
        )
    model.save_pretrained(directory)


def _seconds(records: list[dict]) -> float:
    """The median time of a step, the first half left out."""
    steps = [record["seconds"] for record in records if record["kind"] == "train"]
    return statistics.median(steps[len(steps) // 2 :])


def _errors(log: Path) -> list[str]:
    """The lines of a log that say what went wrong, without the launcher's own."""
    lines = log.read_text(errors="replace").splitlines()
    told = [line for line in lines if "Error" in line or line.startswith("megatron-kd")]
    return [line for line in told if "ChildFailedError" not in line][-6:] or lines[-6:]


def _outcome(settings: Settings, runs: list[tuple[str, tuple[Path, int]]]) -> Outcome:
    outcome, rows, tails = Outcome(), [], []
    for name, (folder, status) in runs:
        records = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
        steps = [record for record in records if record["kind"] == "train"]
        losses = [next(iter(record["losses"].values())) for record in steps]
        if status or len(steps) != STEPS or not all(map(math.isfinite, losses)):
            outcome.worsen(FAILED)
            rows.append([name, "failed", "", "", ""])
            tails += ["", f"{name}:", "```", *_errors(folder / "log"), "```"]
            continue
        peak = max(record["peak_bytes"] for record in steps) / 2**30
        time = f"{_seconds(records) * 1e3:.0f}"
        rows.append([name, time, f"{peak:.1f}", f"{losses[0]:.3f}", f"{losses[-1]:.3f}"])
    outcome.lines = [*table(HEADS, rows), *tails]
    return outcome

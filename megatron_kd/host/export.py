"""Write a Megatron checkpoint of a student as a Hugging Face directory, on one process.

Example:
  megatron-kd export --run runs/mine --output student-hf
"""

import json
import re
from pathlib import Path

import yaml

from megatron_kd import sections
from megatron_kd.config import LoraConfig

RESOLVED_CONFIG = "resolved_config.yaml"
CHECKPOINTS = "checkpoints"
BEST_FILE = "best_checkpoint.json"


def add_arguments(parser) -> None:
    parser.add_argument("--run", required=True, metavar="DIR", help="the run's output_dir")
    parser.add_argument("--output", required=True, metavar="DIR", help="Hugging Face directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--iteration", type=int, metavar="N", help="which checkpoint (default: the last)"
    )
    which.add_argument("--best", action="store_true", help="the one selection.keep_best chose")
    parser.add_argument(
        "--student",
        metavar="DIR",
        help="the student's first Hugging Face directory, for its configuration and tokenizer "
        "(default: what the run was started with)",
    )


def run(args) -> int:
    iteration = best_iteration(args.run) if args.best else args.iteration
    checkpoint = find_checkpoint(args.run, iteration)
    student = args.student or student_of(args.run)
    export(checkpoint, student, args.output, lora=lora_of(args.run))
    print(f"exported {checkpoint} to {args.output}")
    return 0


def find_checkpoint(run_directory: str | Path, iteration: int | None = None) -> Path:
    """The directory of one checkpoint of a run: of `iteration`, or the last complete one.

    Raises:
        FileNotFoundError: The run has none, or not this one.
    """
    root = Path(run_directory) / CHECKPOINTS
    # The host writes a checkpoint's run_config.yaml beside its weights.
    found = {
        int(match[1]): path
        for path in root.glob("iter_*")
        if (match := re.fullmatch(r"iter_(\d+)", path.name)) and (path / "run_config.yaml").exists()
    }
    if not found:
        raise FileNotFoundError(f"no checkpoint in {root}; give a run's output_dir")
    if iteration is not None and iteration not in found:
        raise FileNotFoundError(
            f"no checkpoint of iteration {iteration} in {root}; there are {sorted(found)}"
        )
    return found[max(found) if iteration is None else iteration]


def best_iteration(directory: str | Path) -> int:
    """The selected iteration of a run.

    Raises:
        FileNotFoundError: The run selected none.
    """
    path = Path(directory) / BEST_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; train with selection.keep_best=true")
    return json.loads(path.read_text())["iteration"]


def student_of(run_directory: str | Path) -> str:
    """The Hugging Face directory a run started from.

    Raises:
        FileNotFoundError: The run left no resolved configuration.
    """
    recorded = _recorded_student(run_directory)
    if recorded is None:
        raise FileNotFoundError(
            f"no {Path(run_directory) / RESOLVED_CONFIG}; name the student's directory with "
            "--student"
        )
    return recorded["hf_path"]


def lora_of(run_directory: str | Path) -> LoraConfig | None:
    """The adapters a run was trained with; None where it has none, or left no record."""
    lora = (_recorded_student(run_directory) or {}).get("lora")
    return None if lora is None else sections.build(LoraConfig, lora, "student.lora")


def _recorded_student(run_directory: str | Path) -> dict | None:
    path = Path(run_directory) / RESOLVED_CONFIG
    return yaml.safe_load(path.read_text())["student"] if path.is_file() else None


def export(
    checkpoint: str | Path, student: str, output: str | Path, *, lora: LoraConfig | None = None
) -> None:
    """Load one checkpoint, whatever layout saved it, and write it as a Hugging Face directory.

    Args:
        checkpoint: A directory `iter_…` of the host's checkpoints.
        student: Hugging Face directory with the student's configuration and tokenizer.
        output: Written: configuration, weights in safetensors, tokenizer.
        lora: The adapters in the checkpoint; they are merged into the weights.

    Raises:
        ValueError: The checkpoint holds adapters, and lora does not describe them.
    """
    from megatron_kd.host.cpu import backend as cpu_backend

    cpu_backend.activate()
    from megatron_kd.host.parameters import lora as adapters

    if lora is None and adapters.are_in(checkpoint):
        raise ValueError(
            f"{checkpoint} holds LoRA adapters, but the run's {RESOLVED_CONFIG}, which says how "
            "they were set up, is not there: put it back"
        )
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    bridge = AutoBridge.from_hf_pretrained(student)
    with temporary_distributed_context(backend="gloo"), adapters.in_loaded_models(lora):
        model = bridge.load_megatron_model(checkpoint, wrap_with_ddp=False)
        save_hugging_face(bridge, model, student, output)


def save_hugging_face(bridge, model: list, student: str, output: str | Path) -> None:
    """Write a model in memory as a Hugging Face directory; every rank calls it.

    Args:
        bridge: The host's AutoBridge of the student's directory.
        model: Its model chunks.
        student: That directory. Without a tokenizer in it, the output has none either.
        output: Written by rank 0.
    """
    import torch

    from megatron_kd.models.fingerprint import has_tokenizer

    if has_tokenizer(student):
        bridge.save_hf_pretrained(model, output, show_progress=False)
    else:  # the host would stop on rank 0 and leave the others waiting
        if torch.distributed.get_rank() == 0:
            bridge.hf_pretrained.config.save_pretrained(output)
        bridge.save_hf_weights(model, output, show_progress=False)
    torch.distributed.barrier()

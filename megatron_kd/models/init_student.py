"""Make a compact student from a teacher: some of its layers, heads and channels.

Layers are spaced evenly or listed. Heads go by whole key/value groups. With --calibration, prepared
data the teacher reads once, the channels that do most are kept; feed-forward and hidden channels
are cut only so.
"""

import argparse
from pathlib import Path

from megatron_kd.data.sequences import SequenceReader
from megatron_kd.models.fingerprint import model_directory

_CALIBRATION_SEED = 1234


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--teacher", required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to write")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--layers", type=int, help="keep this many layers, evenly spaced, first and last among them"
    )
    depth.add_argument(
        "--layer-list", type=_numbers, metavar="0,3,…", help="keep exactly these layers"
    )
    parser.add_argument("--heads", type=int, help="query heads to keep, whole key/value groups")
    parser.add_argument("--kv-groups", type=int, help="key/value groups to keep")
    parser.add_argument("--ffn-size", type=int, help="feed-forward channels to keep")
    parser.add_argument("--hidden-size", type=int, help="hidden channels to keep")
    parser.add_argument(
        "--calibration", metavar="DATA", help="prepared data, to keep the most important channels"
    )
    parser.add_argument("--calibration-tokens", type=int, default=16384, help="default 16384")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")


def run(args: argparse.Namespace) -> int:
    # PyTorch and transformers are slow to import: not for --help.
    from transformers import AutoConfig

    from megatron_kd.models.channels import (
        TeacherShape,
        checked_layers,
        checked_size,
        evenly_spaced_layers,
        kept_groups,
    )
    from megatron_kd.models.prune import write_student

    teacher = model_directory(args.teacher)
    shape = TeacherShape.of(AutoConfig.from_pretrained(teacher))
    if args.layer_list is not None:
        layers = checked_layers(shape.layers, args.layer_list)
    elif args.layers is not None:
        layers = evenly_spaced_layers(shape.layers, args.layers)
    else:
        layers = tuple(range(shape.layers))
    widths = dict(
        kv_groups=kept_groups(shape, args.heads, args.kv_groups),
        ffn_size=checked_size("--ffn-size", args.ffn_size, shape.ffn_size),
        hidden_size=checked_size("--hidden-size", args.hidden_size, shape.hidden_size),
    )
    selection, width = _select(teacher, shape, layers, widths, args)
    record = write_student(
        teacher,
        args.output,
        selection,
        chosen_by={"depth": "list" if args.layer_list is not None else "even", "width": width},
        overwrite=args.overwrite,
    )
    print(
        f"{args.output}: {len(layers)} of {shape.layers} layers "
        f"({','.join(map(str, layers))}), {widths['kv_groups']} of {shape.kv_groups} key/value "
        f"groups, {widths['ffn_size']} of {shape.ffn_size} feed-forward and "
        f"{widths['hidden_size']} of {shape.hidden_size} hidden channels, "
        f"{record['parameters'] / 1e6:.1f} M parameters, "
        f"{record['parameters'] / record['teacher_parameters']:.0%} of the teacher's"
    )
    return 0


def _select(teacher, shape, layers, widths, args):
    """The selection, and the record of how its channels were chosen."""
    if args.calibration is None:
        if widths["ffn_size"] < shape.ffn_size or widths["hidden_size"] < shape.hidden_size:
            raise ValueError(
                "--ffn-size and --hidden-size need --calibration DATA (a folder that "
                "megatron-kd prepare made): which channels matter has to be measured"
            )
        from megatron_kd.models.channels import select_leading

        return select_leading(shape, layers, **widths), "leading"
    if args.calibration_tokens < 1:
        raise ValueError(f"--calibration-tokens must be at least 1, got {args.calibration_tokens}")
    from megatron_kd.models.importance import documents_of, measure, select_important

    reader = _calibration_data(args.calibration)
    documents = documents_of(reader, seed=_CALIBRATION_SEED)
    importance = measure(teacher, documents, max_tokens=args.calibration_tokens)
    width = {
        "importance": "activations",
        "data": reader.fingerprint,
        "tokens": importance.tokens,
        "seed": _CALIBRATION_SEED,
    }
    return select_important(shape, layers, importance, **widths), width


def _calibration_data(path: str) -> SequenceReader:
    """Prepared data by its own folder or the folder of its splits; never its validation part."""
    train = Path(path) / "train"
    return SequenceReader(train if train.is_dir() else path)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]

"""Make a compact student from a teacher: some of its layers, heads by whole key/value groups."""

import argparse

from megatron_kd.student.prune import write_student
from megatron_kd.student.selection import (
    TeacherShape,
    checked_layers,
    checked_size,
    evenly_spaced_layers,
    kept_groups,
    select_leading,
)
from megatron_kd.teacher.fingerprint import model_directory


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
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")


def run(args: argparse.Namespace) -> int:
    from transformers import AutoConfig

    teacher = model_directory(args.teacher)
    shape = TeacherShape.of(AutoConfig.from_pretrained(teacher))
    if args.layer_list is not None:
        layers = checked_layers(shape.layers, args.layer_list)
    elif args.layers is not None:
        layers = evenly_spaced_layers(shape.layers, args.layers)
    else:
        layers = tuple(range(shape.layers))
    selection = select_leading(
        shape,
        layers,
        kv_groups=kept_groups(shape, args.heads, args.kv_groups),
        ffn_size=checked_size("--ffn-size", None, shape.ffn_size),
        hidden_size=checked_size("--hidden-size", None, shape.hidden_size),
    )
    record = write_student(
        teacher,
        args.output,
        selection,
        chosen_by={"depth": "list" if args.layer_list is not None else "even", "width": "leading"},
        overwrite=args.overwrite,
    )
    print(
        f"{args.output}: {len(layers)} of {shape.layers} layers "
        f"({','.join(map(str, layers))}), {len(selection.kv_groups[0])} of {shape.kv_groups} "
        f"key/value groups, {record['parameters'] / 1e6:.1f} M parameters"
    )
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]

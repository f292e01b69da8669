"""Writes a student's Hugging Face directory: the kept slices of its teacher's parameters."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_kd.files import published_directory
from megatron_kd.models.channels import Selection, TeacherShape, select_weight
from megatron_kd.models.fingerprint import model_fingerprint
from megatron_kd.models.parameter_axes import locate

PROVENANCE = "student.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def write_student(
    teacher: str | os.PathLike,
    output: str | os.PathLike,
    selection: Selection,
    *,
    chosen_by: dict,
    overwrite: bool = False,
) -> dict:
    """Writes the student that `selection` describes.

    Args:
        teacher: A Hugging Face directory with safetensors weights.
        output: The directory to make, in one piece.
        selection: What to keep, valid for this teacher.
        chosen_by: How the selection came about, for the record.
        overwrite: Replace an existing `output`.

    Returns:
        The record that is also written beside the weights as student.json.

    Raises:
        ValueError: The teacher's weights are not safetensors, or not those of a dense decoder.
        FileExistsError: `output` exists and `overwrite` is false.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig

    teacher = Path(teacher)
    if Path(output).resolve() == teacher.resolve():
        raise ValueError("--output is the teacher's own directory; choose another")
    config = AutoConfig.from_pretrained(teacher)
    shape = TeacherShape.of(config)
    fingerprint = model_fingerprint(teacher)
    fingerprint.pop("name")  # a folder's name says where it lay, not what it was
    positions = {layer: position for position, layer in enumerate(selection.layers)}
    with published_directory(output, overwrite=overwrite) as folder:
        weights, teacher_parameters = {}, 0
        for name, weight in _teacher_weights(teacher):
            layer, inner, axes = locate(name)
            if name in selection.norm_gains:
                weight = (weight.double() * selection.norm_gains[name]).to(weight.dtype)
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            teacher_parameters += weight.numel()
            if layer is None:
                weights[name] = select_weight(weight, axes, selection, shape, None)
            elif layer in positions:
                position = positions[layer]
                weights[f"model.layers.{position}.{inner}"] = select_weight(
                    weight, axes, selection, shape, position
                )
        parameters = sum(weight.numel() for weight in weights.values())
        student_config(config, selection).save_pretrained(folder)
        save_torch_state_dict(weights, folder, metadata={"format": "pt"})
        for name in _TOKENIZER_FILES:
            if (teacher / name).is_file():
                (folder / name).write_bytes((teacher / name).read_bytes())
        record = {
            "format": "megatron_kd student",
            "version": 1,
            "teacher": fingerprint,
            "layers": list(selection.layers),
            "kv_groups": _compact(selection.kv_groups, shape.kv_groups),
            "ffn_channels": _compact(selection.ffn, shape.ffn_size),
            "hidden_channels": _compact((selection.hidden,), shape.hidden_size),
            "chosen_by": chosen_by,
            "parameters": parameters,
            "teacher_parameters": teacher_parameters,
        }
        (folder / PROVENANCE).write_text(json.dumps(record, indent=1) + "\n")
    return record


def student_config(config, selection: Selection):
    """The teacher's configuration with the student's dimensions."""
    shape = TeacherShape.of(config)
    config = copy.deepcopy(config)
    groups = len(selection.kv_groups[0])
    config.num_hidden_layers = len(selection.layers)
    config.num_key_value_heads = groups
    config.num_attention_heads = groups * shape.heads_per_group
    config.head_dim = shape.head_dim  # explicit: it no longer is hidden_size / heads
    config.intermediate_size = len(selection.ffn[0])
    config.hidden_size = len(selection.hidden)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[layer] for layer in selection.layers]
    if getattr(config, "max_window_layers", None) is not None:
        first_windowed = config.max_window_layers
        config.max_window_layers = sum(layer < first_windowed for layer in selection.layers)
    return config


def _compact(kept: tuple[tuple[int, ...], ...], available: int):
    """Kept channels for the record: "all" where nothing was cut, one list where all layers kept the
    same, else a list for each layer.
    """
    if all(len(channels) == available for channels in kept):
        return "all"
    if len(set(kept)) == 1:
        return list(kept[0])
    return [list(channels) for channels in kept]


def _teacher_weights(teacher: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter in turn; a tensor is read from the memory map only when it is asked for."""
    for file in weight_files(teacher):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def weight_files(teacher: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory.

    Raises:
        ValueError: There are none, the index is damaged, or a file it names is missing.
    """
    single, index = teacher / "model.safetensors", teacher / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{teacher} has no model.safetensors (or index); save the teacher as safetensors with "
            "save_pretrained"
        )
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not (teacher / name).is_file():
            raise ValueError(f"{index} names {name!r}, which is no file beside it")
    return [teacher / name for name in names]

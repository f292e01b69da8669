"""Prove at start that the resident teacher is the one that was asked for: its weights loaded, its
shape kept, frozen.

A teacher with random weights trains a student to nothing without an error; users of the host have
met it.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "share_embeddings_and_output_weights",
)

FINAL_NORM = ("model.norm.weight", "transformer.ln_f.weight", "backbone.norm_f.weight")
EMBEDDING = ("model.embed_tokens.weight", "transformer.wte.weight", "backbone.embeddings.weight")


class WrongTeacherError(RuntimeError):
    """The teacher in memory is not the one in the directory."""


def weights_are_loaded(model: list, *, hf_path: str) -> list:
    """Pre-wrap hook: compare the first rows of the embedding and the last norm with the directory's
    file.

    Raises:
        WrongTeacherError: A compared tensor differs, or none could be compared.
    """
    compared = 0
    for chunk in model:
        if getattr(chunk, "pre_process", False):
            weight = chunk.embedding.word_embeddings.weight
            start = chunk.embedding.word_embeddings.vocab_start_index
            compared += _compare(hf_path, EMBEDDING, weight[:16], rows=(start, start + 16))
        if getattr(chunk, "post_process", False) and chunk.decoder.final_layernorm is not None:
            compared += _compare(hf_path, FINAL_NORM, chunk.decoder.final_layernorm.weight)
        if not (getattr(chunk, "pre_process", False) or getattr(chunk, "post_process", False)):
            compared += 1  # a middle stage has neither; the first and last speak for it
    if not compared:
        raise WrongTeacherError(
            f"none of {', '.join((*EMBEDDING, *FINAL_NORM))} is in {hf_path}, so the teacher's "
            "weights cannot be checked; add the model family's names to "
            "megatron_kd/host/online/teacher_check.py"
        )
    return model


def is_frozen(teacher: torch.nn.Module) -> None:
    """Raises WrongTeacherError where a parameter of the teacher would be trained."""
    trained = [name for name, parameter in teacher.named_parameters() if parameter.requires_grad]
    if trained:
        raise WrongTeacherError(
            f"{len(trained)} parameters of the teacher are not frozen, {trained[0]} first; "
            "ModelOpt freezes them when it converts the model, so something set requires_grad "
            "afterwards"
        )


def shape_of(provider) -> dict:
    """The fields that make a model's shape."""
    return {name: getattr(provider, name, None) for name in ARCHITECTURE}


def has_shape(model: list, *, provider, expected: dict) -> list:
    """Pre-wrap hook: the host copies attribute writes from student to teacher; none may change the
    teacher.
    """
    now = shape_of(provider)
    changed = {
        name: (expected[name], now[name]) for name in expected if now[name] != expected[name]
    }
    if changed:
        raise WrongTeacherError(f"the student's configuration overwrote the teacher's: {changed}")
    return model


def _compare(hf_path: str, names: tuple, weight: torch.Tensor, rows: tuple | None = None) -> int:
    """1 where the directory holds one of the names and `weight` equals it, 0 where it has none."""
    stored = _read(Path(hf_path), names, rows)
    if stored is None:
        return 0
    loaded = weight.detach()[: len(stored)].to(device="cpu", dtype=torch.float32)
    if not torch.allclose(loaded, stored.float(), rtol=1e-2, atol=1e-4):
        raise WrongTeacherError(
            f"the teacher's weights differ from those in {hf_path}: they were not loaded. Its "
            "provider has lost its loading hook; register no hook on the student after the two "
            "were joined"
        )
    return 1


def _read(directory: Path, names: tuple, rows: tuple | None) -> torch.Tensor | None:
    """The first of the named tensors that the directory holds, or a half-open range of its rows."""
    index = directory / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for name in names:
        path = directory / files.get(name, "model.safetensors")
        if not path.exists():
            continue
        with safe_open(path, framework="pt") as tensors:
            if name in tensors.keys():
                return (
                    tensors.get_slice(name)[rows[0] : rows[1]] if rows else tensors.get_tensor(name)
                )
    return None

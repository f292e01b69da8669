"""What engines that read a local Hugging Face directory share: options, and what they say of it."""

from dataclasses import dataclass

from megatron_kd.models.fingerprint import (
    license_of,
    model_directory,
    model_fingerprint,
    tokenizer_of,
)
from megatron_kd.teacher.engines.base import EngineOptions, TeacherDescription, option


@dataclass(frozen=True, kw_only=True)
class ModelDirectoryOptions(EngineOptions):
    """How a model directory is loaded."""

    dtype: str = option(
        "auto",
        "the weights' dtype; auto: the checkpoint's",
        shapes_rows=True,
        recorded_at_default=True,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    trust_remote_code: bool = option(
        False, "run code that the model directory brings", shapes_rows=True, unasked=False
    )


def describe_directory(
    teacher: str, version: str, *, trust_remote_code: bool
) -> TeacherDescription:
    """The teacher in a model directory, by its files alone.

    Args:
        version: The engine and its libraries, as the manifest names them.
        trust_remote_code: Whether its configuration may run code of its own.

    Raises:
        ValueError: It is no model directory, or holds no weights.
    """
    from transformers import AutoConfig

    path = model_directory(teacher)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    config = config.get_text_config()
    return TeacherDescription(
        version=version,
        fingerprint=model_fingerprint(path),
        output_rows=config.vocab_size,
        hidden_size=config.hidden_size,
        max_tokens=getattr(config, "max_position_embeddings", None),
        tokenizer=tokenizer_of(path),
        license=license_of(path),
    )

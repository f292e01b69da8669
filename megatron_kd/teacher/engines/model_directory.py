"""What engines that read a local Hugging Face directory say of their teacher."""

from megatron_kd.models.fingerprint import (
    license_of,
    model_directory,
    model_fingerprint,
    tokenizer_of,
)
from megatron_kd.teacher.engines.base import TeacherDescription


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

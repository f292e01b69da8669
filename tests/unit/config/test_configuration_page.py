"""docs/configuration.md is what its generator writes, and names every key of a recipe."""

import subprocess
import sys
from pathlib import Path

from megatron_kd.config import DistillConfig
from megatron_kd.sections import keys_of

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "configuration.md"


def test_the_page_is_up_to_date_and_complete(tmp_path):
    command = [sys.executable, REPOSITORY / "scripts" / "configuration_page.py"]
    subprocess.run([*command, tmp_path / "page.md"], check=True)
    text = PAGE.read_text()
    assert (tmp_path / "page.md").read_text() == text, "python scripts/configuration_page.py"
    for key in keys_of(DistillConfig):
        assert f"`{key}`" in text or f"`{key}." in text, key

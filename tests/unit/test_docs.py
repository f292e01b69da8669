"""The pages build without a warning, are searched, and say what the docstrings say."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

REPOSITORY = Path(__file__).parents[2]


def test_the_pages_build(tmp_path):
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "docs.sh"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "searchindex.js").is_file() and (tmp_path / "search.html").is_file()
    for page in (REPOSITORY / "docs").glob("*.md"):  # none is left out of the site
        assert (tmp_path / page.with_suffix(".html").name).is_file()
    losses = (tmp_path / "reference" / "losses.html").read_text()
    assert "fused_chunked_kd_loss" in losses and "logits" in losses


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    shutil.copy(REPOSITORY / "docs" / "conf.py", pages)
    for link, status in (("index.md#here", 0), ("nowhere.md", 1), ("index.md#nowhere", 1)):
        (pages / "index.md").write_text(f"# Here\n\n[link]({link})\n")
        command = ["--builder", "html", "--quiet", "--fail-on-warning", pages, tmp_path / "html"]
        done = subprocess.run([sys.executable, "-m", "sphinx", *command], capture_output=True)
        assert done.returncode == status, (link, done.stderr)

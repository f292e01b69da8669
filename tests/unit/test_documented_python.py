"""The Python of the README and of pages for users of other loops, run page by page as it stands."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = {"README.md": 1, "docs/megatron-lm.md": 4, "docs/modelopt.md": 3}


@pytest.mark.extended  # the README compiles, as a user's process does
@pytest.mark.parametrize("page", PAGES)
def test_a_pages_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    assert len(blocks) == PAGES[page]
    names = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    if page == "docs/megatron-lm.md":  # both of the last block's tensors learned from the cache
        for tensor in (names["hidden"], names["output_weight"]):
            assert tensor.grad.isfinite().all() and tensor.grad.abs().sum() > 0
        assert names["hidden"].grad[-1].abs().sum() == 0  # nothing follows the last token
        layer = type("Layer", (), {})()
        names["hand_hidden_states_through"](layer)
        assert layer.forward("hidden", weight=None) == ("hidden", None)

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "dist")]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """The small world's recipe, built once per test process."""
    import small_world

    recipe = small_world.build(tmp_path_factory.mktemp("world"))
    small_world.add_variants(recipe.parent)
    return recipe


def pytest_collection_modifyitems(items):
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.bridge)

"""Which checkpoint of a run is exported."""

import pytest

from megatron_kd.host.export import CHECKPOINTS, best_iteration, find_checkpoint


@pytest.fixture
def run(tmp_path):
    """A run with two complete checkpoints, one cut short after them, and a folder of its user."""
    for name in ("iter_0000100", "iter_0000099", "iter_0000101", "iter_0000102.old"):
        folder = tmp_path / CHECKPOINTS / name
        folder.mkdir(parents=True)
        if name != "iter_0000101":
            (folder / "run_config.yaml").touch()
    return tmp_path


def test_the_last_complete_checkpoint_is_taken_unless_one_is_named(run):
    assert find_checkpoint(run).name == "iter_0000100"
    assert find_checkpoint(run, 99).name == "iter_0000099"


def test_a_checkpoint_that_is_not_complete_is_none(run):
    with pytest.raises(FileNotFoundError, match=r"iteration 101 .* there are \[99, 100\]"):
        find_checkpoint(run, 101)


def test_a_run_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="give a run's output_dir"):
        find_checkpoint(tmp_path)


def test_the_selected_iteration_is_the_recorded_one(run):
    with pytest.raises(FileNotFoundError, match="train with selection.keep_best=true"):
        best_iteration(run)
    (run / "best_checkpoint.json").write_text('{"iteration": 99}')
    assert best_iteration(run) == 99

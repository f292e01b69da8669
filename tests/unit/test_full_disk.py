"""A full disk is told from other errors, however it is wrapped."""

import errno

import pytest

from megatron_kd import cli
from megatron_kd.full_disk import full_disk


def wrapped() -> Exception:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "weights")
        except OSError as error:
            raise RuntimeError("the writer failed") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (wrapped(), "weights"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (
            RuntimeError("rank 0:\n  I/O error: No space left on device (os error 28)\n  at x"),
            "I/O",
        ),
        (OSError(errno.EACCES, "Permission denied"), None),
        (ValueError("a bad value"), None),
    ],
)
def test_a_full_disk_is_recognised(error, said):
    found = full_disk(error)
    assert found is None if said is None else said in found and "\n" not in found


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (wrapped(), 1, "No space left on device: 'weights'. Make room"),
        (KeyboardInterrupt(), 130, "megatron-kd verify: stopped"),
    ],
)
def test_a_command_says_so_in_one_line(monkeypatch, capsys, error, status, said):
    def fail(args, recapture):
        raise error

    monkeypatch.setattr("megatron_kd.cache.verify.run", fail)
    assert cli.main(["verify", "cache"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(args, recapture):
        raise RuntimeError("a bug")

    monkeypatch.setattr("megatron_kd.cache.verify.run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["verify", "cache"])


def test_a_misspelt_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit):
        cli.main(["captur"])
    assert "did you mean capture?" in capsys.readouterr().err

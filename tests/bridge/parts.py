"""Run every `check_…` function of a test module in one process that has the host imported."""

import importlib
import traceback
from pathlib import Path

import pytest
from gloo import run_ranks


def names_of(scope: dict) -> list[str]:
    """The checks that a module defines, by its `globals()`."""
    return [name for name in scope if name.startswith("check_")]


def results_of(module: str, folder: Path) -> dict[str, str | None]:
    """Name of a check of the module → the traceback of its failure, or None."""
    return run_ranks(1, run_checks, module, folder, host=True)[0]


def run_checks(rank: int, module: str, folder: Path) -> dict[str, str | None]:
    """What `results_of` returns, in the process that has the host; each check gets a folder."""
    scope = vars(importlib.import_module(module))
    found = {}
    for name in names_of(scope):
        own = folder / name
        own.mkdir()
        try:
            scope[name](own)
            found[name] = None
        except (Exception, pytest.fail.Exception):
            found[name] = traceback.format_exc()
    return found

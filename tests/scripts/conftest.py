"""Runs the programs inside the process of a test."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.training.helpers.in_process import hydra_as_before
from training.runs import compose_errors


def called(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *arguments: str | Path) -> int | str | None:
    """Runs a program in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
    with hydra_as_before():
        try:
            compose_errors.run(script.main)
        except SystemExit as end:
            return end.code
    return 0

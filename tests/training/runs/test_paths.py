"""Paths with a home directory, which the shell leaves alone in KEY=~/file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.errors import InstantiationException

from tests.training.helpers.in_process import TINY_RUN, run_here
from training.errors import UserError
from training.runs.failures import explain
from training.runs.paths import home_expanded

HOMELESS = {
    "resume": ["resume='~nosuchuser/x'"],
    "dataset.files": ["dataset=text", "dataset.files='~nosuchuser/*.txt'"],
    "dataset.tokenizer": ["dataset=stdlib", "dataset.tokenizer='~nosuchuser/tokenizer.json'"],
    "model.weights": ["model.weights='~nosuchuser/x'"],
}


@pytest.mark.parametrize("key", HOMELESS)
def test_a_home_that_is_not_there_is_one_line(tmp_path: Path, key: str):
    with pytest.raises((UserError, InstantiationException)) as refusal:
        run_here(tmp_path / "new", *TINY_RUN, *HOMELESS[key])
    reason = explain(refusal.value).reason
    assert re.fullmatch(rf"{key}=~nosuchuser\S*: there is no home directory of that name: give .*", reason)
    assert explain(refusal.value).fixable


def test_a_home_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert home_expanded("resume", "~/runs/a") == Path("/somewhere/runs/a")
    assert home_expanded("resume", "runs/~a") == Path("runs/~a")

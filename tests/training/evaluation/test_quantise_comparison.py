"""The loss of the first batch, with quantised weights and without."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from tests.training.helpers.in_process import TINY_RUN, run_here
from training.evaluation import quantise_comparison

RUN = (*TINY_RUN, "steps=1", "log_every=1", "offload=layer_stream", "optimizer=host_adamw")
LINE = r"loss of the first batch: ([\d.]+) with quantize=int4, ([\d.]+) without \(([-+][\d.]+)\)"


def first_loss(folder: Path) -> float:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["train/loss"]


@pytest.mark.slow
def test_both_losses_are_logged_once_and_the_run_is_as_without(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        run_here(tmp_path / "plain", *RUN)
        run_here(tmp_path / "quantised", *RUN, "quantize=int4")
        assert not re.findall(LINE, caplog.text)
        run_here(tmp_path / "compared", *RUN, "quantize=int4", "quantize.compare=true")
    ((quantised, base, difference),) = re.findall(LINE, caplog.text)
    assert float(quantised) == pytest.approx(first_loss(tmp_path / "quantised"), abs=1e-5)
    assert float(base) == pytest.approx(first_loss(tmp_path / "plain"), abs=1e-5)
    assert float(difference) == pytest.approx(float(quantised) - float(base), abs=2e-6)
    assert first_loss(tmp_path / "compared") == first_loss(tmp_path / "quantised")


def test_without_room_a_run_does_not_compare(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_):
        raise MemoryError("7 GiB of host memory are needed")

    monkeypatch.setattr(quantise_comparison, "fill_parameters", fail)
    run_here(tmp_path, *RUN, "quantize=int4", "quantize.compare=true")
    assert "no room for the weights that are not quantised (7 GiB of host memory are needed)" in caplog.text
    assert first_loss(tmp_path)

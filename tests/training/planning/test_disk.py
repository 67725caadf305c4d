"""The disk in a plan: measured, not known, or not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.planning import Forecast
from training.planning import disk
from training.planning.disk import disk_gb_s, with_reads

STEP = Forecast(step_ms=100.0, alone_ms={"compute": 90.0}, bound="compute", phases_ms=(50.0, 50.0))


def test_a_large_file_is_measured_and_a_small_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "PIECE_BYTES", 64 * 2**10)
    (tmp_path / "large").write_bytes(bytes(2**20))
    (tmp_path / "small").write_bytes(bytes(1000))
    assert disk_gb_s(tmp_path / "large") is None or disk_gb_s(tmp_path / "large") > 0
    assert disk_gb_s(tmp_path / "small") is None
    assert disk_gb_s(tmp_path / "none") is None


def test_a_step_takes_as_long_as_its_reads():
    forecast, line = with_reads(STEP, 2e9, 10**9, 0, 10.0)
    assert (forecast.step_ms, forecast.bound, forecast.alone_ms["files"]) == (200.0, "files", 200.0)
    assert "at 10.00 GB/s" in line
    forecast, _ = with_reads(STEP, 5e8, 10**9, 0, 10.0)
    assert (forecast.step_ms, forecast.bound, forecast.alone_ms["files"]) == (100.0, "compute", 50.0)


def test_what_is_not_known_is_said_and_what_is_cached_is_not_read():
    forecast, line = with_reads(STEP, 2e9, 10**9, 0, None)
    assert forecast is STEP
    assert "hardware.disk_gb_s=GB/s" in line
    forecast, line = with_reads(STEP, 2e9, 10**9, 2e9, 10.0)
    assert forecast is STEP
    assert "first step" in line

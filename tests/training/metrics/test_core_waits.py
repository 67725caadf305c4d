"""A run on a busy machine says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.metrics import core_waits
from training.metrics.core_waits import CoreWaits, waited_s


@pytest.mark.parametrize(
    ("waits", "passed_s", "told"),
    [("0 9000000000 5", 30, True), ("0 3000000000 5", 30, False), ("0 9000000000 5", 9, False), ("gone", 30, False)],
)
def test_waiting_for_cores_is_told_in_a_line(
    waits: str, passed_s: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    statistics = tmp_path / "schedstat"
    statistics.write_text("0 0 1" if told or waits != "gone" else waits)
    times = iter([100.0, 100.0 + passed_s])
    monkeypatch.setattr(core_waits, "STATISTICS", statistics)
    monkeypatch.setattr(core_waits, "monotonic", lambda: next(times))
    waiting = CoreWaits()
    statistics.write_text(waits)
    waiting.warn()
    lines = [record.message for record in caplog.records]
    assert [line.partition(" of its time")[0] for line in lines] == (
        ["the machine was busy: the run waited for a core in 30%"] if told else []
    )


def test_linux_tells_the_time_in_its_queue(monkeypatch: pytest.MonkeyPatch):
    if core_waits.STATISTICS.exists():
        assert waited_s() >= 0
    monkeypatch.setattr(core_waits, "STATISTICS", Path("/nowhere"))
    assert waited_s() is None

"""The program that measures this machine, with the measurement itself replaced."""

import runpy
from pathlib import Path

import pytest

from tests import ROOT

SCRIPT = str(ROOT / "scripts" / "probe.py")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("training.planning.machine.probe", lambda device: {"name": f"my {device}", "h2d_gb_s": 12.5})
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["scripts/probe.py", *arguments])
    return runpy.run_path(SCRIPT)["main"]()


def test_measurements_are_printed_and_stored(cache: Path, monkeypatch, capsys):
    assert run(monkeypatch, "--device=cpu") == 0
    (stored,) = (path for path in cache.rglob("*") if path.is_file())
    assert "12.5" in stored.read_text()
    name, speed, place = capsys.readouterr().out.splitlines()
    assert name.split() == ["name", "my", "cpu"]
    assert speed.split() == ["h2d_gb_s", "12.5"]
    assert place.endswith(f" {stored}")


def test_a_dry_run_stores_nothing(cache: Path, monkeypatch, capsys):
    assert run(monkeypatch, "--device=cpu", "--dry-run") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert list(cache.iterdir()) == []


def test_an_unusable_device_is_one_line(cache: Path, monkeypatch, capsys):
    assert run(monkeypatch, "--device=cuda:99") == 1
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("error: device=cuda:99")
    assert error.count("\n") == 1
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line(cache: Path, monkeypatch, capsys):
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    assert run(monkeypatch, "--device=cpu") == 1
    output, error = capsys.readouterr()
    assert "12.5" in output
    assert error.startswith(f"error: {cache / 'file'}")
    assert error.endswith(
        "cannot be written (Not a directory): set XDG_CACHE_HOME to a directory that can be written\n"
    )
    assert error.count("\n") == 1

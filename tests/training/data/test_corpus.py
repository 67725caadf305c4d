"""The standard library as a corpus."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from training.data.corpus import read_stdlib, stdlib_files
from training.errors import UserError


def test_the_standard_library_is_listed_without_its_tests() -> None:
    names = [path.as_posix() for path in stdlib_files()]
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)


def test_source_files_that_are_not_utf8_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.py").write_bytes(b"# caf\xe9 is not UTF-8\n")
    (tmp_path / "c.py").write_text("second\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("first é\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("a test\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert list(read_stdlib()) == [("first é\n", True), ("second\n", True)]


def test_stdlib_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=r"^dataset=stdlib: no sources under"):
        list(read_stdlib())


def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A link to a file that is gone.
    (tmp_path / "a.py").symlink_to(tmp_path / "gone")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=r"^dataset=stdlib: .*a\.py cannot be read \(No such file"):
        list(read_stdlib())


def test_reading_imports_no_library() -> None:
    program = "import sys; from training.data.corpus import read_stdlib; next(read_stdlib()); print(*sys.modules)"
    command = [sys.executable, "-c", program]
    imported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert not {"datasets", "pandas", "pyarrow"} & set(imported)

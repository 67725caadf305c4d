"""The standard library as a corpus."""

from pathlib import Path

import pytest

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


def test_reading_leaves_nothing_in_the_cache_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "datasets"
    documents = read_stdlib(folder)
    assert next(documents)[1]
    assert folder.is_dir()
    documents.close()
    assert not folder.exists()

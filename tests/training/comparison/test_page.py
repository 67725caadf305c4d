"""The page: complete by itself, and without anything that would be fetched or run."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from training.comparison.report import compare, write_whole


class Page(HTMLParser):
    """Tags with their attributes, text, and that what is opened is closed."""

    VOID = ("meta", "img")

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(folder: Path) -> Page:
    return Page((folder / "compare.html").read_text())


def write_runs(write_run):
    write_run("none", memory__vram_peak_gib=30.0, transfer__stall_ms=0.0)
    write_run("layer_stream", memory__vram_peak_gib=20.0, transfer__stall_ms=10.0, knobs={"include": ["<script>x"]})
    write_run("tensor_swap", status="failed", reason='<img src="https://example.org/x.png">', losses=None)
    compare([write_run.folder], write_run.folder)


def test_the_page_refers_to_nothing_outside(write_run):
    write_runs(write_run)
    page = read(write_run.folder)
    assert page.open == []
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    references = [v for _, attributes in page.tags for k, v in attributes.items() if k in ("src", "href", "srcset")]
    assert references
    assert all(reference.startswith("data:image/png;base64,") for reference in references)
    assert not any(key.startswith("on") or key == "style" for _, attributes in page.tags for key in attributes)
    style = re.search(r"<style>(.*?)</style>", (write_run.folder / "compare.html").read_text(), re.DOTALL)[1]
    assert not re.search(r"@import|url\(|//", style)
    assert "prefers-color-scheme: dark" in style


def test_the_page_has_the_table_the_reasons_and_the_figures(write_run):
    write_runs(write_run)
    page = read(write_run.folder)
    text = " ".join(page.text)
    assert 'tensor_swap: failed: <img src="https://example.org/x.png">' in text
    for row in ("none", "layer_stream", "tensor_swap"):
        assert row in page.text
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 3
    for file, image in zip(("memory", "time", "loss"), images, strict=True):
        assert image["alt"]
        embedded = base64.b64decode(image["src"].partition(",")[2])
        assert embedded == (write_run.folder / f"compare_{file}.png").read_bytes()


def test_files_are_written_whole_or_not_at_all(tmp_path: Path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new"
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"new")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_a_figure_of_an_earlier_comparison_does_not_stay(write_run):
    (write_run.folder).mkdir()
    (write_run.folder / "compare_memory.png").write_text("old")
    write_run(losses=None, step_ms=None)
    compare([write_run.folder], write_run.folder)
    assert {path.name for path in write_run.folder.iterdir()} == {"0", "compare.csv", "compare.md", "compare.html"}

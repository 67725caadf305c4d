"""The page: complete by itself, without anything to fetch or run."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import yaml

from training.comparison.report import compare


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text; asserts that tags are closed in order."""

    VOID = ("meta", "img", "source", "br")

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


def test_the_page_says_where_and_how_the_runs_ran(write_run):
    facts = {"torch": "2.11.0", "commit": "0123456789", "date": "2026-11-22T10:00:00+00:00"}
    write_run("none", hardware={"device": "cuda:0", "gpu_name": "H200", **facts})
    planned_for = {"hardware": {"name": "rtx4090"}, **facts}
    folder = write_run("layer_stream", status="planned", losses=None, plan=planned_for)
    recorded = {"choices": {"offload": "layer_stream"}, "overrides": ["offload=layer_stream", "dataset.name=a b"]}
    (folder / "choices.yaml").write_text(yaml.safe_dump(recorded))
    compare([write_run.folder], write_run.folder)
    text = read(write_run.folder).text
    assert "H200, rtx4090 · torch 2.11.0 · commit 0123456789 · 2026-11-22" in text
    assert "python train.py offload=layer_stream 'dataset.name=a b'" in text


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

"""The figures that are drawn, and the page: complete by itself, without anything to fetch or run."""

from __future__ import annotations

import base64
import html
import itertools
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from matplotlib.text import Text

from tests.training.comparison.conftest import PICTURE, write_sample
from training.comparison.canvas import style
from training.comparison.loss_figure import loss_figure
from training.comparison.memory_figure import memory_figure
from training.comparison.page import render_figures
from training.comparison.report import compare
from training.comparison.time_figure import time_figure
from training.runs.files import FIGURE_FILES


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


def files(figures) -> list[str]:
    assert all(figure.png.startswith(b"\x89PNG") for figure in figures)
    return [figure.file for figure in figures]


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.slow
def test_every_figure_is_drawn(write_run, count: int):
    for i in range(count):
        write_run("layer_stream", knobs={"slots": i}, step_ms=10.0 * 2**i, memory__vram_peak_gib=20.0 - i,
                  transfer__stall_ms=3.0, eval__accuracy=0.5, losses=(4.0, 3.0 + i))  # fmt: skip
    assert files(render_figures(write_run.rows())) == list(FIGURE_FILES)


@pytest.mark.parametrize("draw", [memory_figure, loss_figure, time_figure])
def test_a_phone_shows_the_titles_of_figures_whole(write_run, draw):
    for seed in (0, 1):
        write_run(seed=seed, step_ms=12345.0 + seed, memory__rss_gib=20.0, transfer__stall_ms=3.0)
    with style():
        figure = draw(write_run.rows())
        figure.draw_without_rendering()
    titles = [text for text in figure.findobj(Text) if text.get_text() and text.get_fontweight() == "bold"]
    assert titles
    for title in titles:
        # Of 390 pixels 32 are the page's margins; a figure is 640 pixels wide there, and scrolls.
        assert title.get_window_extent().x1 <= figure.bbox.width * (390 - 32) / 640


def test_without_a_gpu_the_memory_is_that_of_the_process(write_run):
    write_run(memory__vram_peak_gib=0.0, memory__rss_gib=0.5, losses=(math.nan, math.inf), step_ms=5.0)
    assert files(render_figures(write_run.rows())) == ["compare_memory.png", "compare_loss.png"]


@pytest.mark.slow
def test_a_run_on_the_cpu_is_no_point_among_those_on_a_gpu(write_run):
    write_run(memory__vram_peak_gib=0.0, memory__rss_gib=0.5, hardware={"device": "cpu"})
    write_run(memory__vram_peak_gib=3.0, memory__rss_gib=0.5, hardware={"device": "cuda:0", "gpu_name": "H200"})
    rows = write_run.rows()
    of_cpu, of_gpu, of_both = (render_figures(some)[0].png for some in (rows[:1], rows[1:], rows))
    assert of_both == of_gpu
    assert of_both != of_cpu


def test_a_sweep_of_failures_shows_the_losses_that_were_logged(write_run):
    write_run(status="failed", reason="lr")
    assert files(render_figures(write_run.rows())) == ["compare_loss.png"]


def test_a_sweep_without_any_metrics_has_no_figures(write_run):
    write_run(status="failed", reason="lr", losses=None)
    assert render_figures(write_run.rows()) == []


@pytest.mark.parametrize("fits", [True, False])
def test_plans_are_drawn_whether_they_fit_or_not(write_run, fits: bool):
    plan = {"fits": {"host_budget": fits}}
    write_run(status="planned", losses=None, plan=plan, memory__rss_gib=3.0)
    (figure,) = render_figures(write_run.rows())
    assert files([figure]) == ["compare_memory.png"]
    assert ("Plans that do not fit are not on the line." in figure.caption) == (not fits)


@pytest.mark.slow
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


def widths(folder: Path) -> tuple[int, int]:
    """Returns how wide a comparison's page is, in frames as wide as a desktop's window and a phone's."""
    widest = "Math.max(...[...f.document.querySelectorAll('html, .wide')].map(e => e.scrollWidth))"
    script = f"document.title = Array.from(frames).map(f => {widest}).join(' ')"
    style = "height: 900px; border: 0; width:"
    page = html.escape((folder / "compare.html").read_text())
    # Inside the outer page and not beside it: of another file a script may read nothing.
    frames = "".join(f'<iframe srcdoc="{page}" style="{style} {width}px"></iframe>' for width in (1440, 390))
    outer = folder / "frames.html"
    outer.write_text(f'<title></title><body onload="{script}">{frames}</body>')
    # Its profile and its caches stay in the folder of the test.
    home = {name: str(folder / "home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", outer.as_uri()]
    result = subprocess.run(command, env=os.environ | home, capture_output=True, text=True, timeout=300, check=True)
    wide, narrow = map(int, re.search(r"<title>(\d+) (\d+)</title>", result.stdout).groups())
    return wide, narrow


# A value in every column of the table.
EVERY_COLUMN = {
    **dict.fromkeys(("memory__vram_peak_gib", "memory__host_pinned_gib", "memory__rss_gib"), 123.45),
    **dict.fromkeys(("transfer__h2d_gib", "transfer__d2h_gib", "transfer__stall_ms"), 123.4),
    "perf__tokens_per_s": 12345.0,
    "optimizer__wait_ms": 1234.5,
    "eval__final_loss": 12.3456,
    "perf__floor_ms": 12.0,
    "perf__mfu": 0.4,
}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_nothing_is_wider_than_the_window(write_run):
    """In frames as wide as a desktop's window and a phone's: the table with every column, and long paths."""
    for seed in (0, 1):
        for offload in ("none", "layer_stream"):
            write_run(offload, seed=seed, step_ms=1234.5 + seed, **EVERY_COLUMN)
    write_run("tensor_swap", status="failed", reason="x" * 300, losses=None)
    write_sample(write_run("none", knobs={"slots": 1}), 10, text="x" * 1000)
    write_sample(write_run("none", knobs={"slots": 2}), 10, picture=PICTURE, caption="y" * 100)
    compare([write_run.folder], write_run.folder)
    wide, narrow = widths(write_run.folder)
    assert wide <= 1440
    assert narrow <= 390


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_long_names_of_unlike_runs_are_wrapped(write_run):
    for seed, (offload, optimizer) in enumerate(itertools.product(("none", "layer_stream"), ("adamw", "host_adamw"))):
        top = {"batch_size": seed, "model": {"source": f"organisation/A-Rather-Long-Name-Of-A-Model-{seed}B-Instruct"}}
        top |= {"note": "a_long_word" * (seed + 3)}
        write_run(offload, seed=seed, optimizer=optimizer, top=top, step_ms=1234.5, **EVERY_COLUMN)
    compare([write_run.folder], write_run.folder)
    wide, narrow = widths(write_run.folder)
    assert wide <= 1440
    assert narrow <= 390


@pytest.mark.slow
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


def test_the_last_samples_stand_side_by_side(write_run):
    for slots, text in enumerate(("<b>a\nc", "<b>a\nc", "d")):
        write_sample(write_run("layer_stream", knobs={"slots": slots}), 10, text=text)
    write_sample(write_run("none"), 20, picture=PICTURE, caption="4 images")
    compare([write_run.folder], write_run.folder)
    page = read(write_run.folder)
    assert page.open == []
    assert page.text.count("<b>a\nc") == 2
    assert "d" in page.text
    assert [text.strip() for text in page.text if "after step" in text] == [
        "after step 20, 4 images",
        "after step 10",
        "after step 10, the same as layer_stream slots=0",
        "after step 10",
    ]
    pictures = [attributes for tag, attributes in page.tags if tag == "img" and "4 images" in attributes["alt"]]
    assert [picture["alt"] for picture in pictures] == ["none: 4 images"]
    assert base64.b64decode(pictures[0]["src"].partition(",")[2]) == PICTURE

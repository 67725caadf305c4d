"""Samples on the page: the last of each row, equal ones once, and nothing of what is damaged."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from training.comparison.report import compare
from training.comparison.samples import LastSample, last_samples


def write_samples(directory: Path, *records: dict) -> None:
    lines = [json.dumps({"train/step": step, **record}) + "\n" for step, record in enumerate(records, 1)]
    (directory / "samples.jsonl").write_text("".join(lines))


def test_the_last_samples_are_shown_and_equal_ones_once(write_run):
    write_samples(write_run("none"), {"prompt": "a", "text": "a b"}, {"prompt": "a", "text": "a <b>\nc"})
    write_samples(write_run("layer_stream"), {"prompt": "a", "text": "a d"}, {"prompt": "a", "text": "a <b>\nc"})
    write_samples(write_run("tensor_swap"), {"prompt": "a", "text": "a e"})
    write_run("shard_offload")
    assert last_samples(write_run.rows()) == {
        LastSample(2, "a <b>\nc", None): ["none", "layer_stream"],
        LastSample(1, "a e", None): ["tensor_swap"],
    }
    compare([write_run.folder], write_run.folder)
    page = (write_run.folder / "compare.html").read_text()
    assert page.count("a &lt;b&gt;\nc") == 1
    assert "none, layer_stream: equal samples after step 2" in page


def test_pictures_are_shown_and_only_those_of_the_run(write_run, tmp_path: Path):
    directory = write_run("none")
    (directory / "samples").mkdir()
    Image.new("RGB", (4, 2)).save(directory / "samples" / "step-000001.png")
    write_samples(directory, {"caption": "letters", "picture": "samples/step-000001.png"})
    picture = (directory / "samples" / "step-000001.png").read_bytes()
    assert last_samples(write_run.rows()) == {LastSample(1, "letters", picture): ["none"]}
    (tmp_path / "secret.png").write_bytes(picture)
    write_samples(directory, {"caption": "letters", "picture": str(tmp_path / "secret.png")})
    assert last_samples(write_run.rows()) == {}


def test_damaged_samples_are_left_out(write_run):
    for content in ("", "{", '{"train/step": "x", "text": 3}\n', '{"train/step": 3}\n'):
        (write_run("none", seed=write_run.count) / "samples.jsonl").write_text(content)
        assert last_samples(write_run.rows()) == {}

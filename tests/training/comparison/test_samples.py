"""The last sample of each row, from files that anybody may have written."""

from __future__ import annotations

import pytest

from tests.training.comparison.conftest import PICTURE, write_sample
from training.comparison.samples import LONGEST_TEXT, LastSample, last_samples


def test_each_row_has_its_last_sample(write_run):
    for offload in ("none", "layer_stream"):
        run = write_run(offload)
        for step in (0, 10):
            write_sample(run, step, text=f"after {step}", prompt="a")
    write_run("shard_offload")
    write_sample(write_run("tensor_swap"), 5, picture=PICTURE, caption="1 image")
    assert last_samples(write_run.rows()) == [
        LastSample("none", 10, None, "after 10"),
        LastSample("layer_stream", 10, None, "after 10", equal_to="none"),
        LastSample("tensor_swap", 5, PICTURE, "1 image"),
    ]


def test_of_several_seeds_one_is_shown_and_the_picture_decides_what_is_equal(write_run):
    for seed in (0, 1):
        write_sample(write_run("none", seed=seed), 5, picture=PICTURE, caption=f"seed {seed}")
    write_sample(write_run("layer_stream"), 5, picture=PICTURE + b"\0", caption="seed 0")
    assert [(sample.row, sample.text, sample.equal_to) for sample in last_samples(write_run.rows())] == [
        ("none", "seed 0", None),
        ("layer_stream", "seed 0", None),
    ]


@pytest.mark.parametrize(
    "sample",
    [
        {"step": 5},
        {"step": -1, "text": "a"},
        {"step": "../../x", "text": "a"},
        {"step": 5, "text": ["a"]},
        {"step": 5, "picture": b"GIF89a"},
        {"step": 5, "picture": PICTURE + bytes(2**23)},
    ],
)
def test_what_is_no_sample_is_left_out(write_run, sample: dict):
    run = write_run("none")
    if isinstance(sample["step"], int):
        write_sample(run, **sample)
    else:
        (run / "samples.jsonl").write_text('{"train/step": "../../x", "text": "a"}\n')
    assert last_samples(write_run.rows()) == []


def test_files_that_are_damaged_are_left_out_and_a_long_text_is_cut(write_run):
    (write_run("none") / "samples.jsonl").write_text("{\n")
    run = write_run("layer_stream")
    (run / "samples.jsonl").write_text('{"train/step": 5, "picture": "a"}\n')
    (run / "samples").mkdir()
    (run / "samples" / "step-000005.png").symlink_to("/dev/zero")
    write_sample(write_run("tensor_swap"), 1, text="x" * 10_000)
    (sample,) = last_samples(write_run.rows())
    assert (sample.row, len(sample.text)) == ("tensor_swap", LONGEST_TEXT)

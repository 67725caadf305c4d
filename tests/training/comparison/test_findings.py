"""The titles of figures: what the runs show, in a sentence."""

from __future__ import annotations

import pytest

from training.comparison.findings import loss_finding, memory_finding, time_finding, waits

VRAM = "memory/vram_peak_gib"


def test_memory_is_that_of_the_row_with_the_least_beside_its_reference(write_run):
    write_run("none", step_ms=100.0, memory__vram_peak_gib=30.0)
    assert memory_finding(write_run.rows(), VRAM) == "none takes the least memory and the least time"
    assert memory_finding(2 * write_run.rows(), VRAM) == "Step time against memory"
    write_run("layer_stream", step_ms=102.0, memory__vram_peak_gib=6.0)
    none, stream = write_run.rows()
    assert memory_finding([stream, none], VRAM) == "layer_stream: 0.20 of the memory and 1.02 of the step time of none"


def test_the_parts_of_a_step_add_up(write_run):
    write_run(step_ms=100.0, transfer__stall_ms=30.0, optimizer__wait_ms=20.0)
    write_run("layer_stream", step_ms=100.0, transfer__stall_ms=90.0, optimizer__wait_ms=20.0)
    assert [waits(row) for row in write_run.rows()] == [(50.0, 30.0, 20.0), (0.0, 90.0, 10.0)]


def test_the_longest_wait_is_named_with_its_cause(write_run):
    write_run("none", step_ms=100.0)
    assert time_finding(write_run.rows()) == "No run waits for copies or for the optimizer"
    write_run("tensor_swap", step_ms=200.0, transfer__stall_ms=50.0)
    assert time_finding(write_run.rows()) == "tensor_swap waits longest: 25% of its step for copies"
    write_run("layer_stream", step_ms=200.0, transfer__stall_ms=40.0, optimizer__wait_ms=40.0)
    found = time_finding(write_run.rows())
    assert found == "layer_stream waits longest: 20% of its step for copies and 20% of its step for the optimizer"


@pytest.mark.parametrize(
    ("last", "finding"),
    [
        ((), "Training loss"),
        ((2.5, 2.5), "All losses are equal in every bit to those of the resident run"),
        ((2.5, 2.0), "1 of 2 runs have the losses of the resident run in every bit; others differ by up to 2.0e-01"),
        ((2.0,), "Losses differ by up to 2.0e-01"),
    ],
)
def test_losses_are_compared_with_the_resident_run(write_run, last: tuple[float, ...], finding: str):
    write_run("none", losses=(4.0, 2.5))
    for slots, loss in enumerate(last):
        write_run("layer_stream", knobs={"slots": slots}, losses=(4.0, loss))
    assert loss_finding(write_run.rows()) == finding

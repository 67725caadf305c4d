"""The planned time of a step: what is added to that of the dry run."""

from dataclasses import replace

import pytest
import torch

from offload.planning import Bandwidth, Forecast, Phase, UpdateTimes, forecast
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.machine import machine_of
from training.planning.times import PlannedTimes, with_reads

PHASES = (
    Phase(flops=6e12, h2d_bytes=1e9, d2h_bytes=0, activation_h2d_bytes=0, activation_d2h_bytes=0),
    Phase(flops=12e12, h2d_bytes=2e9, d2h_bytes=1e9, activation_h2d_bytes=0, activation_d2h_bytes=0),
)
# GB/s each way, alone and together.
BUS = Bandwidth(10, 10, 10)


def times_of(phases: tuple[Phase, ...]) -> PlannedTimes:
    expected = forecast(phases, BUS, 1e12, UpdateTimes())
    return PlannedTimes(phases, UpdateTimes(), expected, ())


def test_the_floor_is_the_larger_way_of_the_bus_or_the_peak_of_a_gpu_that_is_known():
    h200 = replace(machine_of(components_of(*SMALL_MODEL)), h2d_gb_s=10, d2h_gb_s=10, both_gb_s=10)
    assert times_of(PHASES).floor_ms(h200, torch.bfloat16) == pytest.approx(300)
    # A second at the peak of the datasheet.
    long = times_of((replace(PHASES[0], flops=989.4e12 - 12e12), PHASES[1]))
    assert long.floor_ms(h200, torch.bfloat16) == pytest.approx(1000)
    assert long.floor_ms(replace(h200, name="unknown"), torch.bfloat16) == pytest.approx(300)


def test_a_step_of_more_microbatches_than_the_dry_run_has_is_longer_by_as_much(planned):
    job = ("offload=layer_stream", "optimizer=adamw", "batch_size=12", "seq_len=16", "model.num_hidden_layers=2")
    # The dry run has the first two; of four, the others are as long as the second.
    two, four = (planned(*job, f"microbatches={count}").forecast for count in (2, 4))
    without_update = [each.step_ms - each.alone_ms["host optimizer"] for each in (two, four)]
    assert 1.5 < without_update[1] / without_update[0] < 2.5


STEP = Forecast(step_ms=100.0, alone_ms={"compute": 90.0}, bound="compute", phases_ms=(50.0, 50.0))


def test_a_step_takes_as_long_as_its_reads():
    forecast, line = with_reads(STEP, 2e9, 10**9, 0, 10.0)
    assert (forecast.step_ms, forecast.bound, forecast.alone_ms["files"]) == (200.0, "files", 200.0)
    assert "at 10.00 GB/s" in line
    forecast, _ = with_reads(STEP, 5e8, 10**9, 0, 10.0)
    assert (forecast.step_ms, forecast.bound, forecast.alone_ms["files"]) == (100.0, "compute", 50.0)


def test_what_is_not_known_is_said_and_what_is_cached_is_not_read():
    forecast, line = with_reads(STEP, 2e9, 10**9, 0, None)
    assert forecast is STEP
    assert "only hardware=auto measures it" in line
    forecast, line = with_reads(STEP, 2e9, 10**9, 2e9, 10.0)
    assert forecast is STEP
    assert "first step" in line

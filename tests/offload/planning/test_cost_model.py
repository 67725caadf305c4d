"""The predicted time of a step, from bytes, FLOPs and speeds, against values by hand."""

import math
from dataclasses import replace

import pytest

from offload.planning.cost_model import Forecast, UpdateTimes, bounded_by_files, floor_ms, forecast, hidden_share
from offload.planning.dry_run import Phase
from offload.planning.simulated_streams import Bandwidth

BUS = Bandwidth(h2d=50.0, d2h=40.0, both=30.0)
GB = 1e9


def phase(ms: float, into: float = 0.0, out: float = 0.0, acts=(0.0, 0.0), waits: float = 0.0) -> Phase:
    """Makes a phase that computes for `ms` at 1 TFLOP/s; copies are in GB."""
    return Phase(ms * 1e9, into * GB, out * GB, acts[0] * GB, acts[1] * GB, waits * GB)


def times(*phases: Phase, **update) -> tuple[float, str]:
    found = forecast(phases, BUS, 1e12, UpdateTimes(**update))
    return pytest.approx(found.step_ms), found.bound


def test_the_floor_is_the_slowest_part():
    assert floor_ms(BUS, 10 * GB, 2 * GB, flops=1e11, peak_flops_per_s=1e12) == pytest.approx(200)
    assert floor_ms(BUS, 10 * GB, 9 * GB, flops=1e11, peak_flops_per_s=1e12) == pytest.approx(225)
    assert floor_ms(BUS, 10 * GB, 2 * GB, flops=3e11, peak_flops_per_s=1e12) == pytest.approx(300)
    # A rate that is not known bounds nothing.
    assert floor_ms(BUS, 10 * GB, 2 * GB, flops=3e11) == pytest.approx(200)
    assert floor_ms(BUS, 0, 0, flops=3e11) is None


def test_each_phase_is_the_longer_of_compute_and_copies():
    assert times(phase(300, into=10), phase(100, into=10, out=8)) == (300 + 8e3 / 30 + 40, "compute")
    assert times(phase(100, into=10), phase(100, into=10, out=8)) == (200 + 8e3 / 30 + 40, "copies in")
    assert times(phase(1), phase(1, out=8)) == (201, "copies out")


@pytest.mark.parametrize(
    ("begins", "host_ms", "step_ms"),
    [("after", 50, 350), ("at the end", 50, 300), ("at the end", 250, 450), ("inside", 250, 300), ("inside", 450, 450)],
)
def test_the_update_hides_behind_what_it_may(begins: str, host_ms: float, step_ms: float):
    assert times(phase(100), phase(200), begins=begins, host_ms=host_ms)[0] == step_ms


@pytest.mark.parametrize(("left_ms", "step_ms"), [(0, 350), (25, 325), (80, 300), (math.inf, 300)])
def test_backward_waits_for_updates_whose_gradients_have_no_room(left_ms: float, step_ms: float):
    """Forward hides the rest."""
    found = times(phase(100), phase(200), begins="inside", host_ms=250, left_ms=left_ms)
    assert found[0] == step_ms


def test_a_long_forward_hides_all_that_a_ring_leaves():
    found = times(phase(500), phase(200), begins="inside", host_ms=250, left_ms=50)
    assert found[0] == 700


def test_of_several_microbatches_the_last_backward_hides_it():
    steps = [phase(100), phase(200)] * 3
    assert times(*steps, begins="inside", host_ms=400) == (1000, "compute")
    assert times(*steps, begins="at the end", host_ms=2000) == (2800, "host optimizer")


def test_an_update_on_the_device_is_added():
    assert times(phase(100), phase(200), device_ms=40) == (340, "compute")


def test_copies_that_compute_waits_for_are_added():
    assert times(phase(100, waits=10), phase(100, waits=10)) == (600, "copies that compute waits for")


def test_the_share_that_copies_can_hide():
    # 100 ms of compute, 40 of them taken by weights: 2.4 GB of activations leave beside them.
    out = phase(100, out=8 + 1.6, acts=(0, 8))
    assert hidden_share([out], BUS, 1e12) == pytest.approx(60 / 200)
    assert hidden_share([out, phase(1, into=8, acts=(8, 0))], BUS, 1e12) == pytest.approx(1 / 160)
    assert hidden_share([phase(10, out=20, acts=(0, 1))], BUS, 1e12) == 0
    assert hidden_share([phase(10)], BUS, 1e12) == 1


def test_a_simulated_time_replaces_that_of_the_phases():
    phases = [phase(100, waits=1), phase(200)]
    found = forecast(phases, BUS, 1e12, UpdateTimes(device_ms=5), simulated_ms=1000)
    assert found.step_ms == pytest.approx(1000 + 20 + 5)
    assert found.phases_ms == pytest.approx((120, 200))


def test_operations_other_than_products_take_the_time_of_memory():
    phases = [replace(phase(100), memory_bytes=20 * GB), phase(200)]
    found = forecast(phases, BUS, 1e12, UpdateTimes(), memory_gb_s=1000.0)
    assert found.phases_ms == pytest.approx((120, 200))
    assert found.alone_ms["compute"] == pytest.approx(320)
    assert forecast(phases, BUS, 1e12, UpdateTimes()).step_ms == pytest.approx(300)
    out = replace(phase(80, out=8, acts=(0, 8)), memory_bytes=20 * GB)
    assert hidden_share([out], BUS, 1e12, 1000.0) == pytest.approx(100 / 200)


def test_products_of_experts_have_a_rate_of_their_own():
    phases = [replace(phase(100), grouped_flops=phase(40).flops), phase(200)]
    found = forecast(phases, BUS, 1e12, UpdateTimes(), costs={"grouped": 1.5})
    assert found.phases_ms == pytest.approx((120, 200))
    assert found.alone_ms["compute"] == pytest.approx(320)
    assert forecast(phases, BUS, 1e12, UpdateTimes()).step_ms == pytest.approx(300)
    out = replace(phase(80, out=8, acts=(0, 8)), grouped_flops=phase(40).flops)
    assert hidden_share([out], BUS, 1e12, costs={"grouped": 1.5}) == pytest.approx(100 / 200)


def test_reads_from_files_bound_a_step_where_they_take_longer():
    step = Forecast(10.0, {"compute": 8.0}, "compute", (4.0, 6.0))
    longer, shorter = bounded_by_files(step, 12.0), bounded_by_files(step, 5.0)
    assert (longer.step_ms, longer.bound, longer.alone_ms) == (12.0, "files", {"compute": 8.0, "files": 12.0})
    assert (shorter.step_ms, shorter.bound, shorter.alone_ms) == (10.0, "compute", {"compute": 8.0, "files": 5.0})

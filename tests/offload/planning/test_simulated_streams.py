"""Simulated streams overlap, wait for each other and take time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.memory.bandwidth import Bandwidth
from offload.modes.layer_stream import LayerStream
from offload.planning.dry_run import dry_run
from offload.planning.simulated_streams import SimulatedStreams, Work

MB = 10**6


@pytest.fixture
def streams() -> SimulatedStreams:
    """1 MFLOP takes 1 ms, 1 MB takes 1 ms in, 2 ms out, 4 ms each while both last."""
    return SimulatedStreams(torch.device("meta"), Bandwidth(h2d=1.0, d2h=0.5, both=0.25), flops_per_s=1e9)


def test_streams_go_on_side_by_side_until_one_waits(streams: SimulatedStreams):
    done = streams.event()
    with streams.on(streams.h2d):
        streams.spend(0, 3 * MB)
    done.record(streams.h2d)
    streams.spend(MB, 0)
    streams.compute.wait_event(done)
    streams.spend(MB, 0)
    assert streams.work == [Work("copy in", 0, 3), Work("compute", 0, 1), Work("compute", 3, 4)]
    assert streams.step_ms == 4


def test_a_bus_that_works_both_ways_is_slower(streams: SimulatedStreams):
    with streams.on(streams.h2d):
        streams.spend(0, MB)
    with streams.on(streams.d2h):
        streams.spend(0, MB)
    assert streams.work == [Work("copy in", 0, 1), Work("copy out", 0, 4)]


def test_exchanges_are_beside_copies():
    streams = SimulatedStreams(torch.device("meta"), Bandwidth(1.0, 1.0, 1.0), flops_per_s=1e9, links_gb_s=0.5)
    with streams.on(streams.h2d):
        streams.spend(0, 3 * MB)
    with streams.on(streams.gather):
        streams.exchange(MB)
    assert streams.work == [Work("copy in", 0, 3), Work("exchange", 0, 2)]


def test_a_host_that_waits_holds_up_what_it_queues_later(streams: SimulatedStreams):
    streams.spend(5 * MB, 0)
    streams.synchronize()
    with streams.on(streams.d2h):
        streams.spend(0, MB)
    assert streams.work[-1] == Work("copy out", 5, 7)


def test_a_step_begins_at_zero(streams: SimulatedStreams):
    streams.spend(5 * MB, 0)
    streams.start_step()
    streams.spend(MB, 0)
    assert streams.work == [Work("compute", 0, 1)]


def test_what_copies_nothing_takes_no_time(streams: SimulatedStreams):
    with streams.on(streams.h2d):
        streams.spend(MB, 0)
    assert streams.work == []
    assert streams.step_ms == 0


def test_dequantising_takes_the_time_of_the_devices_memory():
    streams = SimulatedStreams(torch.device("meta"), Bandwidth(1.0, 1.0, 1.0), flops_per_s=1e9, device_gb_s=10.0)
    streams.spend(MB, 0, 20 * MB)
    assert streams.work == [Work("compute", 0, 3)]


def test_a_step_of_a_dry_run_is_as_long_as_its_parts_allow():
    """Two linear layers of 1000 x 1000 in float32 on one row: 4 MB each, 2 MFLOP forward and 4 backward."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(1000, 1000, bias=False) for _ in range(2)]))
    model.forward = lambda inputs: model[0][1](model[0][0](inputs))
    model.to("meta")
    inputs = torch.empty(1, 1000, device="meta", requires_grad=True)

    def step(flops_per_s: float) -> SimulatedStreams:
        timed = SimulatedStreams(torch.device("meta"), Bandwidth(1.0, 1.0, 1.0), flops_per_s)
        dry_run(LayerStream(slots=2), model, [lambda: model(inputs).sum()], timed=timed)
        return timed

    # When forward turns to backward both are in their slots: 8 ms in, then 4 and 4 ms out, each after its product.
    copies = step(flops_per_s=1e15)
    assert copies.step_ms == pytest.approx(16, rel=1e-3)
    assert {work.lane for work in copies.work} == {"copy in", "compute", "copy out"}
    # 12 MFLOP at 1 ms each; the first waits 4 ms for its weights, the last gradient takes 4 ms to leave.
    compute = step(flops_per_s=1e8)
    assert compute.step_ms == pytest.approx(4 + 120 + 4, rel=0.1)

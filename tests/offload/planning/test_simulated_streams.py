"""Simulated streams overlap, wait for each other and take time; processes that share homes exchange bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.memory.bandwidth import Bandwidth
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.planning.dry_run import DryRun, dry_run
from offload.planning.simulated_streams import PlannedSharers, SimulatedStreams, Work
from offload.sharing.sharers import NO_SHARERS
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

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


# Processes that share homes.


def planned(mode: Mode, sharers: PlannedSharers | None, timed: SimulatedStreams | None = None) -> DryRun:
    with torch.device("meta"):
        model, inputs = Stack(width=64, depth=4), torch.empty(5, 8)
    return dry_run(mode, model, [lambda: model(inputs).sum()], norms=True, timed=timed, sharers=sharers)


def test_planned_copies_and_exchanges_are_those_of_the_first_of_several():
    sharers = PlannedSharers(2)
    plan = planned(LayerStream(slots=2), sharers)

    def work(sharers: ThreadSharers) -> tuple[int, int]:
        model, mode = Stack(width=64, depth=4), LayerStream(slots=2)
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        for _ in range(2):
            before = mode.counters()
            with mode.step(norms=True):
                mode.accumulate([lambda: model(stack_inputs(0, 0)).sum()])
            model.zero_grad()
        grown = mode.counters() - before
        mode.detach()
        return grown.h2d_bytes, grown.d2h_bytes

    found = as_sharers(2, work)
    assert (plan.total("h2d_bytes"), plan.total("d2h_bytes")) == found[0]
    # What it does not copy in itself, the others send; of gradients it receives slices, and then sums.
    (alone_in, alone_out), alone = work(NO_SHARERS), planned(LayerStream(slots=2), None)
    assert (alone.total("h2d_bytes"), alone.total("d2h_bytes")) == (alone_in, alone_out)
    exchanged = plan.total("exchanged_bytes")
    assert alone.total("exchanged_bytes") == 0
    others = alone_in / 2
    assert others + alone_out <= exchanged < 1.5 * (others + alone_out)
    # The first step does not sum gradients of what stays on the device.
    assert exchanged < sharers.exchanged_bytes < 2 * exchanged


def test_sums_need_room_for_the_slices_of_others():
    two, four = (planned(LayerStream(slots=2), PlannedSharers(count)) for count in (2, 4))
    assert four.peak_bytes > two.peak_bytes
    hosts = planned(LayerStream(slots=2), PlannedSharers(2, hosts=2))
    assert hosts.peak_bytes > two.peak_bytes


def test_exchanges_take_time_beside_copies_and_compute():
    speeds = Bandwidth(1.0, 1.0, 1.0), 1e12

    def step_ms(links_gb_s: float) -> tuple[float, set[str]]:
        timed = SimulatedStreams(torch.device("meta"), *speeds, links_gb_s=links_gb_s)
        planned(LayerStream(slots=2), PlannedSharers(2, streams=timed), timed)
        return timed.step_ms, {work.lane for work in timed.work}

    (fast_ms, fast), (slow_ms, slow) = step_ms(1000.0), step_ms(0.1)
    assert "exchange" in fast & slow
    assert slow_ms > 2 * fast_ms


def test_the_others_of_all_hosts_agree():
    sharers = PlannedSharers(2, hosts=3)
    assert sharers.exchange((1, 2), "test") == [[1, 2]] * 2
    assert sharers.exchange((1, 2), "test", everywhere=True) == [[1, 2]] * 6

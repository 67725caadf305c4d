"""Simulated streams overlap, wait for each other and take time; processes that share homes exchange bytes."""

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions, Mode
from offload.planning import simulated_streams
from offload.planning.dry_run import DryRun, dry_run
from offload.planning.simulated_streams import Bandwidth, PlannedSharers, SimulatedStreams, Work, measure_bandwidth
from offload.sharing.sharers import NO_SHARERS
from offload.streams.registry import Streams
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

MB = 10**6


@pytest.fixture
def timed() -> SimulatedStreams:
    """1 MFLOP takes 1 ms, 1 MB takes 1 ms in, 2 ms out, 4 ms each while both last."""
    return SimulatedStreams(torch.device("meta"), Bandwidth(h2d=1.0, d2h=0.5, both=0.25), flops_per_s=1e9)


def test_streams_go_on_side_by_side_until_one_waits(timed: SimulatedStreams):
    done = timed.event()
    with timed.on(timed.h2d):
        timed.spend(0, 3 * MB)
    done.record(timed.h2d)
    timed.spend(MB, 0)
    timed.compute.wait_event(done)
    timed.spend(MB, 0)
    assert timed.work == [Work("copy in", 0, 3), Work("compute", 0, 1), Work("compute", 3, 4)]
    assert timed.step_ms == 4


def test_a_bus_that_works_both_ways_is_slower(timed: SimulatedStreams):
    with timed.on(timed.h2d):
        timed.spend(0, MB)
    with timed.on(timed.d2h):
        timed.spend(0, MB)
    assert timed.work == [Work("copy in", 0, 1), Work("copy out", 0, 4)]


def test_products_of_experts_take_their_own_time():
    streams = SimulatedStreams(torch.device("meta"), Bandwidth(1.0, 1.0, 1.0), flops_per_s=1e9, costs={"grouped": 1.5})
    streams.spend(2 * MB, 0, kind="grouped")
    streams.spend(MB, 0)
    assert streams.work == [Work("compute", 0, 4)]


def test_exchanges_are_beside_copies():
    streams = SimulatedStreams(torch.device("meta"), Bandwidth(1.0, 1.0, 1.0), flops_per_s=1e9, links_gb_s=0.5)
    with streams.on(streams.h2d):
        streams.spend(0, 3 * MB)
    with streams.on(streams.gather):
        streams.exchange(MB)
    assert streams.work == [Work("copy in", 0, 3), Work("exchange", 0, 2)]


def test_a_host_that_waits_holds_up_what_it_queues_later(timed: SimulatedStreams):
    timed.spend(5 * MB, 0)
    timed.synchronize()
    with timed.on(timed.d2h):
        timed.spend(0, MB)
    assert timed.work[-1] == Work("copy out", 5, 7)


def test_a_step_begins_at_zero(timed: SimulatedStreams):
    timed.spend(5 * MB, 0)
    timed.start_step()
    timed.spend(MB, 0)
    assert timed.work == [Work("compute", 0, 1)]


def test_what_copies_nothing_takes_no_time(timed: SimulatedStreams):
    with timed.on(timed.h2d):
        timed.spend(MB, 0)
    assert timed.work == []
    assert timed.step_ms == 0


def test_operations_that_move_bytes_take_the_time_of_the_devices_memory():
    streams = SimulatedStreams(torch.device("meta"), Bandwidth(1.0, 1.0, 1.0), flops_per_s=1e9, memory_gb_s=10.0)
    streams.spend(MB, 0, 20 * MB)
    assert streams.work == [Work("compute", 0, 3)]


def test_work_that_begins_where_the_work_before_ends_is_one(timed: SimulatedStreams):
    timed.spend(MB, 0)
    timed.spend(2 * MB, 0)
    with timed.on(timed.h2d):
        timed.spend(0, MB)
    timed.spend(MB, 0)
    assert [work.lane for work in timed.work] == ["compute", "copy in", "compute"]
    assert timed.work[0].end_ms == timed.work[2].start_ms
    assert timed.work[0].end_ms - timed.work[0].start_ms == pytest.approx(
        3 * (timed.work[2].end_ms - timed.work[2].start_ms)
    )


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


# The bus.


def test_bandwidth_is_measured_each_way_and_both(streams: Streams):
    speed = measure_bandwidth(streams, nbytes=2**20, repeats=3)
    assert min(speed.h2d, speed.d2h, speed.both) > 0.01


def test_each_direction_is_timed_with_its_own_copies(streams: Streams, monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]

    def takes(seconds: float):
        def copy(*_: object, **__: object) -> None:
            clock[0] += seconds

        return copy

    monkeypatch.setattr(simulated_streams, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(simulated_streams.Transfer, "copy_in", takes(0.001))
    monkeypatch.setattr(simulated_streams.Transfer, "copy_out", takes(0.003))
    speed = measure_bandwidth(streams, nbytes=10**6, repeats=3)
    # 1 MB in 1 ms is 1 GB/s.
    assert (speed.h2d, speed.d2h, speed.both) == pytest.approx((1.0, 1 / 3, 1 / 4))


def test_copies_both_ways_are_slower_while_both_last():
    bus = Bandwidth(h2d=50.0, d2h=40.0, both=25.0)
    assert bus.two_way_ms(50e6, 0) == pytest.approx(1.0)
    assert bus.two_way_ms(0, 40e6) == pytest.approx(1.0)
    # 25 MB each way at 25 GB/s, then the rest of the longer one alone.
    assert bus.two_way_ms(75e6, 25e6) == pytest.approx(1.0 + 1.0)
    assert bus.two_way_ms(25e6, 65e6) == pytest.approx(1.0 + 1.0)


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
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        for _ in range(2):
            before = attached.counters()
            with attached.step(norms=True):
                attached.accumulate([lambda: model(stack_inputs(0, 0)).sum()])
            model.zero_grad()
        grown = attached.counters() - before
        attached.detach()
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

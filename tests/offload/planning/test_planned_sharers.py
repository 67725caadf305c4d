"""Dry runs of processes that share homes: bytes of one device, and the time of what devices exchange."""

from __future__ import annotations

import torch

from offload.memory.bandwidth import Bandwidth
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.planning.dry_run import DryRun, dry_run
from offload.planning.planned_sharers import PlannedSharers
from offload.planning.simulated_streams import SimulatedStreams
from offload.sharing.sharers import NO_SHARERS
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

MB = 10**6


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

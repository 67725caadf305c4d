"""Sums begin when their gradients are there: not before, and not behind all that compute was given since."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.optimizer.adamw import HostAdamW
from offload.sharing import slices
from offload.sharing.links import CopyLinks, Links
from offload.sharing.summing import GradientSum
from offload.streams.stream_checker import CheckedStream, CheckedStreams, StreamOrderError
from offload.torch_private.torch_internals import gradient_accumulator
from offload.weights.units.unit import OffloadUnit, UnitTensor
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers, use_collectives

STEPS = 3


class Mark:
    """Work that compute is given, as the stream checker knows it."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each parameter."""
    monkeypatch.setattr(slices.gradient_buckets, "__defaults__", (1, 1))


@pytest.fixture(params=[Links, CopyLinks])
def at_sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Functions which are called when a sum is queued, with what is summed: one of each sharer."""
    if request.param is Links:
        use_collectives(monkeypatch)
    called: dict = {}

    def wrapped(name: str):
        sums = getattr(request.param, name)

        def noted(links, addends, what: str, *rest, **options) -> None:
            called[links._sharers](what)
            sums(links, addends, what, *rest, **options)

        monkeypatch.setattr(request.param, name, noted)

    wrapped("sum")
    if request.param is CopyLinks:
        wrapped("sum_in_place")
    return called


def run(
    sharers: ThreadSharers, attached: LayerStream, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Runs steps of one sharer, and takes the mode off."""
    for step in range(STEPS):
        with attached.step():
            attached.accumulate([lambda step=step: model(stack_inputs(step, sharers.rank)).square().mean()])
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    sharers.laid_down(None)
    attached.detach()


@pytest.mark.parametrize(("resident", "device_share"), [(0, None), (2, None), (2, 10**9)])
def test_sums_do_not_wait_for_what_compute_is_given_later(at_sums: dict, resident: int, device_share: int | None):
    """Each exchange of the hosts gives compute something more, before it tells what is complete.

    With states on the device, too, which keeps slices of the sums.
    """
    first = Stack(depth=4)

    def work(sharers: ThreadSharers) -> list[bool]:
        streams, mark, waited = CheckedStreams(torch.device("cpu")), Mark(), []
        exchange = sharers.exchange

        def busy_exchange(*arguments, **options):
            found = exchange(*arguments, **options)
            streams.writes(streams.compute, mark, "a product after the gradients")
            return found

        def at_sum(what: str) -> None:
            try:
                streams.reads(streams.gather, mark, what)
                waited.append(True)
            except StreamOrderError:
                waited.append(False)

        sharers.exchange, at_sums[sharers] = busy_exchange, at_sum
        model, mode = copy.deepcopy(first), LayerStream(slots=2, resident=resident)
        attached = mode.attach(model, streams, AttachOptions(sharers=sharers))
        optimizer = None
        if device_share is not None:
            optimizer = HostAdamW(model.parameters(), threads=1)
            attached.overlap(optimizer, early=True, device_share=device_share)
            optimizer.allocate()
        run(sharers, attached, model, optimizer)
        return waited

    for waited in as_sharers(2, work):
        assert len(waited) >= 2 * STEPS
        assert not any(waited)


def test_a_sum_waits_for_hooks_behind_the_last_of_its_gradients(monkeypatch: pytest.MonkeyPatch):
    """A hook of the node that accumulates, as another program may have it, runs behind the mode's."""
    first, marks, sums = Stack(depth=4), {}, []
    shares_memory = slices.GradientBucket.shares_memory

    def at_sum(bucket: slices.GradientBucket) -> bool:
        streams, mark = marks[bucket.parameters[0]]
        streams.reads(streams.gather, mark, "sum")
        sums.append(bucket)
        return shares_memory(bucket)

    monkeypatch.setattr(slices.GradientBucket, "shares_memory", at_sum)

    def work(sharers: ThreadSharers) -> None:
        model, streams, mode = copy.deepcopy(first), CheckedStreams(torch.device("cpu")), LayerStream(slots=2)
        attached = mode.attach(model, streams, AttachOptions(sharers=sharers))
        stays = [parameter for parameter in model.parameters() if parameter not in attached.shared_parameters]
        nodes = [gradient_accumulator(parameter) for parameter in stays]
        for parameter, node in zip(stays, nodes, strict=True):
            marks[parameter] = streams, Mark()
            node.register_hook(lambda *_, mark=marks[parameter][1]: streams.writes(streams.compute, mark, "a hook"))
        run(sharers, attached, model)

    as_sharers(2, work)
    assert len(sums) == 2 * (STEPS - 1) * len(marks) // 2


def test_a_sum_waits_for_each_stream_on_which_its_gradients_were_made(monkeypatch: pytest.MonkeyPatch):
    """Autograd runs an operation of backward on the stream of its forward, which may be the user's own."""
    first, land = Stack(depth=4), GradientSum.land
    sides: list[CheckedStream] = []

    def on_side(sums: GradientSum, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor) -> None:
        with sums._streams.on(CheckedStream("side")) if ".up." in tensor.name else nullcontext():
            if ".up." in tensor.name:
                sides.append(sums._streams.compute)
            land(sums, unit, tensor, gradient)

    monkeypatch.setattr(GradientSum, "land", on_side)

    def work(sharers: ThreadSharers) -> None:
        model, mode = copy.deepcopy(first), LayerStream(slots=2)
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        run(sharers, attached, model)

    as_sharers(2, work)
    # Of four units two tensors each, by two sharers.
    assert len(sides) == STEPS * 4 * 2 * 2

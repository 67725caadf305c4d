"""Units come in as soon as their slot is free and their weights are final, and make way in a fixed order."""

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.memory.host_memory import HostArena
from offload.modes.layer_stream import LayerStream
from offload.optimizer.worker import UpdateWorker
from offload.streams import registry
from offload.streams.transfer import Telemetry, Transfer
from offload.weights.prefetching.prefetcher import Prefetcher
from offload.weights.prefetching.slot_contents import Filler, SlotContents
from offload.weights.units.partition import CutPoint, cut
from tests.offload.helpers.models import Stack, stack_inputs, under
from tests.offload.helpers.small import swap_small
from tests.offload.helpers.updates import made, one_step, updating


def test_the_fixture_of_the_gpus_tests_fits(poisoned: None):
    # Here all slots are poisoned anyway.
    torch.manual_seed(0)
    model, mode = Stack(), LayerStream(slots=2)
    twin = copy.deepcopy(model)
    with under(mode, model, "cpu") as attached, attached.step():
        assert torch.equal(model(stack_inputs(0, 0)), twin(stack_inputs(0, 0)))


@pytest.mark.parametrize("pending", [False, True], ids=["fetched ahead", "after its update"])
@pytest.mark.parametrize("slots", [2, 3])
def test_a_unit_comes_in_while_the_one_before_computes(slots: int, pending: bool, monkeypatch: pytest.MonkeyPatch):
    swap_small(monkeypatch)
    model, mode = made(functools.partial(Stack, depth=6)), LayerStream(slots=slots)
    copy_in, computed, waited_for = Transfer.copy_in, [], []

    def noting(transfer: Transfer, *operands, **options) -> None:
        waited_for.append(transfer.streams.h2d.clock.get("compute", 0))
        copy_in(transfer, *operands, **options)

    with updating(mode, model, early=False) as (attached, optimizer):
        streams = registry.acquire("cpu")
        one_step(model, attached)
        optimizer.step()
        optimizer.finish()
        monkeypatch.setattr(Transfer, "copy_in", noting)
        if pending:
            monkeypatch.setattr(UpdateWorker, "is_pending", lambda updates, unit: True)
        for block in model.blocks:
            # Inside the block's forward, after which its slot may be filled anew.
            block.dropout.register_forward_hook(lambda *_: computed.append(streams.compute.advance()))
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        registry.release(streams)
    for unit in range(slots, 6):
        assert computed[unit - slots] <= waited_for[unit] < computed[unit - 1]


@pytest.fixture
def prefetcher() -> Iterator[Prefetcher]:
    """Four units for two slots, of which nothing is known yet; nothing is fetched ahead."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    parts, streams = (
        cut(model, [CutPoint(str(index), layer) for index, layer in enumerate(model)]),
        registry.acquire("cpu"),
    )
    transfer, arena = Transfer(streams, Telemetry(streams)), HostArena(torch.device("cpu"))
    for unit in parts.units:
        unit.bring_home(arena)
    slots, filler = DeviceSlots(2, parts.largest_unit_bytes, streams), Filler(parts, transfer, arena, 0)
    yield Prefetcher(parts.units, SlotContents(slots, transfer, True, filler), transfer, ahead=0, filler=filler)
    registry.release(streams)


def contents(prefetcher: Prefetcher) -> set[str]:
    return {unit.name for unit in prefetcher.contents.slot_of}


def test_a_fetched_unit_is_in_its_slot_until_it_makes_way(prefetcher: Prefetcher):
    units = prefetcher._units
    for unit in units[:2]:
        slot = prefetcher.fetch(unit)
        assert slot.content is unit
        assert torch.equal(slot.bytes[: unit.nbytes], unit.weights.bytes)
        assert prefetcher.fetch(unit) is slot
    prefetcher.fetch(units[2])
    # The unit fetched last may still be read.
    assert contents(prefetcher) == {"1", "2"}
    prefetcher.evict_all()
    assert contents(prefetcher) == set()


def test_the_unit_that_is_used_last_makes_way(prefetcher: Prefetcher):
    units = prefetcher._units
    for order in ((0, 1, 2, 0, 1), (0, 1, 2)):
        prefetcher.begin_step()
        for index in order:
            prefetcher.fetch(units[index], in_window=True)
            units[index].open_windows -= 1
        if order == (0, 1, 2):
            # Of 0 and 1, which were there, 1 is used later.
            assert contents(prefetcher) == {"0", "2"}
        prefetcher.end_step()


def test_units_with_open_windows_stay_and_a_slot_too_few_is_refused_by_their_names(prefetcher: Prefetcher):
    first, second, third, _ = prefetcher._units
    prefetcher.fetch(first, in_window=True)
    prefetcher.fetch(first, in_window=True)
    prefetcher.fetch(second, in_window=True)
    with pytest.raises(RuntimeError, match=r"a device slot is needed while all 2 are in use by 0, 1: "):
        prefetcher.fetch(third, in_window=True)
    first.open_windows = 0
    prefetcher.fetch(third, in_window=True)
    assert contents(prefetcher) == {"1", "2"}


def test_recent_units_are_in_the_same_slot_after_a_block_that_retains_them(prefetcher: Prefetcher):
    first, *others = prefetcher._units
    slot = prefetcher.fetch(first)
    with prefetcher.retain_recent():
        for unit in others:
            prefetcher.fetch(unit)
    assert slot.content is first
    assert torch.equal(slot.bytes[: first.nbytes], first.weights.bytes)


def test_a_window_that_closes_in_such_a_block_does_not_free_the_slot(prefetcher: Prefetcher):
    """The operation of backward that asked for the weight reads it after the recompute, in which the window was."""
    first, *_ = prefetcher._units
    slot = prefetcher.fetch(first)
    with prefetcher.retain_recent():
        prefetcher.fetch(first, in_window=True)
        first.open_windows -= 1
        prefetcher.contents.mark_last_use(first)
        assert slot.read_by is not None
    assert slot.read_by is None
    # The stream checker holds that the next copy into the slot waits for that read.
    prefetcher.evict_all()


def test_a_copy_is_unawaited_until_its_unit_is_used(prefetcher: Prefetcher):
    units = prefetcher._units
    prefetcher.begin_step()
    for unit in units[:2]:
        prefetcher.fetch(unit)
    prefetcher.end_step()
    prefetcher.begin_step()
    assert [len(prefetcher.contents.unawaited_copy(unit)) for unit in units] == [1, 1, 0, 0]
    prefetcher.fetch(units[0])
    assert [len(prefetcher.contents.unawaited_copy(unit)) for unit in units] == [0, 1, 0, 0]
    prefetcher.end_step()
    assert not any(prefetcher.contents.unawaited_copy(unit) for unit in units)

"""When units come in: as soon as their slot is free and their weights are final."""

from __future__ import annotations

import functools

import pytest

from offload.modes.layer_stream import LayerStream
from offload.optimizer.worker import UpdateWorker
from offload.runtime import registry
from offload.runtime.transfer import Transfer
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.updates import made, make_small, one_step, updating


@pytest.mark.parametrize("pending", [False, True], ids=["fetched ahead", "after its update"])
@pytest.mark.parametrize("slots", [2, 3])
def test_a_unit_comes_in_while_the_one_before_computes(slots: int, pending: bool, monkeypatch: pytest.MonkeyPatch):
    make_small(monkeypatch)
    model, mode = made(functools.partial(Stack, depth=6)), LayerStream(slots=slots)
    copy_in, computed, waited_for = Transfer.copy_in, [], []

    def noting(transfer: Transfer, *operands, **options) -> None:
        waited_for.append(transfer.streams.h2d.clock.get("compute", 0))
        copy_in(transfer, *operands, **options)

    with updating(mode, model, early=False) as optimizer:
        streams = registry.acquire("cpu")
        one_step(model, mode)
        optimizer.step()
        optimizer.finish()
        monkeypatch.setattr(Transfer, "copy_in", noting)
        if pending:
            monkeypatch.setattr(UpdateWorker, "is_pending", lambda updates, unit: True)
        for block in model.blocks:
            block.register_forward_hook(lambda *_: computed.append(streams.compute.advance()))
        with mode.step():
            model(stack_inputs(0, 0)).sum().backward()
        registry.release(streams)
    for unit in range(slots, 6):
        assert computed[unit - slots] <= waited_for[unit] < computed[unit - 1]

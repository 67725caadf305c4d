"""Sharers whose forwards differ raise an error that names both, whatever the way in which slices are exchanged."""

from __future__ import annotations

import pytest
import torch

from offload.modes.layer_stream import LayerStream
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers, use_collectives


@pytest.fixture(autouse=True, params=["collectives", "copies"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways in which devices of sharers exchange slices."""
    if request.param == "collectives":
        use_collectives(monkeypatch)


def test_hosts_whose_forwards_differ_raise_an_error_that_names_ranks():
    def work(sharers: ThreadSharers) -> None:
        model, mode = Stack(depth=2), LayerStream(slots=1)
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        with mode.step():
            mode.accumulate([lambda: model(stack_inputs(0, 0)).sum()] * (1 if sharers.first else 2))

    expected = r"^rank [0-3] has come to the (use of blocks.1 in backward|end of a step), rank [0-3] to the "
    with pytest.raises(RuntimeError, match=expected):
        as_sharers(2, work, hosts=2)


def test_sharers_that_need_other_weights_raise_an_error_that_names_them():
    def work(sharers: ThreadSharers) -> None:
        model, mode = Stack(depth=3), LayerStream(slots=2)
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        with mode.step(), torch.no_grad():
            for block in list(model.blocks)[sharers.rank :]:
                block(torch.ones(5, 16))

    expected = r"^rank (0|1) has come to the fetch of blocks\.\d for its use, rank (0|1) to the fetch of blocks\.\d: "
    with pytest.raises(RuntimeError, match=expected):
        as_sharers(2, work)


def test_a_sharer_that_has_fewer_forwards_raises_an_error():
    def work(sharers: ThreadSharers) -> None:
        model, mode = Stack(depth=2), LayerStream(slots=1)
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        with mode.step(), torch.no_grad():
            for _ in range(1 + sharers.rank):
                model(stack_inputs(0, 0))

    with pytest.raises(RuntimeError, match=r"to the end of a step"):
        as_sharers(2, work)

"""Sharers have buffers of their own; what they cannot share is refused in a line that names it."""

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.optimizer.adamw import HostAdamW
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.sharers import ThreadSharers, as_sharers


class Counting(nn.Module):
    """A block with a buffer that its forward changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += hidden.mean().detach()
        return self.linear(hidden) + self.calls


def model_of(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential()
    model.layers = nn.ModuleList(layers)
    return model


def test_each_sharer_has_its_own_buffers():
    def work(sharers: ThreadSharers) -> list[float]:
        model, mode = model_of(Counting(), Counting()), LayerStream(layers="layers", slots=1)
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        for _ in range(2):
            with attached.step():
                sum(block(torch.full((2, 4), sharers.rank + 1.0)).sum() for block in model.layers).backward()
        attached.detach()
        return [block.calls.item() for block in model.layers]

    assert as_sharers(2, work) == [[2, 2], [4, 4]]


class Changing(nn.Module):
    """A block that changes its own weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return hidden * self.weight


def test_a_forward_that_changes_a_weight_which_sharers_share_is_refused():
    def work(sharers: ThreadSharers) -> None:
        model, mode = model_of(Changing()), LayerStream(layers="layers")
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        with attached.step(), torch.no_grad():
            model.layers[0](torch.ones(2, 4))

    with pytest.raises(RuntimeError, match=r"^layers.0.weight was changed in a forward, and several processes"):
        as_sharers(2, work)


def test_data_that_takes_the_place_of_what_sharers_share_is_refused():
    def work(sharers: ThreadSharers) -> None:
        model, mode = model_of(nn.Linear(4, 4)), LayerStream(layers="layers")
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        model.layers[0].weight.data = torch.ones(4, 4)
        with attached.step():
            pass

    with pytest.raises(RuntimeError, match=r"^layers.0.weight was given other data, and several processes share"):
        as_sharers(2, work)


def test_a_parameter_that_is_not_contiguous_is_refused():
    def work(sharers: ThreadSharers) -> None:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.ones(4, 4).t())
        options = AttachOptions(sharers=sharers)
        LayerStream(layers="layers").attach(model_of(layer), CheckedStreams(torch.device("cpu")), options)

    with pytest.raises(ValueError, match=r"^layers.0.weight has strides \(1, 4\)"):
        as_sharers(2, work)


def test_states_that_exist_before_slices_are_known_are_refused():
    def work(sharers: ThreadSharers) -> None:
        model, mode = model_of(nn.Linear(4, 4)), LayerStream(layers="layers")
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        optimizer = HostAdamW(model.parameters(), threads=1)
        optimizer.allocate()
        try:
            attached.overlap(optimizer, early=False)
        finally:
            attached.detach()

    with pytest.raises(RuntimeError, match=r"^states that exist cannot be shared"):
        as_sharers(2, work)

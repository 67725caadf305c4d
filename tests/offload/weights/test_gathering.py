"""Sharers that share the homes of a model compute what one process does that adds their microbatches."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.optimizer.adamw import HostAdamW
from offload.runtime.errors import KnobError
from offload.runtime.sharers import NO_SHARERS, Sharers, meet
from offload.runtime.stream_checker import CheckedStreams
from offload.weights import slices
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

STEPS = 3


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch):
    """Units of these models are small."""
    monkeypatch.setattr(slices, "LEAST_CHUNK_BYTES", 512)


def loss_of(model: nn.Module, step: int, microbatch: int) -> torch.Tensor:
    return model(stack_inputs(step, microbatch)).float().square().mean()


def sum_rest(model: nn.Module, mode: Mode, sharers: ThreadSharers) -> None:
    """Makes gradients that are not yet the sums over the sharers, in the order of ranks."""
    done = mode.summed_parameters()
    rest = [parameter for parameter in model.parameters() if parameter not in done]
    everyone = sharers.laid_down([parameter.grad.clone() for parameter in rest])
    with torch.no_grad():
        for parameter, *given in zip(rest, *everyone, strict=True):
            total = given[0].clone()
            for other in given[1:]:
                total += other
            parameter.grad.copy_(total)
    meet(sharers, "test")


def trained(model: nn.Module, mode: Mode, sharers: Sharers, count: int, overlaps: bool = True) -> dict:
    """Trains for some steps with one microbatch a sharer, of `count`. Returns losses, weights and states."""
    streams = CheckedStreams(torch.device("cpu"))
    mode.attach(model, streams, sharers)
    try:
        optimizer = HostAdamW(model.parameters(), lr=0.05, threads=1, compile="off")
        if overlaps:
            mode.overlap(optimizer, early=False)
        mode.divide(optimizer)
        optimizer.allocate()
        losses = []
        for step in range(STEPS):
            own = [sharers.rank] if sharers.count > 1 else range(count)
            with mode.step(norms=True):
                losses += mode.accumulate([partial(loss_of, model, step, number) for number in own])
            norms = {name: mode.gradient_norms().get(p) for name, p in model.named_parameters()}
            if sharers.count > 1:
                sum_rest(model, mode, sharers)
            optimizer.step(scale=0.5)
            optimizer.zero_grad()
        optimizer.finish()
        meet(sharers, "test")
        with mode.inference():
            losses.append(loss_of(model, STEPS, 0))
        states = {
            f"{name}.{key}": value.clone()
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state[parameter].items()
        }
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        # Nobody goes on to unmap what another still compares.
        meet(sharers, "test")
        return {
            "losses": losses,
            "weights": weights,
            "states": states,
            "norms": norms,
            "sums": mode.summed_parameters(),
        }
    finally:
        mode.detach()


MODES = {
    "layer_stream": lambda: LayerStream(slots=2),
    "one slot": lambda: LayerStream(slots=1),
    "everything": lambda: LayerStream(slots=3, outside="stream"),
    "bounce_linear": BounceLinear,
    "shard_offload": lambda: ShardOffload(shards=2),
    "tensor_swap": lambda: TensorSwap(LayerStream(slots=2), min_bytes=1),
    "none": Resident,
}


CASES = [
    *((name, 2, torch.float32) for name in MODES),
    *((name, 3, torch.bfloat16) for name in ("everything", "one slot", "shard_offload")),
]


@pytest.mark.parametrize(("name", "count", "dtype"), CASES, ids=str)
def test_sharers_compute_what_one_process_does(name: str, count: int, dtype: torch.dtype, monkeypatch):
    torch.manual_seed(0)
    model = Stack(depth=3).to(dtype)
    monkeypatch.setattr(Stack, "forward", casting(Stack.forward, dtype))
    one = trained(copy.deepcopy(model), MODES[name](), NO_SHARERS, count)
    several = as_sharers(count, lambda sharers: trained(copy.deepcopy(model), MODES[name](), sharers, count))
    # The losses of one process come by step, those of the sharers by sharer.
    for rank, sharer in enumerate(several):
        expected = one["losses"][rank:-1:count] + one["losses"][-1:]
        assert len(sharer["losses"]) == len(expected)
        assert all(map(torch.equal, sharer["losses"], expected)), rank
        for key in ("weights", "states"):
            assert sharer[key].keys() == one[key].keys()
            assert all(torch.equal(value, one[key][which]) for which, value in sharer[key].items()), (rank, key)
        # All that streams was summed in the step, and the norms are those of the sums.
        assert len(sharer["sums"]) == sum(norm is not None for norm in one["norms"].values())
        assert all(norm is None or torch.equal(norm, one["norms"][which]) for which, norm in sharer["norms"].items())
        assert sum(norm is not None for norm in sharer["norms"].values()) == len(sharer["sums"])


def test_each_sharer_copies_its_part_in_a_step_and_whole_units_outside():
    def work(sharers: Sharers) -> tuple[int, int, int, int]:
        model, mode = Stack(depth=4), LayerStream(slots=2)
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        with mode.step():
            model(stack_inputs(0, 0)).sum().backward()
        in_step = mode.counters().h2d_bytes
        gathers = getattr(sharers, "gathers", 0)
        with mode.inference():
            model(stack_inputs(0, 0))
        outside = mode.counters().h2d_bytes - in_step
        mode.detach()
        return in_step, outside, gathers, getattr(sharers, "gathers", 0)

    whole, outside, _, _ = work(NO_SHARERS)
    sharers = as_sharers(2, work)
    assert sum(in_step for in_step, *_ in sharers) == whole
    # Slices are aligned, so they are not quite equal.
    assert all(abs(in_step - whole / 2) < whole / 10 for in_step, *_ in sharers)
    assert all(found[1] == outside and found[2] == found[3] > 0 for found in sharers)


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
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        for _ in range(2):
            with mode.step():
                sum(block(torch.full((2, 4), sharers.rank + 1.0)).sum() for block in model.layers).backward()
        mode.detach()
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
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        with mode.step(), torch.no_grad():
            model.layers[0](torch.ones(2, 4))

    with pytest.raises(RuntimeError, match=r"^layers.0.weight was changed in a forward, and several processes"):
        as_sharers(2, work)


def test_data_that_takes_the_place_of_what_sharers_share_is_refused():
    def work(sharers: ThreadSharers) -> None:
        model, mode = model_of(nn.Linear(4, 4)), LayerStream(layers="layers")
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        model.layers[0].weight.data = torch.ones(4, 4)
        with mode.step():
            pass

    with pytest.raises(RuntimeError, match=r"^layers.0.weight was given other data, and several processes share"):
        as_sharers(2, work)


def test_a_parameter_that_is_not_contiguous_is_refused():
    def work(sharers: ThreadSharers) -> None:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.ones(4, 4).t())
        LayerStream(layers="layers").attach(model_of(layer), CheckedStreams(torch.device("cpu")), sharers)

    with pytest.raises(ValueError, match=r"^layers.0.weight has strides \(1, 4\)"):
        as_sharers(2, work)


@pytest.mark.parametrize(("early", "device_share", "key"), [(True, 0, "early"), (False, 100, "device_share")])
def test_updates_that_do_not_go_together_with_sharers_are_refused(early: bool, device_share: int, key: str):
    def work(sharers: ThreadSharers) -> None:
        model, mode = model_of(nn.Linear(4, 4)), LayerStream(layers="layers")
        mode.attach(model, CheckedStreams(torch.device("cpu")), sharers)
        optimizer = HostAdamW(model.parameters(), threads=1, compile="off")
        mode.overlap(optimizer, early, device_share)

    with pytest.raises(KnobError, match=key):
        as_sharers(2, work)


def casting(forward, dtype: torch.dtype):
    return lambda self, inputs: forward(self, inputs.to(dtype))

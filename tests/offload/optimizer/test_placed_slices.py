"""States of slices on a device: updated there as the whole would be, and copied home when somebody reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offload.optimizer.claims import Claim, update_in_place
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate
from offload.optimizer.operands import HyperParameters
from offload.optimizer.placed_slices import PlacedSlices, bytes_of_slices, part_of

CPU = torch.device("cpu")
SETTINGS = HyperParameters(0.1, 0.9, 0.999, 1e-8, 0.01)
SLICES = [range(256), range(512, 600)]


def made(dtype: torch.dtype, format: StateFormat) -> tuple[nn.Parameter, dict[str, Tensor]]:
    weight = nn.Parameter(torch.randn(600, generator=torch.Generator().manual_seed(0)).to(dtype).view(30, 20))
    state = {name: torch.zeros(shape, dtype=of) for name, (of, shape) in format.tensors(dtype, weight.shape).items()}
    if "master" in state:
        state["master"].copy_(weight.detach())
    return weight, state


def gradient_of(weight: Tensor, number: int) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).to(weight.dtype)


FORMATS = [StateFormat(), StateFormat("fp32", "bf16"), StateFormat("compact", "int8", "stochastic")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_updates_are_those_of_the_slices_of_the_whole(dtype: torch.dtype, format: StateFormat):
    (weight, state), (whole, expected) = made(dtype, format), made(dtype, format)
    placed, kernel = PlacedSlices(weight, SLICES, format, CPU), FusedUpdate(1)
    for number in range(3):
        if number == 2 and format.master_dtype(dtype) != torch.float32:
            # What the caller writes between updates counts, but for a float32 master, which overwrites it.
            for parameter in (weight, whole):
                with torch.no_grad():
                    parameter.mul_(0.5)
        gradient = gradient_of(weight, number)
        for values in (state, expected):
            values["step"] += 1
        torch.autograd.graph.increment_version(weight)
        own = torch.cat([gradient.view(-1)[part.start : part.stop] for part in SLICES])
        claim = Claim(weight, gradient, SETTINGS, format, 7)
        pairs = placed.update(claim, state, own, kernel, 0.5)
        assert [len(home) for home, _ in pairs] == [256, 88]
        for home, new in pairs:
            home.copy_(new)
        update_in_place(Claim(whole, gradient, SETTINGS, format, 7), expected, kernel, 0.5, SLICES)
        assert torch.equal(weight, whole)
    # Until they are copied home, the states there are as they were.
    name = format.moment_names[0]
    assert not state[name].any()
    placed.copy_home(state)
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in state.items())


def test_forgotten_states_are_made_from_those_at_home():
    weight, state = made(torch.bfloat16, StateFormat())
    placed = PlacedSlices(weight, SLICES, StateFormat(), CPU)
    claim = Claim(weight, gradient_of(weight, 0), SETTINGS, StateFormat(), 0)
    own = torch.zeros(344, dtype=torch.bfloat16)
    state["step"] += 1
    torch.autograd.graph.increment_version(weight)
    placed.update(claim, state, own, FusedUpdate(1), 1.0)
    state["exp_avg"].fill_(3.0)
    placed.forget()
    torch.autograd.graph.increment_version(weight)
    placed.update(claim, state, own, FusedUpdate(1), 1.0)
    placed.copy_home(state)
    assert state["exp_avg"].view(-1)[:256].unique().item() == pytest.approx(2.7)
    # That is no slice of this process.
    assert state["exp_avg"].view(-1)[256:512].unique().item() == 3.0


def test_scales_are_those_of_the_blocks():
    weight = torch.zeros(600)
    assert part_of(torch.arange(3.0), weight, range(256, 512)).tolist() == [1]
    assert part_of(torch.arange(3.0), weight, range(512, 600)).tolist() == [2]
    assert part_of(torch.arange(600.0), weight, range(598, 600)).tolist() == [598, 599]


def test_bytes_are_those_of_the_slices_with_copies_of_their_weights():
    weight = nn.Parameter(torch.zeros(600, dtype=torch.bfloat16))
    # Two moments in float32, 16 bits of the master and the weight, and a count for each slice.
    assert bytes_of_slices(weight, SLICES, StateFormat()) == 344 * (4 + 4 + 2 + 2) + 2 * 4
    assert bytes_of_slices(weight, [], StateFormat()) == 0

"""Processes that share parameters update their slices of them, and their states are whole for each."""

import copy

import pytest
import torch
from torch import Tensor, nn

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import StateFormat
from offload.optimizer.states import States, part_of
from offload.sharing.sharers import NO_SHARERS, meet
from tests.offload.helpers.sharers import ThreadSharers, as_sharers


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((30, 20), (7,))]


def optimizer_of(given: list[nn.Parameter], **format: str) -> HostAdamW:
    return HostAdamW(given, lr=0.1, threads=1, **format)


def step(given: list[nn.Parameter], optimizer: HostAdamW, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in given:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step(scale=0.5)


def states(given: list[nn.Parameter], optimizer: HostAdamW) -> list[dict[str, Tensor]]:
    return [{name: value.clone() for name, value in optimizer.state[p].items()} for p in given]


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(one, other, strict=True)
    )


# Of the second parameter the second process has nothing. Slices begin where a kernel's vectors do.
SLICES = ([[range(128), range(384, 512)], [range(7)]], [[range(128, 384), range(512, 600)], []])
IN_BLOCKS = ([[range(256), range(512, 600)], [range(7)]], [[range(256, 512)], []])


FORMATS = [{"master": "compact"}, {"master": "stochastic", "state_dtype": "bf16"}, {"state_dtype": "int8"}]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float32, {}), (torch.float16, {}), *((torch.bfloat16, format) for format in FORMATS)],
    ids=str,
)
def test_updates_of_slices_are_that_of_the_whole(dtype: torch.dtype, format: dict[str, str], on_device: bool):
    slices = IN_BLOCKS if format.get("state_dtype") == "int8" else SLICES
    expected = parameters(dtype)
    whole = optimizer_of(expected, **format)
    for number in range(3):
        step(expected, whole, number)
    saved = copy.deepcopy(whole.state_dict())
    step(expected, whole, 3)
    # Threads of one process: they write the parameters that they share, each its slices.
    shared = parameters(dtype)

    def work(sharers: ThreadSharers) -> tuple[list, list]:
        given = [nn.Parameter(p.detach()) for p in shared]
        optimizer = optimizer_of(given, **format)
        optimizer.states.share(dict(zip(given, slices[sharers.rank], strict=True)), sharers)
        if on_device:
            optimizer.states.place(given[:1], torch.device("cpu"))
        optimizer.allocate()
        for number in range(3):
            step(given, optimizer, number)
        # All that a checkpoint has of it: it is loaded into the states that are shared.
        meet(sharers, "test")
        optimizer.load_state_dict(copy.deepcopy(saved))
        for parameter, state in zip(given, optimizer.state.values(), strict=True):
            assert state["step"] == 3
            assert state.keys() == whole.format.tensors(dtype, parameter.shape).keys()
            assert state[optimizer.format.moment_names[0]].shape == parameter.shape
        step(given, optimizer, 3)
        optimizer.finish()
        optimizer.states.bring_home()
        meet(sharers, "test")
        return states(given, optimizer)

    for found in as_sharers(2, work):
        assert same(found, states(expected, whole))
    assert all(torch.equal(one, other) for one, other in zip(shared, expected, strict=True))


def test_a_state_that_is_loaded_replaces_that_of_slices_on_a_device():
    expected = parameters(torch.bfloat16)
    whole = optimizer_of(expected)
    step(expected, whole, 0)
    saved, values = copy.deepcopy(whole.state_dict()), [p.detach().clone() for p in expected]
    step(expected, whole, 1)

    def work(sharers: ThreadSharers) -> tuple[list, list]:
        given = parameters(torch.bfloat16)
        optimizer = optimizer_of(given)
        optimizer.states.share({p: [range(p.numel())] for p in given}, sharers)
        optimizer.states.place(given, torch.device("cpu"))
        optimizer.allocate()
        for number in (5, 6):
            step(given, optimizer, number)
        for parameter, value in zip(given, values, strict=True):
            parameter.detach().copy_(value)
        optimizer.load_state_dict(saved)
        step(given, optimizer, 1)
        optimizer.finish()
        optimizer.states.bring_home()
        found = states(given, optimizer)
        # Without states nothing is brought home.
        optimizer.load_state_dict(saved | {"state": {}})
        assert not optimizer.state_dict()["state"]
        return found, given

    ((found, given),) = as_sharers(1, work)
    assert same(found, states(expected, whole))
    assert all(map(torch.equal, given, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_written_between_updates_on_the_device_counts(dtype: torch.dtype):
    expected = parameters(dtype)
    whole = optimizer_of(expected)

    def train(given: list[nn.Parameter], optimizer: HostAdamW) -> None:
        for number in range(3):
            step(given, optimizer, number)
            with torch.no_grad():
                given[0].mul_(0.5)

    def work(sharers: ThreadSharers) -> list[nn.Parameter]:
        given = parameters(dtype)
        optimizer = optimizer_of(given)
        optimizer.states.share({p: [range(p.numel())] for p in given}, sharers)
        optimizer.states.place(given, torch.device("cpu"))
        optimizer.allocate()
        train(given, optimizer)
        # Until they are brought home, the states there are as they were.
        assert not optimizer.state[given[0]]["exp_avg"].any()
        return given

    train(expected, whole)
    (found,) = as_sharers(1, work)
    assert all(map(torch.equal, found, expected))


def test_states_before_their_memory_are_refused():
    given = parameters(torch.float32)
    optimizer = optimizer_of(given)
    optimizer.states.share(dict(zip(given, SLICES[0], strict=True)), None)
    with pytest.raises(RuntimeError, match=r"^the states that processes share have no memory yet: call"):
        step(given, optimizer, 0)


def test_states_that_exist_are_not_shared():
    given = parameters(torch.float32)
    optimizer = optimizer_of(given)
    step(given, optimizer, 0)
    with pytest.raises(RuntimeError, match=r"^states that exist cannot be shared"):
        optimizer.states.share({}, None)


def test_states_in_8_bits_are_refused_where_a_slice_does_not_begin_with_a_block():
    given = parameters(torch.bfloat16)
    optimizer = optimizer_of(given, state_dtype="int8")
    with pytest.raises(ValueError, match=r"^states in 8 bits: a slice does not begin at a multiple of 256 numbers"):
        optimizer.states.share(dict(zip(given, SLICES[0], strict=True)), None)


PARTS = [range(256), range(512, 600)]


def test_scales_are_those_of_the_blocks():
    weight = torch.zeros(600)
    assert part_of(torch.arange(3.0), weight, range(256, 512)).tolist() == [1]
    assert part_of(torch.arange(3.0), weight, range(512, 600)).tolist() == [2]
    assert part_of(torch.arange(600.0), weight, range(598, 600)).tolist() == [598, 599]


def test_bytes_are_those_of_the_slices_with_copies_of_their_weights():
    weight, nothing = (nn.Parameter(torch.zeros(600, dtype=torch.bfloat16)) for _ in range(2))
    shared = States(StateFormat(), {})
    shared.share({weight: PARTS, nothing: []}, NO_SHARERS)
    # Two moments in float32, 16 bits of the master and the weight, and a count for each slice.
    assert shared.bytes_to_place([weight]) == 344 * (4 + 4 + 2 + 2) + 2 * 4
    assert shared.bytes_to_place([nothing]) == 0

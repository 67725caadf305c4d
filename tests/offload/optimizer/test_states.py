"""The states of parameters: bytes, devices, and masters that follow their weights."""

import mmap
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HUGE_PAGE_BYTES
from offload.optimizer import states
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.claims import WEIGHT
from offload.optimizer.formats import StateFormat, state_bytes
from offload.optimizer.states import States
from tests.offload.helpers.kernels import FORMATS
from tests.offload.helpers.optimizers import SETTINGS, parameters, same, train
from tests.offload.helpers.pages import pages_in_memory

pytestmark = pytest.mark.usefixtures("several_tiles")


def given(format: StateFormat) -> dict[str, str]:
    """The arguments of HostAdamW for a format."""
    return vars(format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_bytes_are_known_before_they_are_allocated(dtype: torch.dtype, format: StateFormat):
    weights = [*parameters(dtype), nn.Parameter(torch.ones(4, 6, dtype=dtype).t())]
    weights[0].requires_grad_(False)
    meta = [nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad) for weight in weights]
    planned = HostAdamW.planned_bytes(meta, format)
    host = HostAdamW(weights, **SETTINGS, threads=1, **given(format))
    assert not host.state
    host.allocate()
    assert sum(tensor.nbytes for state in host.state.values() for tensor in state.values()) == planned
    allocated = {id(tensor) for state in host.state.values() for tensor in state.values()}
    trained = weights[1:]
    train(host, trained, range(2))
    assert {id(tensor) for state in host.state.values() for tensor in state.values()} == allocated


def test_allocated_or_made_at_the_first_update_is_the_same():
    early, late = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = HostAdamW(early, **SETTINGS, threads=1)
    optimizer.allocate()
    train(optimizer, early, range(3))
    train(HostAdamW(late, **SETTINGS, threads=1), late, range(3))
    assert same(early, late)


@pytest.mark.parametrize("can_make", [True, False])
def test_large_states_are_zeros_whose_pages_are_there(can_make: bool, monkeypatch: pytest.MonkeyPatch):
    if not can_make:
        monkeypatch.setattr(states, "populate", lambda address, nbytes: False)
    weight = nn.Parameter(torch.ones(HUGE_PAGE_BYTES // 4 + 5, dtype=torch.bfloat16))
    optimizer = HostAdamW([weight], threads=1)
    optimizer.allocate()
    state = optimizer.state[weight]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "remainder"}
    for name in ("exp_avg", "exp_avg_sq"):
        start = state[name].data_ptr()
        pages = -(-(start % mmap.PAGESIZE + state[name].nbytes) // mmap.PAGESIZE)
        assert pages_in_memory(start - start % mmap.PAGESIZE, pages * mmap.PAGESIZE) == pages
        assert not state[name].any()


def test_a_host_without_room_is_refused_before_any_state_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(states, "free_host_bytes", lambda: 1000)
    optimizer = HostAdamW(parameters(), threads=1)
    with pytest.raises(MemoryError, match="GiB of host memory are needed for the optimizer's states"):
        optimizer.allocate()
    assert not optimizer.state


def write_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def write_data(weight: nn.Parameter) -> None:
    """Which raises no version counter."""
    weight.data.mul_(0.5)


@pytest.mark.parametrize("write", [lambda weight: None, write_in_place, write_data], ids=["", "in place", "data"])
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, "compact"), (torch.bfloat16, "compact"), (torch.bfloat16, "stochastic")]
)
def test_a_weight_in_any_layout_is_updated_as_a_contiguous_one(
    dtype: torch.dtype, master: str, write: Callable[[nn.Parameter], None]
):
    """Each element meets its own state, and counts as it is between steps, whoever wrote it."""
    base = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    crossed, straight = nn.Parameter(base.clone().t()), nn.Parameter(base.t().contiguous())
    for weight in (crossed, straight):
        optimizer = HostAdamW([weight], **SETTINGS, threads=1, master=master)
        for step in range(3):
            train(optimizer, [weight], [step])
            write(weight)
    assert torch.equal(crossed, straight)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_weight_that_is_written_between_steps_counts_but_for_one_with_a_float32_master(layout: str):
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        base = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        weight = nn.Parameter(base if layout == "contiguous" else base.t())
        train(optimizer := HostAdamW([weight], **SETTINGS | {"lr": 0.0}, threads=1), [weight], range(2))
        with torch.no_grad():
            weight.zero_()
        train(optimizer, [weight], range(2, 3))
        found[dtype] = weight.detach().clone()
    assert found[torch.bfloat16].abs().max() < 1e-40
    assert found[torch.float16].abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_placed_states_have_all_that_an_update_reads_and_the_bytes_that_were_counted(
    dtype: torch.dtype, format: StateFormat
):
    weights, copied = parameters(dtype), dtype != torch.float16
    states = States(format, defaultdict(dict))
    states.place(weights, torch.device("cpu"))
    for weight, state in zip(weights, states.begin(weights), strict=True):
        assert (WEIGHT in state) == copied
        if copied:
            assert torch.equal(state[WEIGHT], weight)
    made = [tensor for state in states.tensors.values() for tensor in state.values()]
    assert sum(tensor.nbytes for tensor in made) == states.bytes_to_place(weights)
    copies = sum(weight.nbytes for weight in weights) if copied else 0
    assert states.bytes_to_place(weights) == state_bytes(weights, format) + copies


def test_a_placed_state_moves_and_later_ones_are_made_there():
    states, meta = States(StateFormat(), defaultdict(dict)), torch.device("meta")
    first, second = parameters()[:2]
    (state,) = states.begin([first])
    states.place([first, second], meta)
    assert {tensor.device for tensor in state.values()} == {meta}
    assert states.is_placed(second)
    states.allocate([second])
    assert {tensor.device for tensor in states.tensors[second].values()} == {meta}
    states.adopt({second: {"exp_avg": second.detach()}})
    assert states.tensors == {second: states.tensors[second]}
    assert {tensor.device for tensor in states.tensors[second].values()} == {meta}

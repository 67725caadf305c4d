"""Sharers that share the homes of a model compute what one process does that adds their microbatches."""

import copy
import gc
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached, AttachOptions
from offload.optimizer import states
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import StateFormat
from offload.sharing.shared_memory import PagesAhead, SharedMemory
from offload.sharing.sharers import NO_SHARERS, Sharers, meet
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.mapped import with_low_rank
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.pages import open_files
from tests.offload.helpers.shared_training import (
    EARLY,
    MODES,
    STEPS,
    compared,
    loss_of,
    same_norm,
    stack,
    sum_rest,
    two_slots,
)
from tests.offload.helpers.sharers import ThreadSharers, as_sharers
from tests.offload.helpers.updates import WORKER


@pytest.fixture(autouse=True)
def one_core() -> None:
    """As in the threads of sharers: sums over several cores are others."""
    torch.set_num_threads(1)


CASES = [
    *((name, 2, torch.float32) for name in MODES),
    *((name, 3, torch.bfloat16) for name in ("everything", "one slot", "shard_offload")),
]


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(("name", "count", "dtype"), CASES, ids=str)
@pytest.mark.sampled
def test_sharers_compute_what_one_process_does(name: str, count: int, dtype: torch.dtype):
    one, several = compared(MODES[name], dtype, count)
    for sharer in several:
        # All was summed in the step; of what streams there are norms, which are those of the sums.
        assert len(sharer["sums"]) == (0 if name == "none" else len(one["weights"]))
        assert all(map(same_norm, sharer["norms"].values(), one["norms"].values()))


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("early", [False, True])
def test_sharers_of_two_hosts_compute_what_one_process_does(early: bool):
    """Each host has homes of its own; gradients are summed over all."""
    for sharer in compared(two_slots, torch.bfloat16, hosts=2, early=early, scale=1.0)[1]:
        assert sharer["begun"] == [False, early, early]
        assert sharer["sums"]


@pytest.mark.sampled
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("device_share", [0, 3000])
def test_sums_without_norms_are_made_in_slices(hosts: int, device_share: int, links: str):
    options = {"early": True, "scale": 1.0, "device_share": device_share, "takes_norms": False}
    for sharer in compared(two_slots, torch.bfloat16, hosts=hosts, **options)[1]:
        assert sharer["sums"]
        assert bool(sharer["asked"]) == (links == "collectives" or hosts > 1)


@pytest.mark.sampled
@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(("name", "count", "dtype", "device_share"), EARLY, ids=str)
def test_updates_inside_backward_are_those_after_it(name: str, count: int, dtype: torch.dtype, device_share: int):
    for sharer in compared(MODES[name], dtype, count, early=True, device_share=device_share, scale=1.0)[1]:
        # In the first step it is not known yet whether gradients are final.
        assert sharer["begun"] == [False, True, True]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["layer_stream", "one slot", "shard_offload"])
def test_nobody_copies_what_a_slow_sharer_still_updates(name: str, early: bool, monkeypatch: pytest.MonkeyPatch):
    apply, slow = HostAdamW.apply, []

    def late_apply(self: HostAdamW, claims: list, scale: float = 1.0) -> None:
        if self.states._shared is not None and threading.current_thread().name == WORKER:
            slow.append(self)
            time.sleep(0.02 * (self is slow[0]))
        apply(self, claims, scale)

    monkeypatch.setattr(HostAdamW, "apply", late_apply)
    compared(MODES[name], torch.bfloat16, early=early, scale=1.0)
    assert len(set(slow)) == 2


@pytest.mark.parametrize("early", [False, True])
def test_a_forward_after_backward_reads_what_others_have_updated(early: bool):
    """Units are then fetched again in the step in which their gradients are summed, or with the exchange that sums."""
    model = stack()

    def work(sharers: Sharers) -> list[torch.Tensor]:
        own, mode, found = copy.deepcopy(model), LayerStream(slots=2), []
        attached = mode.attach(own, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        optimizer = HostAdamW(own.parameters(), lr=0.05, threads=1)
        attached.overlap(optimizer, early)
        optimizer.allocate()
        for step in range(STEPS):
            with attached.step():
                attached.accumulate([partial(loss_of, own, step, sharers.rank)])
                with torch.no_grad():
                    found += [own.blocks[number](torch.ones(5, 16, dtype=torch.bfloat16)) for number in (0, 1, 2)]
            if sharers.count > 1:
                sum_rest(own, attached, sharers)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        meet(sharers, "test")
        attached.detach()
        return found

    first, second = as_sharers(2, work)
    assert all(map(torch.equal, first, second))


MODELS = {
    "recompute": lambda: Stack(depth=3, recompute="non-reentrant"),
    "reentrant": lambda: Stack(depth=3, recompute="reentrant"),
    "adapters of a frozen base": lambda: with_low_rank(Stack(depth=3)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_recompute_and_adapters_of_sharers_are_those_of_one_process(kind: str):
    torch.manual_seed(0)
    model = MODELS[kind]().to(torch.bfloat16)
    for sharer in compared(two_slots, model, early=True, device_share=4000, scale=1.0)[1]:
        assert sharer["sums"]


FORMATS = [{}, {"master": "stochastic", "state_dtype": "bf16"}, {"state_dtype": "int8"}]


@pytest.mark.parametrize("device_share", [0, 3000, 10**9])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_states_on_the_device_or_in_8_bits_are_those_of_one_process(format: dict[str, str], device_share: int):
    """The states of some units, of all, or of none are on the devices."""
    compared(two_slots, torch.bfloat16, device_share=device_share, **format)


def test_each_sharer_copies_its_part_in_a_step_and_whole_units_outside():
    def work(sharers: Sharers) -> tuple[int, int, int, int]:
        model, mode, gathered = Stack(width=64, depth=4), LayerStream(slots=2), []
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        if sharers.count > 1:
            links = attached._streamer.filler._links
            gather, links.gather = links.gather, lambda *given: (gathered.append(given), gather(*given))
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        in_step = attached.counters().h2d_bytes
        gathers = len(gathered)
        with attached.inference():
            model(stack_inputs(0, 0))
        outside = attached.counters().h2d_bytes - in_step
        attached.detach()
        return in_step, outside, gathers, len(gathered)

    whole, outside, _, _ = work(NO_SHARERS)
    sharers = as_sharers(2, work)
    # Slices are aligned, so they are not quite equal, and units a little larger.
    assert whole <= sum(in_step for in_step, *_ in sharers) < 1.2 * whole
    assert all(abs(in_step - whole / 2) < whole / 5 for in_step, *_ in sharers)
    assert all(outside <= found[1] < 1.2 * outside and found[2] == found[3] > 0 for found in sharers)


@pytest.mark.parametrize("taken", ["int8", "fp32", None])
def test_the_memory_of_states_is_made_when_the_model_is_attached(taken: str | None, monkeypatch: pytest.MonkeyPatch):
    made, shared = [], states.share_memory

    def noted(sharers: ThreadSharers, nbytes: int, ahead: PagesAhead | None = None) -> SharedMemory:
        made.append(ahead is not None and ahead.nbytes == nbytes)
        return shared(sharers, nbytes, ahead)

    monkeypatch.setattr(states, "share_memory", noted)

    def work(sharers: ThreadSharers) -> None:
        own = stack()
        options = AttachOptions(sharers=sharers, state_format=StateFormat(state_dtype="int8"))
        attached = two_slots().attach(own, CheckedStreams(torch.device("cpu")), options)
        try:
            if taken is not None:
                optimizer = HostAdamW(own.parameters(), threads=1, state_dtype=taken)
                attached.overlap(optimizer, early=True)
                optimizer.allocate()
                assert not any(value.any() for state in optimizer.state.values() for value in state.values())
            meet(sharers, "test")
        finally:
            attached.detach()

    before = open_files()
    as_sharers(2, work)
    assert made == ([] if taken is None else [taken == "int8"] * 2)
    gc.collect()
    assert not open_files() - before


def test_what_cannot_be_shared_is_refused_before_memory_is_made():
    def work(sharers: ThreadSharers) -> None:
        model = Stack(depth=2)
        weight = model.blocks[1].up.weight
        weight.data = weight.data.t().contiguous().t()
        with pytest.raises(ValueError, match=r"^blocks.1.up.weight has strides"):
            LayerStream().attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))

    as_sharers(2, work)


DIFFERENT = {
    "other weights": r"(0|1) has come to the fetch of blocks\.\d for its use, rank (0|1) to the fetch of blocks\.\d: ",
    "fewer forwards": r"(0|1) has come to .*the end of a step",
    "between hosts": r"[0-3] has come to the (use of blocks.2 in backward|end of a step), rank [0-3] to the ",
}


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("how", DIFFERENT)
def test_forwards_that_differ_are_an_error_that_names_ranks(how: str):
    def work(sharers: ThreadSharers) -> None:
        model, mode = Stack(depth=3), LayerStream(slots=1)
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        with attached.step(), torch.set_grad_enabled(how == "between hosts"):
            if how == "other weights":
                for block in list(model.blocks)[sharers.rank :]:
                    block(torch.ones(5, 16))
            elif how == "fewer forwards":
                for _ in range(1 + sharers.rank):
                    model(stack_inputs(0, 0))
            else:
                attached.accumulate([lambda: model(stack_inputs(0, 0)).sum()] * (1 if sharers.first else 2))

    with pytest.raises(RuntimeError, match=f"^rank {DIFFERENT[how]}"):
        as_sharers(2, work, hosts=1 + (how == "between hosts"))


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


def change_in_forward(layer: nn.Module, attached: Attached) -> None:
    with attached.step(), torch.no_grad():
        layer(torch.ones(2, 4))


def give_data(layer: nn.Module, attached: Attached) -> None:
    layer.weight.data = torch.ones(4, 4)
    with attached.step():
        pass


def make_states(layer: nn.Module, attached: Attached) -> None:
    optimizer = HostAdamW(layer.parameters(), threads=1)
    optimizer.allocate()
    attached.overlap(optimizer, early=False)


@pytest.mark.parametrize(
    ("layer", "misuse", "message"),
    [
        (Changing, change_in_forward, "layers.0.weight was changed in a forward, and several processes"),
        (partial(nn.Linear, 4, 4), give_data, "layers.0.weight was given other data, and several processes share"),
        (partial(nn.Linear, 4, 4), make_states, "states that exist cannot be shared"),
    ],
)
def test_what_sharers_cannot_do_is_refused(layer: Callable, misuse: Callable, message: str):
    def work(sharers: ThreadSharers) -> None:
        model, mode = model_of(layer()), LayerStream(layers="layers")
        attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
        try:
            misuse(model.layers[0], attached)
        finally:
            attached.detach()

    with pytest.raises(RuntimeError, match=f"^{message}"):
        as_sharers(2, work)

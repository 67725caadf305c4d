"""Sharers sum the gradients of what stays on the devices inside backward, where all of them have them."""

import copy
import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached, AttachOptions
from offload.optimizer.adamw import HostAdamW
from offload.sharing import device_sums, slices
from offload.sharing.device_sums import SUMS_AT_ONCE, DeviceSums
from offload.sharing.gather_filler import GatherFiller
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.shared_training import sum_rest
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

STEPS = 3


class Net(nn.Module):
    """Blocks that stream between layers that stay; the head has a branch for each sharer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.twice = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, hidden: Tensor, branch: int = 0, reentrant: bool = False) -> Tensor:
        hidden = self.stem(hidden)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        for _ in range(2):
            hidden = checkpoint(self.twice, hidden, use_reentrant=True) if reentrant else self.twice(hidden)
        return self.branches[branch](hidden)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def attach(model: nn.Module, sharers: ThreadSharers, **knobs) -> tuple[nn.Module, Attached]:
    """Returns a copy of the model, attached to a mode."""
    mine, mode = copy.deepcopy(model), LayerStream(layers="layers", slots=2, **knobs)
    return mine, mode.attach(mine, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))


def given(step: int, number: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + number))


def losses_of(model: nn.Module, step: int, number: int, count: int, **options) -> list[Callable[[], Tensor]]:
    """Returns the losses of a sharer's microbatches."""
    return [
        partial(lambda index: model(given(step, number * count + index), **options).square().mean(), index)
        for index in range(count)
    ]


def steps_of(
    sharers: ThreadSharers, model: nn.Module, options_of: Callable[[int, int], dict], microbatches: int = 1, **knobs
) -> list[tuple[dict[str, Tensor | None], set[str]]]:
    """Runs steps; returns for each the gradients, summed by the caller where needed, and the names of those that the
    mode has summed, of what stays on the device."""
    (model, attached), found = attach(model, sharers, **knobs), []
    stays = {name: p for name, p in model.named_parameters() if p not in attached.shared_parameters}
    for step in range(STEPS):
        with attached.step():
            attached.accumulate(
                losses_of(model, step, sharers.number, microbatches, **options_of(step, sharers.number))
            )
        summed = attached.summed_parameters()
        sum_rest(model, attached, sharers)
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in stays.items()}
        found.append((gradients, {name for name, p in stays.items() if p in summed}))
        model.zero_grad()
    sharers.laid_down(None)
    attached.detach()
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
    return found


def alone(
    model: nn.Module, step: int, options_of: Callable[[int, int], dict], microbatches: int = 1, count: int = 2
) -> dict[str, Tensor | None]:
    """Returns the gradients of one process with the microbatches of all, each sharer's added up first."""
    totals: dict[str, Tensor | None] = {}
    for number in range(count):
        mine = copy.deepcopy(model)
        for loss in losses_of(mine, step, number, microbatches, **options_of(step, number)):
            loss().backward()
        for name, parameter in mine.named_parameters():
            if parameter.grad is not None:
                totals[name] = parameter.grad if totals.get(name) is None else totals[name] + parameter.grad
    return totals


def check(model: nn.Module, options_of: Callable[[int, int], dict], microbatches: int = 1, **knobs) -> list[set[str]]:
    """Runs two sharers against one process; returns the names of what was summed inside each step."""
    everyone = as_sharers(2, lambda sharers: steps_of(sharers, model, options_of, microbatches, **knobs))
    for step in range(STEPS):
        expected = alone(model, step, options_of, microbatches)
        for found in everyone:
            gradients, _ = found[step]
            for name, gradient in gradients.items():
                assert (gradient is None) == (name not in expected), name
                assert gradient is None or torch.equal(gradient, expected[name]), name
    first, second = everyone
    assert [names for _, names in first] == [names for _, names in second]
    return [names for _, names in first]


ALL = {f"{layer}.{tensor}" for layer in ("stem", "twice", "branches.0") for tensor in ("weight", "bias")}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each weight and its bias."""
    monkeypatch.setattr(slices.gradient_buckets, "__defaults__", (1, 4 * 72))


@pytest.fixture(params=[SUMS_AT_ONCE, 1])
def sums_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of buckets that are complete before a sharer asks the others for sums alone."""
    monkeypatch.setattr(device_sums, "ASK_AFTER", request.param)


EVERY_WAY = pytest.mark.usefixtures("links", "sums_alone")


@EVERY_WAY
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_summed_inside_backward_from_the_second_step_on(microbatches):
    summed = check(net(), lambda step, number: {}, microbatches)
    assert summed == [set(), ALL, ALL]


@EVERY_WAY
def test_units_that_stay_resident_are_summed_inside_backward():
    summed = check(net(), lambda step, number: {}, resident=2)
    assert summed[1] > ALL
    assert len(summed[1]) == len(ALL) + 4


@pytest.mark.parametrize("frozen", [False, True])
def test_where_no_gradient_goes_home_sums_have_room_of_their_own(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, links: str
):
    """Because nothing streams, or what does is frozen, as under adapters."""
    asked = []
    ask = ThreadSharers.sum
    monkeypatch.setattr(ThreadSharers, "sum", lambda self, *arguments: (asked.append(self), ask(self, *arguments)))
    model = net()
    model.layers.requires_grad_(not frozen)
    summed = check(model, lambda step, number: {}, resident=0 if frozen else 4)
    assert len(summed[1]) == len(summed[2]) == len(ALL) + (0 if frozen else 8)
    # Else the sharers' collectives sum all of them.
    assert bool(asked) == (links == "collectives")


def test_sums_do_not_pile_up_where_few_units_stream(monkeypatch: pytest.MonkeyPatch):
    """One block of eight streams: its fetches are too few for the gradients of the others."""
    summed, at_end = [], []
    sum_bucket, end = DeviceSums._sum, GatherFiller.end_uses
    monkeypatch.setattr(DeviceSums, "_sum", lambda sums, bucket: (summed.append(sums), sum_bucket(sums, bucket)))
    monkeypatch.setattr(GatherFiller, "end_uses", lambda filler: (at_end.append(len(summed)), end(filler)))
    model = net()
    model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
    check(model, lambda step, number: {}, resident=7)
    # Of each of two sharers and two steps: seven blocks, and ALL.
    buckets_of_step = 2 * (7 + len(ALL) // 2)
    assert len(summed) == 2 * buckets_of_step
    # Either may come to its end first.
    for counted, before in zip(sorted(at_end)[2:], (0, 0, buckets_of_step, buckets_of_step), strict=True):
        assert counted - before >= buckets_of_step - 2 * SUMS_AT_ONCE


def ask_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the first sharer ask for sums alone at each gradient, and the second never; both are late now and then."""
    land, exchange = DeviceSums._land, ThreadSharers.exchange

    def uneven_land(sums: DeviceSums, *arguments) -> None:
        sums._complete_since_offer = 0 if sums._sharers.number else SUMS_AT_ONCE
        land(sums, *arguments)

    def late_exchange(sharers: ThreadSharers, *arguments, **options) -> list[list[int]]:
        if random.Random(sharers.exchanges).randrange(2) == sharers.number:
            time.sleep(0.001)
        sharers.exchanges += 1
        return exchange(sharers, *arguments, **options)

    monkeypatch.setattr(ThreadSharers, "exchanges", 0, raising=False)
    monkeypatch.setattr(ThreadSharers, "exchange", late_exchange)
    monkeypatch.setattr(DeviceSums, "_land", uneven_land)


@pytest.mark.parametrize("resident", [0, 2])
def test_sharers_may_ask_for_sums_alone_at_other_points(monkeypatch: pytest.MonkeyPatch, resident: int):
    """The exchanges that these meet are repeated."""
    ask_unevenly(monkeypatch)
    check(net(), lambda step, number: {}, resident=resident)


@pytest.mark.parametrize("device_share", [0, 10**9])
def test_updates_begin_behind_sums_alone(monkeypatch: pytest.MonkeyPatch, device_share: int):
    """A fetch that meets them is asked for anew: the update of its unit may have begun."""
    model = net()

    def work(sharers: ThreadSharers) -> list[Tensor]:
        mine, attached = attach(model, sharers)
        optimizer = HostAdamW(mine.parameters(), lr=0.1, threads=1)
        attached.overlap(optimizer, early=True, device_share=device_share)
        optimizer.allocate()
        for step in range(4):
            with attached.step():
                attached.accumulate(losses_of(mine, step, sharers.number, 1))
            sum_rest(mine, attached, sharers)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        sharers.laid_down(None)
        found = [parameter.detach().clone() for parameter in mine.parameters()]
        sharers.laid_down(None)
        attached.detach()
        return found

    expected, _ = as_sharers(2, work)
    ask_unevenly(monkeypatch)
    for found in as_sharers(2, work):
        assert all(map(torch.equal, found, expected))
        assert not torch.equal(found[0], model.stem.weight)


LEFT: dict[str, tuple[Callable[[int, int], dict], str]] = {
    "a sharer lacks it": (lambda step, number: {"branch": number}, "branches"),
    # One sharer has another branch than in the step before, and does not trust the first in the step after.
    "another branch once": (lambda step, number: {"branch": number if step == 1 else 0}, "branches"),
    "it lands in pieces": (lambda step, number: {"reentrant": True}, "twice"),
}


@EVERY_WAY
@pytest.mark.parametrize("why", LEFT)
def test_a_bucket_is_left_to_the_caller_where(why: str):
    options_of, layer = LEFT[why]
    assert check(net(), options_of)[1:] == [{name for name in ALL if not name.startswith(layer)}] * 2


def test_a_piece_that_comes_after_the_sum_is_an_error():
    """The step before had shown one piece; the second piece comes when an exchange has summed the first."""
    model = net()

    def work(sharers: ThreadSharers) -> None:
        mine, attached = attach(model, sharers)

        def loss(uses: int) -> Tensor:
            hidden = given(0, sharers.number)
            for _ in range(uses):
                # Between the uses are layers that stream.
                hidden = checkpoint(mine.twice, hidden.requires_grad_(), use_reentrant=True)
                for layer in mine.layers:
                    hidden = layer(hidden)
            return hidden.sum()

        for uses in (1, 2):
            with attached.step():
                attached.accumulate([partial(loss, uses)])
            mine.zero_grad()

    with pytest.raises(RuntimeError, match=r"^a gradient of shape \(8,\) on the device came after the last|\(8, 8\)"):
        as_sharers(2, work)


class Shift(nn.Module):
    """Adds a parameter of the shape of an activation, as PixArt's last shift with one sample has.

    Autograd then gives the parameter's gradient and that of the condition the same memory, and the condition's layer
    comes last in backward.
    """

    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.ParameterList([torch.randn(24), torch.randn(8)])

    def forward(self, hidden: Tensor) -> Tensor:
        condition = self.condition(hidden)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return (hidden + (condition + self.last[0].view(3, 8))) * self.last[1]


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("nbytes", [4 * 24, 4 * 32], ids=["alone in its bucket", "beside another"])
def test_a_gradient_in_memory_that_backward_still_reads_is_summed_elsewhere(monkeypatch, nbytes: int):
    monkeypatch.setattr(slices.gradient_buckets, "__defaults__", (1, nbytes))
    torch.manual_seed(0)
    summed = check(Shift(), lambda step, number: {})
    assert {"last.0", "last.1"} <= summed[1]


@pytest.mark.usefixtures("links")
def test_an_error_in_a_sum_is_the_one_that_the_step_raises(monkeypatch: pytest.MonkeyPatch):
    """As that of a sharer that is lost there: what waits for the sum at the end of the step must not hide it."""

    def lost(*arguments, **options) -> None:
        raise RuntimeError("rank 1 has ended")

    model = net()

    def work(sharers: ThreadSharers) -> None:
        mine, attached = attach(model, sharers)
        with attached.step():
            attached.accumulate(losses_of(mine, 0, sharers.number, 1))
        mine.zero_grad()
        sharers.laid_down(None)
        monkeypatch.setattr(slices.GradientBucket, "shares_memory", lost)
        with pytest.raises(RuntimeError, match=r"^rank 1 has ended"), attached.step():
            attached.accumulate(losses_of(mine, 1, sharers.number, 1))

    as_sharers(2, work)


def test_a_parameter_that_is_frozen_later_holds_up_nothing_else():
    model = net()

    def work(sharers: ThreadSharers) -> set[str]:
        mine, attached = attach(model, sharers)
        for step in range(3):
            mine.branches[0].weight.requires_grad_(step == 0)
            with attached.step():
                attached.accumulate(losses_of(mine, step, sharers.number, 1))
            summed = attached.summed_parameters()
            names = {name for name, p in mine.named_parameters() if p in summed and p not in attached.shared_parameters}
            mine.zero_grad()
        sharers.laid_down(None)
        attached.detach()
        return names

    first, second = as_sharers(2, work)
    assert first == second == ALL - {"branches.0.weight", "branches.0.bias"}

"""Sharers update slices before the norm is known, and undo them, with the numbers of one device's deferred updates."""

import functools
import math
import threading

import pytest
import torch
from torch import Tensor, nn

from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.speculation.trials import Attempt, Speculation, Trials
from offload.speculation.undo_log import undo_library
from tests.offload.helpers.kernels import needs_compiler
from tests.offload.helpers.models import Stack, assert_same, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers
from tests.offload.helpers.sharing_steps import PLENTY, Change, Sharer, sharing, unchanged
from tests.offload.helpers.updates import DTYPES, MODES, host_adamw, made

pytestmark = [pytest.mark.usefixtures("small"), needs_compiler]


STEPS = 8
# A unit of a block has slices for several sharers.
WIDE = functools.partial(Stack, width=32)


_made_once = functools.cache(lambda dtype: made(WIDE, DTYPES[dtype]))
_making = threading.Lock()


def model_of(dtype: str) -> nn.Module:
    """Made once: threads share the random numbers. Two that ask at once would each make one."""
    with _making:
        return _made_once(dtype)


def trained(sharer: Sharer, change: Change = unchanged, waits: bool = True) -> list[float]:
    """Trains for some steps; returns the norms."""
    norms = []
    for step in range(STEPS):
        sharer.backward(step, change, waits)
        norms.append(sharer.update(step))
    return norms


def alone(dtype: str, microbatches: int, clip_norm: float | None, change: Change = unchanged, **options):
    """Norms, states and weights of one device, whose updates wait for the norm."""

    def work(sharers: ThreadSharers) -> tuple[list[float], list[Tensor]]:
        options_of = {"clip_norm": clip_norm, "microbatches": microbatches} | options
        with sharing(sharers, model_of(dtype), Resident(), **options_of) as sharer:
            return trained(sharer, change), sharer.result()

    return as_sharers(1, work)[0]


@functools.cache
def some_clipped(dtype: str, microbatches: int) -> float:
    """A limit that clips about half of the steps."""
    norms = sorted(alone(dtype, microbatches, 1e9)[0][2:])
    return norms[len(norms) // 2] * 1.001


@functools.cache
def expected(dtype: str, microbatches: int, **options) -> list[Tensor]:
    return alone(dtype, microbatches, some_clipped(dtype, microbatches), **options)[1]


def together(count: int, dtype: str, clip_norm: float | None, make_mode=LayerStream, hosts: int = 1, **options):
    """Trains with sharers; returns the result of each, its counters and what was skipped."""
    change, waits = options.pop("change", unchanged), options.pop("waits", True)

    def work(sharers: ThreadSharers):
        with sharing(sharers, model_of(dtype), make_mode(), clip_norm=clip_norm, **options) as sharer:
            trained(sharer, change, waits)
            return sharer.result(), sharer.counters, sharer.skipped

    return as_sharers(count, work, hosts)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_equals_deferred_updates_of_one_device_where_clipping_comes_and_goes(mode: str, dtype: str):
    for found, counters, _ in together(2, dtype, some_clipped(dtype, 2), MODES[mode]):
        assert_same(found, expected(dtype, 2))
        assert 0 < counters.undone_parameters < counters.speculated_parameters


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("options", [{"speculate": "auto"}, {"device_share": 20000}], ids=str)
def test_pace_states_on_the_device_and_auto_change_no_number(options: dict, waits: bool):
    for found, *_ in together(2, "bf16", some_clipped("bf16", 2), waits=waits, **options):
        assert_same(found, expected("bf16", 2))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "hosts"), [(3, 1), (2, 2)])
def test_any_number_of_sharers_and_hosts_has_the_numbers_of_one_device(count: int, hosts: int):
    number = count * hosts
    for found, counters, _ in together(count, "bf16", some_clipped("bf16", number), hosts=hosts):
        assert_same(found, expected("bf16", number))
        assert 0 < counters.undone_parameters < counters.speculated_parameters


@pytest.mark.parametrize("make_mode", [functools.partial(ShardOffload, shards=2), LayerStream])
def test_several_microbatches_have_the_numbers_of_deferred_updates(make_mode):
    """Sums of sums round otherwise than on one device. Added up at home, gradients are summed after backward."""
    limit = some_clipped("bf16", 4)
    options = {"make_mode": make_mode, "microbatches": 2}
    ((theirs, *_), _) = together(2, "bf16", limit, **options, speculate="off")
    for found, counters, _ in together(2, "bf16", limit, **options):
        assert_same(found, theirs)
        assert bool(counters.undone_parameters) == (make_mode is not LayerStream)


class Spoilt(nn.Linear):
    """A layer of whose weight's gradient the element `spoils` is infinite."""

    spoils: int | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight if self.spoils is None else _Spoil.apply(self.weight, self.spoils)
        return nn.functional.linear(inputs, weight, self.bias)


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, place: int) -> Tensor:
        ctx.place = place
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        spoilt = gradient.clone()
        spoilt.view(-1)[ctx.place] = math.inf
        return spoilt, None


@pytest.mark.parametrize("bad", [0, 1])
def test_a_gradient_that_is_not_finite_on_one_sharer_is_undone_on_all(bad: int):
    """The other's own partial norm is that of sums, too. Without clipping, nothing else stops it."""

    def change(step: int, microbatch: int, loss: Tensor) -> Tensor:
        return loss * math.inf if step in (4, 5) and microbatch == bad else loss

    theirs = alone("bf16", 2, None, change)[1]
    for found, counters, skipped in together(2, "bf16", None, change=change):
        assert skipped == [4, 5]
        assert_same(found, theirs)
        assert 0 < counters.undone_parameters < counters.speculated_parameters


def test_an_element_that_only_one_sharer_updates_and_is_not_finite_is_undone_by_the_other():
    """The other sees finite sums alone, so it makes trials to the end, though its own gradient spoils the sum."""
    model = made(WIDE)
    model.blocks[3].down = Spoilt(64, 32)

    def work(sharers: ThreadSharers):
        with sharing(sharers, model) as sharer:
            weight = sharer.model.blocks[3].down.weight
            _, parts = sharers.laid_down(sharer.optimizer.states.parts(weight))
            for step in range(4):
                if step == 3:
                    before, earlier = sharer.result(), sharer.counters
                    if sharers.rank == 0:
                        sharer.model.blocks[3].down.spoils = parts[-1].stop - 1
                sharer.backward(step)
                sharer.update(step)
            found = sharer.result()
            assert_same(found, before)
            counters = sharer.counters
            made_now = counters.speculated_parameters - earlier.speculated_parameters
            return sharer.skipped, made_now, counters.undone_parameters - earlier.undone_parameters

    found = as_sharers(2, work)
    assert [skipped for skipped, *_ in found] == [[3], [3]]
    assert all(made_now == undone for _, made_now, undone in found)
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    assert found[0][1] == blocks
    assert found[1][1] < blocks


def test_a_sharer_without_room_for_logs_leaves_the_others_theirs():
    limit = some_clipped("bf16", 2)

    def work(sharers: ThreadSharers):
        undo_bytes = PLENTY if sharers.rank else 5000
        with sharing(sharers, model_of("bf16"), clip_norm=limit, undo_bytes=undo_bytes) as sharer:
            trained(sharer)
            return sharer.result(), sharer.counters.speculated_parameters

    (first, few), (second, many) = as_sharers(2, work)
    assert 0 < few < many
    assert_same(first, expected("bf16", 2))
    assert_same(second, expected("bf16", 2))


def test_a_sharer_that_looks_before_the_step_takes_back_its_own():
    limit = some_clipped("bf16", 2)

    def work(sharers: ThreadSharers) -> list[Tensor]:
        with sharing(sharers, model_of("bf16"), clip_norm=limit) as sharer:
            for step in range(STEPS):
                sharer.backward(step)
                if step % 2 == sharers.rank:
                    sharer.optimizer.finish()
                sharer.update(step)
            return sharer.result()

    for found in as_sharers(2, work):
        assert_same(found, expected("bf16", 2))


def test_a_second_forward_in_the_step_reads_the_weights_before_it():
    """One sharer has made trials, and takes them back; the other has made none. They fetch the same units all the same.

    A forward between steps copies whole units, when the updates of all are done.
    """
    seen = []

    def work(sharers: ThreadSharers) -> list[Tensor]:
        with sharing(sharers, model_of("fp32"), undo_bytes=PLENTY if sharers.rank else 0) as sharer:
            inputs, attached, model = stack_inputs(9, 9), sharer.attached, sharer.model
            for step in range(4):
                sharer.optimizer.finish()
                sharers.laid_down(None)
                with torch.no_grad(), attached.inference():
                    before = model(inputs)
                sharers.laid_down(None)
                with attached.step(norms=True):
                    attached.accumulate([lambda: model(inputs).square().mean()])
                    sharer.wait_for_worker()
                    if step == 3:
                        with torch.no_grad():
                            assert torch.equal(model(inputs), before)
                sharer.update(step)
            seen.append(sharer.counters.undone_parameters)
            return sharer.result()

    first, second = as_sharers(2, work)
    assert_same(first, second)
    assert sorted(map(bool, seen)) == [False, True]


class StepError(Exception):
    pass


def test_after_an_error_of_one_sharer_all_have_what_was_there_before_the_step():
    met = threading.Barrier(2, timeout=300)

    def work(sharers: ThreadSharers):
        with sharing(sharers, model_of("bf16")) as sharer:
            for step in range(3):
                sharer.backward(step)
                sharer.update(step)
            before = sharer.result()

            def fail(module, grad_input, grad_output) -> None:
                sharer.wait_for_worker()
                if sharers.rank:
                    raise StepError

            sharer.model.blocks[0].register_full_backward_hook(fail)
            try:
                sharer.backward(3)
            except StepError:
                sharers.break_off()
            except threading.BrokenBarrierError:
                pass
            met.wait()
            assert not sharer.optimizer.has_begun
            after = sharer.tensors()
            met.wait()
            assert_same(after, before)
            assert sharer.counters.undone_parameters
            sharers.mend(met)

    as_sharers(2, work)


def test_an_update_whose_second_slice_has_no_room_in_its_log_leaves_no_trace():
    weight = nn.Parameter(torch.randn(4096, generator=torch.Generator().manual_seed(0)))

    def work(sharers: ThreadSharers) -> None:
        optimizer = host_adamw(nn.ParameterList([weight]))
        optimizer.states.share({weight: [range(1024), range(2048, 3072), range(3072, 4096)]}, sharers)
        optimizer.allocate()
        speculation = Speculation(math.inf, PLENTY)
        trials = Trials(optimizer, undo_library(optimizer.format), speculation, sharers.count)
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        # No old number follows from the new one.
        optimizer.state[weight]["exp_avg"][2048:3072] = math.nan
        before = [weight.detach().clone(), *(tensor.clone() for tensor in optimizer.state[weight].values())]
        # As the logs of an earlier step leave it.
        trials._arena.take([1])
        trials._arena._memory.fill_(1)
        trials._arena.give_back()
        trials.begin_step()
        assert trials.make(Attempt(optimizer.claim([weight]))) == 0
        assert not trials.goes_on
        assert not trials.counters().speculated_parameters
        assert_same([weight.detach(), *optimizer.state[weight].values()], before)

    as_sharers(1, work)

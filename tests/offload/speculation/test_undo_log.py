"""An update with a log has the bits of the ordinary one, and undone it leaves those of before, whatever they were."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate, HyperParameters
from offload.speculation import undo_log
from offload.speculation.undo_log import (
    ALIGNED,
    BLOCK,
    ELEMENTS_FOR_ENTRY,
    TILE,
    UndoArena,
    UndoLog,
    can_be_undone,
    log_bytes,
)
from tests.offload.helpers.kernels import FORMATS as ALL
from tests.offload.helpers.kernels import SETTINGS, needs_compiler, operands, run
from tests.offload.helpers.undo import (
    FORMATS,
    assert_same_bits,
    bits_of,
    copy_of,
    kernels,
    of_bits,
    with_log,
    without_payloads,
)

pytestmark = needs_compiler

DTYPES = (torch.float32, torch.bfloat16)
EVERY = pytest.mark.parametrize("format", FORMATS, ids=str)
# Zeros, the smallest and the largest numbers of each kind, infinities and NaN, and neighbours of these, as float32.
CORNERS = [0, 1, 2, 0x7FFF, 0x8000, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
CORNERS += [bits | 0x80000000 for bits in CORNERS]
HYPERPARAMETERS = st.builds(
    HyperParameters,
    lr=st.sampled_from([0.0, 1e-5, 1e-3, 0.1, 3.0]),
    beta1=st.sampled_from([0.0, 0.3, 0.9, 0.99]),
    beta2=st.sampled_from([0.0, 0.5, 0.95, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1, 10.0]),
)


COUNTS = [1, 31, 64, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77]


@pytest.mark.parametrize("count", COUNTS)
def test_the_parts_of_a_log_fill_its_memory_and_do_not_overlap(count: int):
    memory = torch.zeros(UndoLog.nbytes(count), dtype=torch.uint8)
    log = UndoLog.over(memory, count)
    assert log.codes.shape == (3, count)
    assert log.progress.shape == (-(-count // BLOCK), 2)
    assert len(log.entries) >= min(count, TILE)
    for number, part in enumerate((log.codes, log.entries, log.progress), start=1):
        part.view(torch.uint8).fill_(number)
    assert all(row.data_ptr() % ALIGNED == memory.data_ptr() % ALIGNED for row in log.codes)
    found = [int((memory == number).sum()) for number in (1, 2, 3)]
    assert found == [3 * count, log.entries.numel() * 4, log.progress.numel() * 4]


def test_a_large_log_takes_three_bytes_and_a_third_for_each_element():
    assert UndoLog.nbytes(1 << 24) / (1 << 24) == pytest.approx(3 + 20 / ELEMENTS_FOR_ENTRY, rel=0.01)


def test_bytes_of_parameters_are_those_that_train():
    model = nn.Linear(300, 7)
    model.bias.requires_grad_(False)
    assert log_bytes(model.parameters()) == UndoLog.nbytes(2100)
    assert log_bytes(nn.Linear(300, 7, bias=False, device="meta").parameters()) == UndoLog.nbytes(2100)


@pytest.mark.parametrize("processes", [1, 3])
def test_an_arena_takes_at_most_half_of_its_share_of_what_the_host_has_free(
    processes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(undo_log, "free_host_bytes", lambda: 2 * processes * UndoLog.nbytes(100))
    arena = UndoArena(1 << 40, processes)
    assert arena.take([100]) is not None
    assert arena.take([1]) is None


def test_an_arena_has_its_bytes_again_when_all_logs_are_back():
    """Logs of several ranges are taken and given back together."""
    arena = UndoArena(UndoLog.nbytes(100) + UndoLog.nbytes(30) + UndoLog.nbytes(7))
    assert arena.take([100, 30, 7, 1]) is None
    for _ in range(3):
        logs = [*arena.take([100, 30]), *arena.take([7])]
        assert [log.codes.shape[1] for log in logs] == [100, 30, 7]
        assert len({log.codes.data_ptr() for log in logs}) == 3
        assert arena.take([1]) is None
        arena.give_back()
        assert arena.take([1]) is None
        arena.give_back()


def test_exact_masters_and_moments_of_16_bits_or_more_can_be_undone():
    found = [format for format in ALL if can_be_undone(format)]
    assert found == FORMATS


def any_bits(count: int, seed: int, corners: float) -> torch.Tensor:
    """Five numbers of 32 bits for each element, int64: this share of them corners, the others random bits."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 2**32, (count, 5), generator=generator)
    chosen = torch.tensor(CORNERS)[torch.randint(0, len(CORNERS), words.shape, generator=generator)]
    return torch.where(torch.rand(words.shape, generator=generator) < corners, chosen, words)


@EVERY
@pytest.mark.parametrize("weight", DTYPES)
@given(
    seed=st.integers(0, 2**32), corners=st.floats(0, 1), hyperparameters=HYPERPARAMETERS, count=st.integers(1, 10_000)
)
@settings(max_examples=25, deadline=None)
@pytest.mark.sampled
def test_any_bits_come_back(
    format: StateFormat, weight: torch.dtype, seed: int, corners: float, hyperparameters, count: int
):
    kernel, other = kernels(format)
    on = of_bits(any_bits(20, seed, corners), format, weight)
    ordinary, before, step = copy_of(on), copy_of(on), torch.tensor(float(count))
    outcome, log = with_log(other, on, step, hyperparameters)
    assert outcome.is_complete == (log.progress[:, 0].sum() == 20)
    if outcome.is_complete:
        kernel(ordinary, step, hyperparameters)
        # Which payload a NaN has depends on the order in which a processor gets the operands of a sum.
        assert_same_bits(without_payloads(on), without_payloads(ordinary))
    other.undo(on, step, hyperparameters, log)
    assert_same_bits(on, before)


@pytest.mark.sampled
@EVERY
@pytest.mark.parametrize(("weight", "gradient"), [(w, g) for w in DTYPES for g in DTYPES])
def test_steps_are_undone_one_by_one_on_any_number_of_elements(format: StateFormat, weight, gradient):
    """Over blocks, on two threads: the ordinary steps' bits, and with the logs of three steps those of the first."""
    kernel, other = kernels(format)
    count = 140_003
    on, ordinary = (run(kernel, operands(count, format, weight, gradient), steps=8) for _ in range(2))
    before, logs, gradients = copy_of(on), [], []
    for number in range(9, 12):
        step, generator = torch.tensor(float(number)), torch.Generator().manual_seed(number)
        for each in (on, ordinary):
            each.gradient.copy_(torch.randn(count, generator=generator.manual_seed(number)))
        gradients.append(on.gradient.clone())
        outcome, log = with_log(other, on, step)
        kernel(ordinary, step, SETTINGS)
        assert outcome.is_complete
        assert outcome.squares == pytest.approx(on.gradient.double().square().sum().item(), rel=1e-4)
        assert_same_bits(on, ordinary)
        logs.append((step, log))
    for (step, log), given_then in zip(reversed(logs), reversed(gradients), strict=True):
        other.undo(dataclasses.replace(on, gradient=given_then), step, SETTINGS, log)
    assert_same_bits(on, before)


@EVERY
def test_an_update_whose_log_is_full_stops_and_is_undone(format: StateFormat):
    """beta1 of 0 has no inverse, so every element would be an entry; in another, the second half is."""
    kernel, other = kernels(format)
    for hyperparameters, spoilt in ((SETTINGS._replace(beta1=0.0), 0), (SETTINGS, 100_000)):
        on = run(kernel, operands(200_000, format), steps=8)
        on.exp_avg[spoilt:] = float("nan")
        before, step = copy_of(on), torch.tensor(9.0)
        outcome, log = with_log(other, on, step, hyperparameters)
        assert not outcome.is_complete
        assert math.isfinite(outcome.squares)
        other.undo(on, step, hyperparameters, log)
        assert_same_bits(on, before)


@EVERY
def test_what_somebody_else_has_written_comes_back(format: StateFormat):
    """A weight that was set to zero beside its remainder, a weight that is not its master's, a NaN with a payload."""
    kernel, other = kernels(format)
    on = run(kernel, operands(3000, format), steps=3)
    on.weight[:20] = 0
    on.weight[20:30] = 5
    on.weight.view(torch.int16)[30] = 0x7FD1
    bits_of(on.exp_avg)[31] = 0x7FD12345 if format.state_dtype == "fp32" else 0x7FD1
    before = copy_of(on)
    outcome, log = with_log(other, on, torch.tensor(4.0))
    assert outcome.is_complete
    other.undo(on, torch.tensor(4.0), SETTINGS, log)
    assert_same_bits(on, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_squares_of_what_is_not_finite_are_not_finite(bad: float):
    kernel, other = kernels(FORMATS[0])
    on = run(kernel, operands(300, FORMATS[0]), steps=3)
    on.gradient[7] = bad
    outcome, _ = with_log(other, on, torch.tensor(4.0))
    assert not outcome.squares < (1e60 if bad == 3e38 else math.inf)


def test_few_elements_of_ordinary_training_are_entries():
    """After the first steps; docs/exact_clipping.md has their share in a real run."""
    kernel, other = kernels(StateFormat())
    on = run(kernel, operands(100_000, StateFormat()), steps=10, hyperparameters=SETTINGS._replace(lr=1e-3))
    _, log = with_log(other, on, torch.tensor(11.0))
    assert log.progress[:, 1].sum() < 500


def test_a_log_may_begin_between_cache_lines():
    _, other = kernels(StateFormat())
    on = run(FusedUpdate(1), operands(3000, StateFormat()), steps=8)
    before, step, nbytes = copy_of(on), torch.tensor(9.0), UndoLog.nbytes(3000)
    log = UndoLog.over(torch.zeros(nbytes + 4, dtype=torch.uint8)[4:], 3000)
    assert other.update(on, step, SETTINGS, log).is_complete
    other.undo(on, step, SETTINGS, log)
    assert_same_bits(on, before)

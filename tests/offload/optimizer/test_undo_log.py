"""Logs lie in their arena as their bytes say, one beside the other, and the arena is bounded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.optimizer import undo_log
from offload.optimizer.formats import MASTER_DTYPES, ROUNDINGS, STATE_DTYPES, StateFormat
from offload.optimizer.undo_log import (
    ALIGNED,
    BLOCK,
    ELEMENTS_FOR_ENTRY,
    TILE,
    UndoArena,
    UndoLog,
    can_be_undone,
    log_bytes,
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


@pytest.mark.parametrize("count", COUNTS)
def test_pieces_of_whole_blocks_have_the_parts_of_the_log(count: int):
    memory = torch.zeros(UndoLog.nbytes(count), dtype=torch.uint8)
    log = UndoLog.over(memory, count)
    for piece in log.split(2 * BLOCK):
        for part in (piece.codes, piece.entries, piece.progress):
            part += 1
    for part in (log.codes, log.entries, log.progress):
        assert (part == 1).all()


def test_bytes_of_parameters_are_those_that_train():
    model = nn.Linear(300, 7)
    model.bias.requires_grad_(False)
    assert log_bytes(model.parameters()) == UndoLog.nbytes(2100)
    assert log_bytes(nn.Linear(300, 7, bias=False, device="meta").parameters()) == UndoLog.nbytes(2100)


def test_an_arena_gives_its_bytes_and_has_them_again_when_all_logs_are_back():
    arena = UndoArena(2 * UndoLog.nbytes(100))
    for _ in range(3):
        first, second = arena.take([100])[0], arena.take([100])[0]
        assert first.codes.data_ptr() != second.codes.data_ptr()
        assert arena.take([1]) is None
        arena.give_back()
        assert arena.take([1]) is None
        arena.give_back()


def test_an_arena_takes_at_most_half_of_what_the_host_has_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(undo_log, "free_host_bytes", lambda: 2 * UndoLog.nbytes(100))
    arena = UndoArena(1 << 40)
    assert arena.take([100]) is not None
    assert arena.take([1]) is None


def test_processes_of_one_host_divide_what_it_has_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(undo_log, "free_host_bytes", lambda: 6 * UndoLog.nbytes(100))
    arena = UndoArena(1 << 40, processes=3)
    assert arena.take([100]) is not None
    assert arena.take([1]) is None


def test_logs_of_several_ranges_are_taken_and_given_back_together():
    arena = UndoArena(UndoLog.nbytes(100) + UndoLog.nbytes(30))
    assert arena.take([100, 31, 30]) is None
    for _ in range(2):
        logs = arena.take([100, 30])
        assert [log.codes.shape[1] for log in logs] == [100, 30]
        assert logs[0].codes.data_ptr() != logs[1].codes.data_ptr()
        assert arena.take([1]) is None
        arena.give_back()


def test_an_arena_without_bytes_has_no_logs():
    assert UndoArena(0).take([1]) is None


def test_exact_masters_and_moments_that_are_rounded_to_nearest_can_be_undone():
    found = {
        (master, moments, rounding)
        for master in MASTER_DTYPES for moments in STATE_DTYPES for rounding in ROUNDINGS
        if can_be_undone(StateFormat(master, moments, rounding))
    }  # fmt: skip
    exact = {(master, moments, "nearest") for master in ("compact", "fp32") for moments in ("fp32", "bf16")}
    # Rounding of float32 moments has no effect.
    assert found == exact | {(master, "fp32", "stochastic") for master in ("compact", "fp32")}

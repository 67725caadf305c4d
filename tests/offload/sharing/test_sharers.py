"""Processes that share nothing, and a meeting of those that do."""

from __future__ import annotations

import time

import torch

from offload.sharing.sharers import NO_SHARERS, meet
from tests.offload.helpers.sharers import ThreadSharers, as_sharers


def test_without_sharers_nobody_is_waited_for():
    whole = torch.arange(4, dtype=torch.uint8)
    NO_SHARERS.gather(whole, "test")
    assert whole.tolist() == [0, 1, 2, 3]
    assert NO_SHARERS.exchange((1, 2), "test") == [[1, 2]]
    meet(NO_SHARERS, "test")


def test_a_meeting_ends_when_all_are_there():
    arrived = []

    def work(sharers: ThreadSharers) -> int:
        time.sleep(0.05 * sharers.rank)
        arrived.append(sharers.rank)
        meet(sharers, "test")
        return len(arrived)

    assert as_sharers(3, work) == [3, 3, 3]

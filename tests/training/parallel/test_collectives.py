"""The collective whose name torch has changed, and the end of collectives that a lost rank will never join."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.parallel.conftest import forked
from training.parallel.collectives import end_collectives, first_sentence, gather_into


def gathered(rank: int, folder: Path, count: int) -> None:
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    whole = torch.zeros(6, dtype=torch.uint8)
    own = whole[3 * rank : 3 * rank + 3].fill_(rank + 1)
    with warnings.catch_warnings(action="error"):
        gather_into(whole, own, dist.group.WORLD)
    later = torch.zeros(2, dtype=torch.int64)
    gather_into(later, torch.tensor([rank + 5]), dist.group.WORLD, later=True).wait()
    torch.save((whole, later), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_slices_of_all_ranks_are_gathered_in_place(tmp_path: Path):
    for whole, later in forked(gathered, tmp_path, 2):
        assert whole.tolist() == [1, 1, 1, 2, 2, 2]
        assert later.tolist() == [5, 6]


def test_all_groups_are_ended_also_where_one_has_ended_by_itself():
    ended = []

    class Queued:
        def __init__(self, name: str):
            self.name = name

        def abort(self) -> None:
            ended.append(self.name)
            if self.name == "first":
                raise RuntimeError("NCCL communicator was aborted")

    end_collectives([Queued("first"), Queued("second")])
    assert ended == ["first", "second"]


def test_of_an_error_the_first_sentence_is_told_without_its_place():
    text = "[/src/gloo/pair.cc:538] Connection closed by peer [::1]:123. It is no fault of\n this process. See there."
    assert first_sentence(text) == "Connection closed by peer [::1]:123"

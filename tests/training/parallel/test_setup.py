"""What all ranks know before they are connected is what rank 0 knows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.parallel.conftest import forked
from training.parallel.setup import Setup


def sharing(rank: int, folder: Path, count: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), count), rank=rank, world_size=count)
    setup = Setup(devices=count, timeout_s=7, numa="off") if rank == 0 else Setup()
    torch.save(asdict(setup.shared()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_every_rank_gets_that_of_rank_0(tmp_path: Path):
    first, second = forked(sharing, tmp_path, 2)
    assert first == second == asdict(Setup(devices=2, timeout_s=7, numa="off"))

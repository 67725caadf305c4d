"""A process group of one, and the environment as it was."""

import os

import torch
import torch.distributed as dist

from peers.process_group import ENVIRONMENT, join_alone, leave


def test_the_process_is_alone_in_its_group_and_leaves_no_trace(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    join_alone(torch.device("cpu"))
    join_alone(torch.device("cpu"))
    assert (dist.get_world_size(), dist.get_rank(), os.environ["LOCAL_RANK"]) == (1, 0, "0")
    leave()
    leave()
    assert not dist.is_initialized()
    assert not ENVIRONMENT.keys() & os.environ.keys()


def test_the_environment_of_a_launcher_stays(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT")
    join_alone(torch.device("cpu"))
    leave()
    assert ENVIRONMENT.keys() - os.environ.keys() == {"MASTER_PORT"}

"""The number of devices, from the configuration and from torchrun."""

from __future__ import annotations

import pytest

from tests.training.helpers.in_process import composed
from training.errors import UserError
from training.parallel.world import World, settle_devices


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that sets the variables of torchrun."""

    def torchrun(**variables: int) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return torchrun


def test_a_process_that_nobody_started_is_alone():
    assert World.of_environment() is None
    assert not World.is_follower()


def test_torchrun_tells_the_place(torchrun):
    torchrun(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    assert World.of_environment() == World(1, 2, 1, 2)
    assert World.is_follower()


def test_several_machines_are_refused(torchrun):
    torchrun(RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    with pytest.raises(UserError, match="--nnodes 1"):
        World.of_environment()


def test_devices_follow_from_torchrun():
    config, _ = composed()
    settle_devices(config, World(0, 2, 0, 2))
    assert config.devices == 2


@pytest.mark.parametrize("given", ["devices=3", "devices=1"])
def test_another_number_is_refused(given: str):
    config, invocation = composed(given)
    with pytest.raises(UserError, match=f"^{given}: torchrun started 2 processes"):
        settle_devices(config, World(0, 2, 0, 2), invocation.overridden)


def test_a_plan_under_torchrun_is_refused():
    config, _ = composed("plan=true")
    with pytest.raises(UserError, match="devices=2"):
        settle_devices(config, World(0, 2, 0, 2))

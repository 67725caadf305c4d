"""The number of devices, from the configuration and from torchrun."""

import pytest

from tests.training.helpers.in_process import composed
from training.errors import UserError
from training.parallel.world import World, ranks_of_host, refuse_other_launchers, refuse_sweep, settle_devices


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that sets the variables of torchrun."""

    def torchrun(**variables: int | str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return torchrun


def test_a_process_that_nobody_started_is_alone():
    assert World.of_environment() is None
    assert not World.is_follower()


@pytest.mark.parametrize("rank", ["0", "1", "x"])
def test_a_place_that_torchrun_did_not_give_is_refused(rank: str, torchrun):
    """Ranks of another launcher would wait for each other without an end."""
    torchrun(RANK=rank, WORLD_SIZE=2)
    with pytest.raises(UserError, match=f"^RANK={rank} WORLD_SIZE=2: .*torchrun.* unset them and give devices=N$"):
        refuse_other_launchers()
    torchrun(TORCHELASTIC_RUN_ID="none")
    refuse_other_launchers()


def test_a_process_that_others_call_the_only_one_is_alone(torchrun):
    torchrun(RANK=0, WORLD_SIZE=1)
    refuse_other_launchers()
    assert World.of_environment() is None
    torchrun(TORCHELASTIC_RUN_ID="none")
    assert World.of_environment() == World(0, 1, 0, 1)


def test_a_sweep_of_several_processes_is_refused(torchrun):
    refuse_sweep()
    torchrun(RANK=0, WORLD_SIZE=1, TORCHELASTIC_RUN_ID="none")
    refuse_sweep()
    torchrun(WORLD_SIZE=2)
    with pytest.raises(UserError, match=r"^a sweep \(-m\) under torchrun, with 2 processes: .* give devices=2"):
        refuse_sweep()


def test_torchrun_tells_the_place_and_a_host_is_its_group(torchrun):
    torchrun(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    assert World.of_environment() == World(1, 2, 1, 2)
    assert World.is_follower()
    torchrun(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_RANK=1, GROUP_WORLD_SIZE=2)
    assert World.of_environment() == World(3, 4, 1, 2, host=1, hosts=2)


def test_devices_follow_from_torchrun():
    config, _ = composed()
    settle_devices(config, World(0, 2, 0, 2))
    assert (config.devices, config.parallel.hosts, ranks_of_host(config)) == (2, 1, 2)
    config, _ = composed()
    settle_devices(config, World(0, 5, 0, 3, host=0, hosts=2))
    assert (config.devices, config.parallel.hosts, ranks_of_host(config)) == (5, 2, 3)


def test_several_hosts_without_torchrun_can_only_be_planned_for():
    config, _ = composed("devices=4", "parallel.hosts=2")
    with pytest.raises(UserError, match=r"^parallel.hosts=2: .*slurm.sbatch"):
        settle_devices(config, None)
    settle_devices(composed("devices=4", "parallel.hosts=2", "plan=true")[0], None)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("devices=3", "devices=3: torchrun started 2 processes"),
        ("devices=1", "devices=1: torchrun started 2 processes"),
        ("parallel.hosts=3", "parallel.hosts=3: torchrun started 1"),
        ("plan=true", "plan=true: a plan computes nothing: give devices=2"),
    ],
)
def test_what_contradicts_torchrun_is_refused(given: str, refusal: str):
    config, invocation = composed(given)
    with pytest.raises(UserError, match=f"^{refusal}"):
        settle_devices(config, World(0, 2, 0, 2), invocation.overridden)

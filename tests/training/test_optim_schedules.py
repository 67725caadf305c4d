"""Learning-rate schedules: factors worked out by hand, both optimizers, and what is refused."""

import math

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from tests.training.helpers.in_process import composed
from training.config.validation import check
from training.errors import UserError
from training.optim import build_schedule, warn_of_rates

OPTIMIZERS = [
    pytest.param(["optimizer=adamw"], id="adamw"),
    pytest.param(["optimizer=host_adamw", "optimizer.threads=1"], id="host_adamw", marks=pytest.mark.slow),
]


def checked(*overrides: str) -> DictConfig:
    config, _ = composed(*overrides)
    check(config)
    return config


def rates(*overrides: str, beyond: int = 0) -> list[float]:
    """The learning rate of each step of a run, as shares of optimizer.lr."""
    config = checked("schedule.warmup=0", "optimizer.weight_decay=0", *overrides, "optimizer.lr=0.5")
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = instantiate(config.optimizer, params=[weight])
    schedule = build_schedule(config, optimizer)
    assert schedule.optimizer is optimizer
    found = []
    for _ in range(config.steps + beyond):
        found.append(optimizer.param_groups[0]["lr"] / 0.5)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        schedule.step()
    return found


HALF_ROOT = math.sqrt(0.5) / 2
EXPECTED = [
    (["schedule=constant", "steps=3"], [1, 1, 1]),
    (["schedule=constant", "steps=4", "schedule.warmup=3"], [1 / 4, 2 / 4, 3 / 4, 1]),
    (["schedule=linear", "steps=4"], [1, 3 / 4, 2 / 4, 1 / 4]),
    (["schedule=linear", "steps=5", "schedule.warmup=1", "schedule.final=0.2"], [1 / 2, 1, 0.8, 0.6, 0.4]),
    (["schedule=cosine", "steps=4", "schedule.final=0"], [1, 0.5 + HALF_ROOT, 0.5, 0.5 - HALF_ROOT]),
    (["schedule=cosine", "steps=4", "schedule.warmup=2", "schedule.final=0.5"], [1 / 3, 2 / 3, 1, 0.75]),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("overrides", "expected"), EXPECTED)
def test_factors_are_those_worked_out_by_hand(overrides: list[str], expected: list[float], optimizer: list[str]):
    assert rates(*overrides, *optimizer) == pytest.approx(expected, rel=1e-12)


def test_a_warm_up_that_never_ends_is_named_once(caplog: pytest.LogCaptureFixture):
    config = checked("steps=3", "schedule.warmup=3", "optimizer.lr=1", "optimizer.weight_decay=0")
    check(config)
    # Every rank makes a schedule.
    build_schedule(config, instantiate(config.optimizer, params=[nn.Parameter(torch.ones(2, 2))]))
    warn_of_rates(checked("steps=3", "schedule.warmup=2", "optimizer.lr=1"))
    assert not caplog.records
    warn_of_rates(config)
    (record,) = caplog.records
    assert record.getMessage().startswith("schedule.warmup=3 is not below steps=3: ")


def test_a_learning_rate_of_nothing_is_named(caplog: pytest.LogCaptureFixture):
    warn_of_rates(checked("optimizer.lr=0", "schedule.warmup=0"))
    warn_of_rates(checked("optimizer.lr=1", "schedule.warmup=100", "warmup_steps=100"))
    (record,) = caplog.records
    assert record.getMessage() == "optimizer.lr=0: nothing learns: take auto, or a number above 0"


def test_steps_that_are_left_out_of_times_are_no_warm_up_of_the_rate(caplog: pytest.LogCaptureFixture):
    warn_of_rates(checked("optimizer.lr=1", "schedule.warmup=10", "warmup_steps=100"))
    (record,) = caplog.records
    assert record.getMessage().startswith("warmup_steps=100: ")
    assert record.getMessage().endswith("rises over schedule.warmup=10")


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_after_the_last_step_the_rate_stays_at_its_final_share(name: str):
    found = rates(f"schedule={name}", "schedule.final=0.25", "steps=4", beyond=3)
    assert found[4:] == pytest.approx([0.25] * 3)


def test_groups_keep_their_proportions_and_what_does_not_decay_its_zero():
    given = ("optimizer.lr=2e-3", "optimizer.weight_decay=0.1")
    config = checked("optimizer=host_adamw", "schedule.warmup=1", "steps=2", *given)
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = instantiate(config.optimizer, params=[{"params": [matrix, vector]}, {"params": [], "lr": 1.0}])
    build_schedule(config, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [config.optimizer.weight_decay, 0.0, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == [config.optimizer.lr / 2, config.optimizer.lr / 2, 0.5]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.warmup=-1"], "schedule.warmup=-1: must be at least 0"),
        (["schedule=linear", "schedule.final=1.5"], "schedule.final=1.5: a share of the learning rate"),
        (["schedule=cosine", "schedule.final=-0.1"], "schedule.final=-0.1: must be at least 0"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_is_refused_in_one_line(overrides: list[str], message: str):
    with pytest.raises(UserError) as caught:
        checked(*overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_schedule_is_that_of_transformers_without_its_first_step(name: str, warmup: int):
    transformers = pytest.importorskip("transformers")
    final = [] if name == "constant" else ["schedule.final=0"]
    ours = rates(f"schedule={name}", "steps=8", f"schedule.warmup={warmup}", *final)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=1.0)
    theirs_name = "constant_with_warmup" if name == "constant" else name
    schedule, theirs = transformers.get_scheduler(theirs_name, optimizer, warmup + 1, 9), []
    for _ in range(9):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert theirs[0] == 0
    assert ours == pytest.approx(theirs[1:])

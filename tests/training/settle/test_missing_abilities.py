"""A configuration without what the mode of the run lacks, and the notes that say so."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from offload import Mode, Resident
from tests.training.helpers.in_process import composed
from training.errors import UserError
from training.settle.missing_abilities import KEYS, without_abilities


@dataclass(kw_only=True, eq=False)
class Foreign(Mode):
    foreign: ClassVar[bool] = True
    lacks: ClassVar[frozenset[str]] = frozenset(KEYS)
    notes: ClassVar[tuple[str, ...]] = ("it is foreign",)


ASKED = ("checkpoint.every=3", "eval.every=2", "sample.every=4", "clip_norm=0.5")


def test_a_mode_that_lacks_nothing_leaves_the_configuration_as_it_is():
    config, _ = composed(*ASKED)
    assert without_abilities(config, Resident()) == (config, ())


def test_all_that_was_asked_for_is_noted_and_left_out_of_a_copy():
    config, _ = composed(*ASKED)
    found, notes = without_abilities(config, Foreign())
    assert notes == (
        "it is foreign",
        "checkpoint.every=3 is not applied",
        "eval.every=2 is not applied",
        "sample.every=4 is not applied",
        "clip_norm=0.5 is not applied",
    )
    assert (found.checkpoint.every, found.eval.every, found.sample.every, found.clip_norm) == (None,) * 4
    assert found.checkpoint.on_signal is False
    assert (config.checkpoint.every, config.clip_norm) == (3, 0.5)


def test_what_an_update_of_its_own_does_not_read_is_noted():
    keys = ("optimizer=host_adamw", "optimizer.state_dtype=int8", "optimizer.master=stochastic", "on_nonfinite=skip")
    config, _ = composed(*keys, "clip_norm=null")

    class OwnUpdate(Foreign):
        owns_update = True

    assert without_abilities(config, OwnUpdate())[1] == (
        "it is foreign",
        "optimizer.master=stochastic is not applied",
        "optimizer.state_dtype=int8 is not applied",
        "on_nonfinite=skip is not applied",
    )
    # The run's own optimizer reads them.
    assert without_abilities(config, Foreign())[1] == ("it is foreign",)
    for optimizer in ("adamw", "host_adamw"):
        plain, _ = composed(f"optimizer={optimizer}", "clip_norm=null")
        assert without_abilities(plain, OwnUpdate())[1] == ("it is foreign",)


def test_what_nobody_asked_for_is_not_noted():
    config, _ = composed("clip_norm=null")
    assert without_abilities(config, Foreign())[1] == ("it is foreign",)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("devices=2",), "devices=2: Foreign is compared on one device"),
        (("resume=runs/a",), "resume=runs/a: Foreign cannot resume here"),
    ],
)
def test_what_would_be_another_run_is_refused(overrides: tuple[str, ...], problem: str):
    config, _ = composed(*overrides)
    with pytest.raises(UserError, match=problem):
        without_abilities(config, Foreign())

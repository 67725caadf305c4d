"""Keys that do nothing: a warning names the key that would turn them on."""

from __future__ import annotations

import pytest

from tests.training.config.test_validation import composed
from training.config.without_effect import TURNED_ON_BY, warn_of_keys_without_effect

# Keys that take names alone.
VALUES = {
    "parallel.homes": "shared",
    "parallel.numa": "off",
}


@pytest.mark.parametrize("key", TURNED_ON_BY)
def test_a_key_in_vain_is_named_with_its_switch(caplog, key: str):
    switch, _, value = TURNED_ON_BY[key]
    overrides = [f"{key}={VALUES.get(key, 1)}", "trace=false", "devices=1"]
    warn_of_keys_without_effect(composed(overrides), {key, "trace", "devices"})
    assert caplog.messages == [f"{key} has no effect without {switch}={value}"]


@pytest.mark.parametrize(
    "overrides",
    [["sample.every=5", "sample.prompt=a"], ["trace=true", "trace_step=3"], ["devices=2", "parallel.homes=shared"]],
)
def test_a_key_that_is_turned_on_has_no_warning(caplog, overrides: list[str]):
    warn_of_keys_without_effect(composed(overrides), {override.partition("=")[0] for override in overrides})
    assert caplog.messages == []


def test_a_key_that_the_command_line_does_not_give_has_no_warning(caplog):
    warn_of_keys_without_effect(composed(["sample.prompt=a", "trace_step=3"]), set())
    assert caplog.messages == []

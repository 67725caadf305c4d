"""Gradients are released where nothing but their updates needs them, and a run says why or why not."""

from __future__ import annotations

import pytest

from tests.training.helpers.in_process import components_of
from training.errors import UserError

EARLY = ("offload=layer_stream", "clip_norm=null", "microbatches=1")


@pytest.mark.parametrize("offload", ["layer_stream", "bounce_linear", "shard_offload", "layer_stream_swap"])
def test_auto_releases_what_only_updates_need(offload: str):
    components = components_of(*EARLY, f"offload={offload}")
    assert components.gradients.released
    assert components.mode.releases_gradients
    assert components.gradients.why == "updates begin inside backward, and nothing else needs them"


def test_microbatches_that_are_added_up_on_the_device_release_too():
    assert components_of(*EARLY, "offload=shard_offload", "microbatches=2").gradients.released


NEEDED = {
    "clip_norm=0.5": "clip_norm=0.5 needs them until their norm is known: to release them take clip_norm=null",
    "on_nonfinite=skip": "on_nonfinite=skip needs to know first that all are finite: take on_nonfinite=stop",
    "microbatches=2": "those of microbatches=2 are added up in host memory: take microbatches=1, or",
    "devices=2 parallel.homes=own": "devices=2 sum them after backward: take devices=1",
    "devices=2": "the sums of devices=2 go home, because a unit of which one device lacks a",
}


@pytest.mark.parametrize("override", NEEDED)
def test_what_needs_gradients_keeps_them_and_refuses_their_release(override: str):
    overrides = override.split()
    components = components_of(*EARLY, *overrides)
    assert not components.gradients.released
    assert not components.mode.releases_gradients
    assert components.gradients.why.startswith(NEEDED[override])
    with pytest.raises(
        UserError, match=r"^optimizer\.gradients=release: .*; or take optimizer\.gradients=keep$"
    ) as found:
        components_of(*EARLY, *overrides, "optimizer.gradients=release")
    assert NEEDED[override] in str(found.value)


def test_who_chooses_is_not_told_why():
    for asked in ("keep", "release"):
        choice = components_of(*EARLY, f"optimizer.gradients={asked}").gradients
        assert (choice.released, choice.why) == (asked == "release", None)


def test_without_gradients_on_the_host_there_is_no_choice():
    for overrides in (("offload=none",), ("offload=layer_stream", "adapter=lora"), ("optimizer=adamw",)):
        choice = components_of(*EARLY, *overrides).gradients
        assert (choice.released, choice.why) == (False, None)
    with pytest.raises(UserError, match="gradients=release: no weights stream"):
        components_of(*EARLY, "offload=none", "optimizer=host_adamw", "optimizer.gradients=release")


def test_a_value_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"optimizer\.gradients=drop: must be auto or keep or release"):
        components_of(*EARLY, "optimizer.gradients=drop")

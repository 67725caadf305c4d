"""The message about an unknown key names the key that was probably meant, and those that exist."""

from __future__ import annotations

from training.config.unknown_keys import unknown_key


def test_a_similar_key_is_proposed_with_its_path():
    line = unknown_key("offload.slotz", ["slots", "pin", "_target_"])
    assert line == (
        "offload.slotz: unknown key. Did you mean offload.slots? Keys that offload, as chosen, has: pin, slots"
    )


def test_without_a_similar_key_the_others_are_listed():
    assert unknown_key("xyz", ["steps", "hydra"]) == "xyz: unknown key. Keys that the top level has: steps"


def test_an_option_without_keys_says_so():
    assert unknown_key("offload.slots", []) == "offload.slots: unknown key. offload, as chosen, has no keys"

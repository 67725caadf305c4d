"""The message about an unknown key names the key that was probably meant, and those that exist."""

from __future__ import annotations

from omegaconf import OmegaConf

from training.config.unknown_keys import unknown_key


def test_a_similar_key_is_proposed_with_its_path():
    line = unknown_key("offload.slotz", ["slots", "pin", "_target_"])
    assert line == (
        "offload.slotz: unknown key. Did you mean offload.slots? Keys that offload, as chosen, has: pin, slots"
    )


def test_without_a_similar_key_the_others_are_listed():
    assert unknown_key("xyz", ["steps", "hydra"]) == "xyz: unknown key. Keys that the top level has: steps"


def test_an_option_without_keys_says_so():
    assert unknown_key("recompute.x", []) == "recompute.x: unknown key. recompute, as chosen, has no keys"


def test_keys_further_down_are_proposed():
    config = OmegaConf.create(
        {"steps_a": 1, "hydra": {"lr": 1}, "optimizer": {"lr": 1}, "a": {"b": {"lr": 2}}, "c": "???"}
    )
    assert "Did you mean optimizer.lr or a.b.lr? Keys" in unknown_key("lr", config)
    assert "Did you mean a.b.lr? Keys" in unknown_key("a.lr", config.a)


def test_the_options_that_have_the_key_are_named():
    line = unknown_key("offload.shards", ["slots"])
    assert line.startswith("offload.shards: unknown key. Options that have it: offload=shard_offload. Keys")
    weights = unknown_key("offload.weights.slots", [])
    assert "have it: offload@offload.weights=bounce_linear or layer_stream or shard_offload." in weights
    assert "have it: schedule=linear or cosine." in unknown_key("schedule.final", [])

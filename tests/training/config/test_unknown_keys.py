"""The message about an unknown key names the key that was probably meant, and those that exist."""

from dataclasses import fields, is_dataclass

from omegaconf import DictConfig, OmegaConf

from training.config.modes import is_group, options_of
from training.config.schema import SCHEMAS, TrainConfig
from training.config.unknown_keys import HERE, unknown_key


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
    null = OmegaConf.create({"a": DictConfig(None), "b": {"lr": 1}})
    assert "Did you mean b.lr? Keys" in unknown_key("lr", null)


def test_the_options_that_have_the_key_are_named():
    line = unknown_key("offload.shards", ["slots"])
    assert line.startswith("offload.shards: unknown key. Options that have it: offload=shard_offload. Keys")
    weights = unknown_key("offload.weights.slots", [])
    assert "have it: offload@offload.weights=bounce_linear or layer_stream or shard_offload." in weights
    assert "have it: schedule=linear or cosine." in unknown_key("schedule.final", [])


def test_names_of_other_programs_have_what_to_write():
    assert unknown_key("learning_rate", ["steps"]) == "learning_rate: unknown key: write optimizer.lr=RATE"
    assert unknown_key("gpus", ["steps"]) == "gpus: unknown key: write devices=N"
    for name in ("num_workers", "compile"):
        assert unknown_key(name, ["steps"]).startswith(f"{name}: unknown key: write nothing: ")
    assert unknown_key("adapter.r", []) == "adapter.r: unknown key: write adapter=lora adapter.rank=N"


def test_what_is_to_be_written_is_there_and_what_is_not_to_be_is_not():
    sections = [TrainConfig, *(entry.type for entry in fields(TrainConfig) if is_dataclass(entry.type))]
    schemas = [*sections, *(schema for options in SCHEMAS.values() for schema in options.values())]
    keys = {entry.name for schema in schemas for entry in fields(schema)}
    for name, here in HERE.items():
        group, _, option = name.partition("=")
        assert option not in options_of(group) if option else name not in keys
        for word in here.split(",")[0].split():
            if "=" in word and not word.startswith("hydra."):
                top, _, value = word.rstrip(",").partition("=")
                assert top.rpartition(".")[2] in keys
                assert not (value.islower() and is_group(top)) or value in options_of(top)

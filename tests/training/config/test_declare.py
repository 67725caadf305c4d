"""Keys that are declared by the arguments of a class."""

from dataclasses import MISSING, dataclass, field, fields

import pytest
from omegaconf import OmegaConf

from tests.training.helpers.in_process import components_of
from training.config.declare import AUTO, SETTLED, Built, number, schema_of
from training.planning.machine import machine_of
from training.planning.plan import plan_filled


class Plain:
    def __init__(self, params: list, size: int, rates: list[float] = [0.5], name: str | None = None):  # noqa: B006
        pass


@dataclass
class Knobs:
    slots: int = 3
    names: list[str] = field(default_factory=list)
    inner: object = field(kw_only=True)


def test_a_key_has_the_type_and_the_default_of_its_argument():
    schema = schema_of(Plain, frozenset({"params"}))
    assert issubclass(schema, Built)
    keys = {entry.name: entry for entry in fields(schema) if not entry.name.startswith("_")}
    assert list(keys) == ["size", "rates", "name"]
    assert (keys["size"].type, keys["size"].default) == (int, "???")
    assert (keys["name"].type, keys["name"].default) == (str | None, None)
    assert schema._target_ == f"{__name__}.Plain"
    one, other = schema(), schema()
    one.rates.append(1.0)
    assert other.rates == [0.5]


def test_fields_of_a_dataclass_are_keys():
    schema = schema_of(Knobs, frozenset({"inner"}))
    assert (schema().slots, schema().names) == (3, [])
    assert "inner" not in {entry.name for entry in fields(schema)}


def test_a_number_has_a_range_and_its_value_from_yaml():
    entry = number(at_least=1, at_most=2)
    assert entry.metadata == {"at_least": 1, "above": None, "at_most": 2}
    assert number(words=("max",)).metadata["words"] == ("max",)
    assert entry.default == "???"
    assert entry.default_factory is MISSING


@pytest.mark.parametrize("offload", ["layer_stream", "layer_stream_swap"])
def test_settled_keys_hold_the_choice(offload: str):
    components = components_of(f"offload={offload}", "hardware=h200")
    plan_filled(components, machine_of(components), has_gpu=True)
    # Null is a choice for the weights of the model, for bytes, and for blocks that are not tiled.
    others = [key for key in SETTLED if key not in ("model.weights", "dataset.tokenizer", "recompute.tile")]
    values = [OmegaConf.select(components.config, key) for key in others]
    # The mode has one of the two keys of resident units.
    assert values.count(None) == 1
    assert AUTO not in values


def test_weights_of_a_source_that_is_an_architecture_are_those_of_the_seed():
    components = components_of("model=hf", "model.source=gpt2", "dataset=synthetic")
    assert "model.weights" in components.settled.reasons
    assert components.config.model.weights is None

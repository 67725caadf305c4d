"""Keys that are declared by the arguments of a class."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields

from training.config.declare import Built, number, schema_of


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
    assert entry.default == "???"
    assert entry.default_factory is MISSING

"""Puts values of the user into a configuration of transformers: what is unknown, or has no effect, is refused."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

# Keys that `models.hf_source`, or the caller of the model, decides.
DECIDED = {
    "use_cache": "training keeps no key/value cache",
    "return_dict": "the model's output is read by name",
    "dtype": "the precision of the run decides the dtype",
    "torch_dtype": "the precision of the run decides the dtype",
    "model_type": "the source decides the architecture",
    "quantization_config": "quantised weights cannot be trained",
    "is_encoder_decoder": "the source decides the architecture",
    "is_decoder": "the task decides it",
}
# The names of keys that count something begin so.
COUNTS = ("n_", "num_")
# Ends of the names of keys.
PROBABILITIES, DEVIATIONS = ("dropout", "dropout_prob", "pdrop", "layerdrop"), ("initializer_range", "init_std")
# The angles of positions, and an older name of theirs, which transformers takes first where a file has it.
ROPE, OLD_ROPE = "rope_parameters", "rope_scaling"
# A key that the code of a model takes where the configuration has it.
OPTIONAL_KEY = re.compile(r'getattr\((?:self\.)?config, "(\w+)"')
# Names of a message.
NAMED = 3


class RefusedError(ValueError):
    """An override that is refused here, with a message that is complete."""


def merged_values(
    found: PreTrainedConfig, values: Mapping[str, Any], overrides: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Returns `values` with the overrides of one configuration; `found` is what the values alone describe.

    `path` is before the names of keys in messages. Raises RefusedError for an override that cannot be.
    """
    # An entry a layer, which the class derives for another number of them, whatever a file has.
    derived = {key for key in values if key.endswith("layer_types") and "num_hidden_layers" in overrides}
    derived |= _derived_lists(found, values) if overrides else set()
    merged = {key: value for key, value in values.items() if key not in derived}
    known = _known_keys(found)
    for given, value in overrides.items():
        if given in DECIDED:
            raise RefusedError(f"{path}{given}={value!r}: cannot be given, because {DECIDED[given]}")
        if given not in known:
            close = nearest(ROPE if given == OLD_ROPE else given, known)
            raise RefusedError(f"{path}{given}={value!r}: {found.model_type} has no such key{close}")
        # One name for each value, so that a file's hidden_size and an override's n_embd are not both there.
        key = found.attribute_map.get(given, given)
        for alias in (other for other, name in found.attribute_map.items() if name == key):
            merged.pop(alias, None)
        present = found.num_labels if key == "num_labels" else _value_of(found, key)
        if isinstance(present, PreTrainedConfig):
            _check_type(f"{path}{given}", value, dict)
            before = {"model_type": present.model_type, **(values.get(key) or {})}
            merged[key] = merged_values(present, before, value, f"{path}{given}.")
        elif isinstance(present, dict):
            _check_type(f"{path}{given}", value, dict)
            merged[key] = _merged_angles(present, value, f"{path}{given}") if key == ROPE else {**present, **value}
            if key == ROPE:
                merged.pop(OLD_ROPE, None)
        else:
            _check_type(f"{path}{given}", value, _type_of(present))
            # Some classes take -1 layers as none.
            if given.startswith(COUNTS) and isinstance(value, int) and value < 0:
                raise RefusedError(f"{path}{given}={value}: must be at least 0")
            _check_range(f"{path}{given}", value)
            merged[key] = value
        if key == "num_labels":
            # A file's names of classes come before the number of them.
            merged.pop("id2label", None)
            merged.pop("label2id", None)
        elif key == "id2label":
            merged["label2id"] = {name: int(number) for number, name in merged[key].items()}
    return merged


def check_taken(config: PreTrainedConfig, overrides: Mapping[str, Any], path: str = "") -> None:
    """Raises RefusedError for an override of which the class has made another value, `sliding_window` of Qwen3."""
    for given, value in overrides.items():
        made = _value_of(config, config.attribute_map.get(given, given))
        if isinstance(made, PreTrainedConfig):
            check_taken(made, value, f"{path}{given}.")
        elif isinstance(value, bool | int | float | str) and made != value:
            others = [key for key in sorted(_known_keys(config)) if given in key and key != given]
            with_which = f": it may follow from {', '.join(others[:NAMED])}" if others else ""
            raise RefusedError(f"{path}{given}={value!r}: {config.model_type} makes {made!r} of it{with_which}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the end of a message, with those of `names` that are near to `name`; empty if none is."""
    close = difflib.get_close_matches(name, sorted(names), n=NAMED, cutoff=0.5)
    return f"; near to it: {', '.join(close)}" if close else ""


def _derived_lists(found: PreTrainedConfig, values: Mapping[str, Any]) -> set[str]:
    """Returns the keys in `values` of entries a layer, in lists as a rule, that the class makes of other values."""
    wanted, left_out = found.to_dict(), set()
    for key in (key for key, value in values.items() if isinstance(value, list) or key == "per_layer_config"):
        rest = {name: value for name, value in values.items() if name not in {*left_out, key}}
        # Some classes cannot do without.
        with suppress(Exception):
            left_out |= {key} if type(found).from_dict(copy.deepcopy(rest)).to_dict() == wanted else set()
    return left_out


def _merged_angles(present: Mapping[str, Any], value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns `present` with the override `value`: for each type of layer, where each has its own."""
    if parts := [name for name, part in present.items() if isinstance(part, dict)]:
        if any(name not in parts or not isinstance(part, dict) for name, part in value.items()):
            raise RefusedError(
                f"{key}={value!r}: each type of layer has its own here: give {{{parts[-1]}: {{rope_type: ...}}}}, for"
                f" any of {', '.join(parts)}"
            )
        return {**present, **{name: _merged_angles(present[name], value[name], f"{key}.{name}") for name in value}}
    # The older name, of which transformers takes no notice beside the other.
    merged = {**present, **{"rope_type" if name == "type" else name: entry for name, entry in value.items()}}
    if merged.get("rope_type") == "default" and (unused := sorted({*merged} - {*present, "partial_rotary_factor"})):
        raise RefusedError(
            f"{key}={value!r}: {', '.join(unused)} has no effect on rope_type=default: give rope_type, such as yarn"
        )
    return merged


def _check_range(key: str, value: Any) -> None:
    """Raises RefusedError for a probability or a deviation out of range, which a forward alone would refuse."""
    name = key.rpartition(".")[2]
    if not isinstance(value, int | float):
        return
    if name.endswith(PROBABILITIES) and not 0 <= value <= 1:
        raise RefusedError(f"{key}={value}: must be between 0 and 1")
    if name.endswith(DEVIATIONS) and not value >= 0:
        raise RefusedError(f"{key}={value}: must be at least 0")


def _known_keys(config: PreTrainedConfig) -> set[str]:
    # Some models read keys that their configurations do not declare: Qwen3-MoE `head_dim`.
    files = sorted(Path(inspect.getfile(type(config))).parent.glob("modeling_*.py"))
    read = {key for file in files for key in OPTIONAL_KEY.findall(file.read_text(encoding="utf-8"))}
    keys = {*config.to_dict(), *config.attribute_map, *read, "num_labels"}
    # Cohere2-MoE declares the older name of its angles, and reads only the other.
    keys -= {"transformers_version", "architectures", OLD_ROPE}
    return {key for key in keys if not key.startswith("_")}


def _value_of(config: PreTrainedConfig, key: str) -> Any:
    try:
        return getattr(config, key, None)
    # Some layers have another value, as Gemma 4's do of head_dim; this is the others'.
    except RuntimeError:
        return config.to_dict().get(key)


def _type_of(present: Any) -> type | tuple[type, ...]:
    """Returns what may replace a value; everything may replace None, which transformers checks itself."""
    if isinstance(present, bool):
        return bool
    if isinstance(present, (int, float)):
        # An int where a float was is fine; the class refuses a float where it wants an int.
        return (int, float)
    if isinstance(present, (list, tuple)):
        # Some sizes are a number or one for each side.
        return (list, tuple, int, float)
    return object


def _check_type(key: str, value: Any, wanted: type | tuple[type, ...]) -> None:
    if value is None and wanted is not dict:
        return
    is_bool = isinstance(value, bool)
    if not isinstance(value, wanted) or (is_bool and wanted not in (bool, object)):
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        raise RefusedError(f"{key}={value!r}: must be {' or '.join(kind.__name__ for kind in kinds)}")

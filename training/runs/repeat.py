"""`repeat=DIR`: the command line of a run that has the configuration of an earlier run, but for what else is given.

The options that the run in DIR had chosen are chosen again, and each value that these do not give today becomes an
override. So the run is composed, typed and checked as any other, in a sweep too.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import CompactHydraException, HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from training.config.modes import FOLDER
from training.config.schema import SCHEMAS
from training.errors import UserError, first_line
from training.runs.bounded_files import MissingError, UnreadableError, parse_yaml, read_bytes
from training.runs.compose_errors import explain_refusal
from training.runs.files import CHOICES_FILE, CONFIG_FILE, home_expanded
from training.visible_text import shortened, visible

KEY = "repeat"
EXPERIMENT = "experiment"
# Far more than a configuration has. The parser of typed values is slow.
LARGEST_BYTES = 2**16
# Keys that belong to one run and not to its configuration.
NOT_REPEATED = ("resume",)
# Keys of which each replaces the other.
LENGTH = ("steps", "epochs")
# The names of options; a path would lead out of conf/.
OPTION = re.compile(r"[\w-]+")


def repeated(overrides: Sequence[str], more_options: str | None = None) -> list[str]:
    """Returns `overrides` with `repeat=DIR` replaced by the overrides that make the configuration of the run in DIR.

    The other overrides come last, so that they win over the run's values; one that chooses an option replaces all that
    the run had in this group. `more_options` is a directory of options beside conf/. Raises UserError, beginning with
    `repeat=DIR`, for a run that cannot be repeated.
    """
    given = [text for text in overrides if text.startswith(f"{KEY}=")]
    if not given:
        return list(overrides)
    others = [text for text in overrides if text not in given]
    run_dir = home_expanded(KEY, _directory(given))
    return overrides_of(run_dir, f"{KEY}={run_dir}", others, more_options)


def overrides_of(run_dir: Path, prefix: str, others: Sequence[str], more_options: str | None = None) -> list[str]:
    """Returns the overrides of a saved run, then `others`, which win. Raises UserError, beginning with `prefix`."""
    replaced = _replaced(prefix, others)
    choices, saved = _choices(prefix, run_dir), _saved(prefix, run_dir)
    config = _composed(prefix, choices, replaced, more_options)
    values = dict(_leaves(saved, config))
    if new := [
        key
        for key, _ in _leaves(_plain(config), config)
        if not (key in values or _is_own(key) or _under(key, replaced))
    ]:
        kept = ", ".join(f"{key}={_shown(OmegaConf.select(config, key))}" for key in new)
        print(f"note: {visible(prefix)}: keys that the run did not have: {visible(kept)}", file=sys.stderr)
    changes = _changes(prefix, run_dir, config, values, replaced)
    return [
        *(f"{group}={option}" for group, option in choices.items() if not _under(group, replaced)),
        *(f"{key}={_as_text(value)}" for key, value in changes.items() if not _under(key, replaced)),
        *others,
    ]


def _directory(given: Sequence[str]) -> str:
    if len(given) > 1:
        raise UserError(f"{' '.join(given)}: give the run to repeat once")
    override = _parsed(given[0])
    value = override.value() if not override.is_sweep_override() else None
    if not isinstance(value, str | int | float) or value == "":
        raise UserError(f"{given[0]}: must be the directory of one run")
    return str(value)


def _parsed(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    # Its lexer raises the general one, for a character that it does not know.
    except HydraException as error:
        raise UserError(explain_refusal(OverrideParseException(text, str(error)))) from error


def _replaced(prefix: str, others: Sequence[str]) -> set[str]:
    """Returns the paths that `others` replace as a whole: keys, and the packages of groups whose option they choose."""
    paths = set()
    for text in others:
        override = _parsed(text)
        if override.key_or_group == EXPERIMENT and override.value() is not None:
            raise UserError(f"{text}: {prefix} gives every value already: give single keys and options beside it")
        # A dictionary is merged into the run's, as always.
        if override.key_or_group in SCHEMAS or not isinstance(override.value(), dict):
            paths.add(override.package or override.key_or_group)
    # Only one of the two is given.
    return paths | set(LENGTH) if paths & set(LENGTH) else paths


def _under(key: str, paths: set[str]) -> bool:
    """Tells whether a key, or a group with its package as in `offload@offload.weights`, is one of `paths` or below."""
    path = key.rpartition("@")[2]
    return any(path == other or path.startswith(f"{other}.") for other in paths)


def _choices(prefix: str, run_dir: Path) -> dict[str, str]:
    """Reads the options that the run had chosen, without Hydra's own and the experiment, whose values it has."""
    choices = _read(prefix, run_dir, CHOICES_FILE, parse_yaml).get("choices")
    if not isinstance(choices, dict):
        raise UserError(f"{prefix}: {CHOICES_FILE} has no choices: it was not written by a run")
    options = {group: choices[group] for group in choices if group.partition("@")[0] in SCHEMAS}
    for group, option in options.items():
        if not isinstance(option, str) or not OPTION.fullmatch(option) or not re.fullmatch(r"[\w.@]+", group):
            raise UserError(f"{prefix}: {CHOICES_FILE} has {group}={option}, which is not the name of an option")
    return options


def _saved(prefix: str, run_dir: Path) -> dict[str, Any]:
    """Reads the run's configuration, with the types of its values."""

    def typed(text: str) -> dict[str, Any]:
        # Refuses what OmegaConf takes long for.
        parse_yaml(text)
        return OmegaConf.to_container(OmegaConf.create(text))

    return _read(prefix, run_dir, CONFIG_FILE, typed)


def _read(prefix: str, run_dir: Path, name: str, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    try:
        return parse(read_bytes(run_dir / name, LARGEST_BYTES).decode())
    except MissingError:
        job = run_dir / "0"
        jobs = f", such as {prefix.removesuffix(str(run_dir))}{job}" if (job / name).is_file() else ""
        raise UserError(f"{prefix}: no {name} there: give the directory of a run{jobs}") from None
    except (UnreadableError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{prefix}: {name} cannot be used: {first_line(error)}") from error


def _composed(prefix: str, choices: Mapping[str, str], replaced: set[str], more_options: str | None) -> DictConfig:
    """Composes today's configuration with the options of the run; one that is gone may be replaced."""
    overrides = [f"{group}={option}" for group, option in choices.items()]
    kept = [f"{group}={option}" for group, option in choices.items() if not _under(group, replaced)]
    path = [] if more_options is None else [f"hydra.searchpath=[{_as_text(str(Path(more_options).absolute()))}]"]
    try:
        with initialize_config_dir(str(FOLDER.parent), version_base="1.3"):
            try:
                return compose("config", overrides + path)
            except CompactHydraException:
                return compose("config", kept + path)
    except CompactHydraException as error:
        raise UserError(f"{prefix}: {explain_refusal(error)}") from error


def _changes(
    prefix: str, run_dir: Path, config: DictConfig, values: Mapping[str, Any], replaced: set[str]
) -> dict[str, Any]:
    """Sets the run's `values` in `config` where they differ, and returns these by key.

    Keys that refer to other keys are set last. Raises UserError, beginning with `prefix`, for a key that does not exist
    any more or is refused, unless it is among those `replaced` on the command line.
    """
    changes = {}
    for follows in (False, True):
        for key, value in values.items():
            if _is_own(key):
                continue
            try:
                if (
                    _has(config, key)
                    and _refers(config, key) == follows
                    and _plain(OmegaConf.select(config, key)) != value
                ):
                    OmegaConf.update(config, key, _each_text(value, _escaped), merge=False)
                    changes[key] = value
                problem = None if _has(config, key) else "a key that does not exist any more"
            except OmegaConfBaseException as error:
                problem = f"which is refused today ({first_line(error)})"
            if problem and not _under(key, replaced):
                raise UserError(
                    f"{prefix}: the run had {key}={_shown(value)}, {problem}: remove it from {run_dir / CONFIG_FILE} to"
                    " repeat the run without it"
                )
    return changes


def _has(config: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return OmegaConf.is_dict(node) and name in set(node)  # `in node` is False for a key without a value


def _refers(config: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    return OmegaConf.is_interpolation(OmegaConf.select(config, parent) if parent else config, name)


def _plain(value: Any) -> Any:
    if not OmegaConf.is_config(value):
        return str(value) if isinstance(value, str) else value
    return OmegaConf.to_container(value, enum_to_str=True)


def _leaves(values: Mapping[str, Any], config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields keys with their values. A dictionary of any keys, as `config` has it, is one value (model.overrides)."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if not isinstance(value, dict) or _is_free(config, key):
            yield key, value
        else:
            yield from _leaves(value, config, f"{key}.")


def _is_free(config: DictConfig, key: str) -> bool:
    """Tells whether `config` has a dictionary without a schema under `key`, or null in its place."""
    if not _has(config, key):
        return False
    node = OmegaConf.select(config, key)
    return node is None or OmegaConf.get_type(node) is dict


def _is_own(key: str) -> bool:
    """Tells whether `key` is of the run alone, or the class of an option, which is the one that it has today."""
    return key in NOT_REPEATED or key.rpartition(".")[2].startswith("_")


def _as_text(value: Any) -> str:
    """Returns `value` as the command line has it, with quotes around text."""
    quoted = _each_text(value, lambda text: QuotedString(_escaped(text), Quote.single))
    return Override._get_value_element_as_str(quoted)


def _escaped(text: str) -> str:
    """Returns text that refers to no key, whatever is in it."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _each_text(value: Any, function: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [_each_text(item, function) for item in value]
    if isinstance(value, dict):
        return {name: _each_text(item, function) for name, item in value.items()}
    return value


def _shown(value: Any) -> str:
    return shortened("null" if value is None else " ".join(str(value).split()), 80)

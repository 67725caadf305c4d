"""The command line before Hydra reads it: what is written as for other programs is refused, `repeat=` is replaced."""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from training.config.modes import is_group
from training.errors import UserError
from training.runs.compose_errors import SWITCHES, as_text, in_shell
from training.runs.files import CHOICES_FILE, CONFIG_FILE, home_expanded
from training.runs.invocation import quoted, refuse_unnamed
from training.runs.repeat import repeated

# The directory of a run or a sweep in a home directory, whose `~` Hydra takes in quotes alone.
IN_HOME = re.compile(r"(\+{0,2}hydra\.(?:run|sweep)\.dir)=(['\"]?)(~[\w.-]*)((?:/[^'\"]*)?)\2")


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments that Hydra is to get: the flags, then the overrides, with `repeat=` replaced.

    A leading `~` in the directory of a run or sweep is replaced by the home directory: Hydra would make a folder `~`.
    Raises UserError for an unknown flag, a value of several words without quotes, a run's directory given as a folder
    of options, a group's option that is no name, `~NAME` if there is no user NAME, and a run that cannot be repeated.
    """
    parser = get_args_parser()
    parser.error = _refuse
    # Hydra itself refuses overrides on both sides of a flag.
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if flag := next((text for text in unknown if text.startswith("-")), None):
        raise UserError(f"{flag}: unknown flag: keys have no dashes: write {_as_override(flag, arguments)}")
    overrides = [*options.overrides, *unknown]
    _refuse_split_values(overrides)
    for flag, value in (("--config-dir", options.config_dir), ("--config-path", options.config_path)):
        if value is not None and all((Path(value) / name).is_file() for name in (CONFIG_FILE, CHOICES_FILE)):
            raise UserError(
                f"{flag} {value}: its {CONFIG_FILE} is that of a run, and would be ignored: write repeat={value}"
            )
    refuse_unnamed(overrides)
    expanded = [_home_expanded(override) for override in repeated(overrides, options.config_dir)]
    flags = list(arguments)
    for override in overrides:
        flags.remove(override)
    return [*flags, *(_left_to_the_jobs(expanded) if options.multirun else expanded)]


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message} (--hydra-help lists the flags; keys have no dashes: KEY=VALUE)")


def _refuse_split_values(overrides: Sequence[str]) -> None:
    """Raises UserError for a word that a blank has cut off the value before it, with both as the shell takes them."""
    for place in range(1, len(overrides)):
        before, word = overrides[place - 1 : place + 1]
        if "=" in before and not ("=" in word or word.startswith("~") or word in SWITCHES):
            behind = takewhile(lambda each: "=" not in each, overrides[place:])
            whole = " ".join([before, *behind])
            try:
                as_it_is = not OverridesParser.create().parse_override(whole).is_sweep_override()
            except HydraException:
                as_it_is = False
            write = in_shell(whole) if as_it_is else as_text(whole)
            raise UserError(f"{word}: is not KEY=VALUE: if it belongs to the value before it, write {write}")


def _as_override(flag: str, arguments: Sequence[str]) -> str:
    """Returns what was probably meant by a flag and its value, which may be the argument behind it."""
    name, equals, value = flag.lstrip("-").partition("=")
    if not equals:
        behind = arguments[list(arguments).index(flag) + 1 :][:1]
        is_value = behind and "=" not in behind[0] and not behind[0].startswith("--")
        value = behind[0] if is_value else "true"
    return f"{name.replace('-', '_')}={value}"


def _home_expanded(override: str) -> str:
    if not (found := IN_HOME.fullmatch(override)):
        return override
    key, _, home, behind = found.groups()
    return f"{key}={quoted(str(home_expanded(key.lstrip('+'), home)) + behind)}"


def _left_to_the_jobs(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of a sweep over options so that keys of these options reach only the jobs.

    Hydra also composes the configuration of the sweep itself, without the swept options: in
    `-m offload=layer_stream,none offload.slots=3` it would refuse `offload.slots` of the default mode. So such an
    override becomes a sweep over a single value. What Hydra's parser refuses is returned unchanged, and Hydra explains
    it.
    """
    parser = OverridesParser.create()
    left = []
    try:
        parsed = parser.parse_overrides(list(overrides))
        for each in parsed:
            key, _, value = each.input_line.partition("=")
            of_jobs = each.type == OverrideType.CHANGE and "." in key and value and not key.startswith("hydra.")
            left.append(f"{key}=choice({value})" if of_jobs and not each.is_sweep_override() else each.input_line)
        parser.parse_overrides(left)
    except HydraException:
        return list(overrides)
    swept = any(each.is_sweep_override() and is_group(each.key_or_group) for each in parsed)
    return left if swept else list(overrides)

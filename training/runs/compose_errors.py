"""Configurations that cannot be composed: one line with the refused value and the allowed ones."""

import errno
import os
import re
import sys
from collections.abc import Callable

import hydra._internal.utils
from hydra.errors import CompactHydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from training.config.unknown_keys import HERE, options_with, unknown_key
from training.errors import UserError
from training.runs.failures import FAILED, print_failure
from training.visible_text import visible

# What Hydra says, and what is said in its place.
OF_HYDRA = {
    r"Multiple values for ([^ ]+)\. .*: (.+)'$": "{0}={1}: the group has an option already: write {0}={1} once,"
    " without +",
    r"Could not append to config\. An item is already at '([^']+)'": "+{0}: the key is there already: write {0}=VALUE,"
    " without +",
    r"Could not delete from config\. '([^']+)' does not exist": "~{0}: is null or no key: leave it out, or give it a"
    " value, {0}=VALUE",
    r"Could not delete '([^=']+)((?:=[^']*)?)'\. No match in the defaults list": "~{0}{1}: is not chosen: choose an"
    " option, {0}=OPTION",
}
# Of OmegaConf, about a key.
ABOUT_KEY = {
    ".*does not support deletion": "~{key}: a key cannot be left out: give it a value, {key}=VALUE",
    ".*is not Optional": "{where}{key}=null: must have a value",
    ".*is not a ListConfig": "{where}{key}={value}: must be a list, such as [{value}]",
    "Cannot merge DictConfig with ListConfig$": "{where}{key}: has no list of its own: give its keys, {key}.KEY=VALUE",
    r"Invalid value '(.*)', expected one of \[(.*)\]$": "{where}{key}={0}: choose from {1}",
}
NOT_KEYS = re.compile(r"Invalid type assigned: \w+ is not a subclass of \w+\. value: (.*)")
OF_ANOTHER_TYPE = re.compile(
    r"Value '(.*)' (?:of type '.*' (?:could not be converted to|is incompatible with type hint)|is not a valid)"
    r" '?([\w\[]+)"
)
# OmegaConf's names of types, and the words for them here.
KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false", "str": "a text"}
KINDS |= {"Union[int": "a whole number, or auto"}
# Of two orders in an optional union, typing keeps the one that it has met first.
KINDS |= dict.fromkeys(("Union[str", "Optional[Union[str", "Optional[Union[int"), "bytes, such as 24GiB")
# By key, whose types have the names of others, or none to show.
KINDS |= {"recompute.tile": "a whole number of tokens, auto or null", "adapter.experts": "true, false or shared"}
KINDS |= dict.fromkeys(("offload.resident", "offload.weights.resident"), "units (8), a share (50%), bytes or auto")
# Keys whose value people leave out.
SWITCHES = ("plan", "force", "trace")


def run(main: Callable[[], None]) -> None:
    """Calls a Hydra `main`. Prints an error as one line, or with a traceback if the user cannot fix the error.

    HYDRA_FULL_ERROR=1 always gives a traceback.
    """
    # Hydra's own version catches errors, prints several lines and exits; this one lets them reach the handler below.
    hydra._internal.utils.run_and_report = lambda function: function()
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if is_refusal(error):
            print(f"error: {explain_refusal(error)}", file=sys.stderr)
            sys.exit(FAILED)
        sys.exit(print_failure(_refused_directory(error) or error))


def _refused_directory(error: BaseException) -> UserError | None:
    """Returns the error for the user if the directory of the run or the sweep, or a file in it, cannot be made."""
    cause: BaseException | None = error
    # The logging library hides the error of its file behind a ValueError.
    while isinstance(cause, ValueError):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, OSError) or cause.filename is None or cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return None
    return UserError(
        f"{cause.filename}: cannot be written ({cause.strerror}): choose a directory that can be, hydra.run.dir=PATH,"
        " for a sweep hydra.sweep.dir=PATH"
    )


def is_refusal(error: BaseException) -> bool:
    """Tells whether `error` means that a configuration cannot be composed as it is written."""
    # What a class that an option names told the user, is none.
    told = isinstance(error, InstantiationException) and isinstance(error.__cause__, UserError)
    return isinstance(error, CompactHydraException | YAMLError) and not told


def explain_refusal(error: Exception) -> str:
    """Returns one line that names the key, the value and the allowed values; `error` must be a refusal."""
    return visible(_explained(error))


def _explained(error: Exception) -> str:
    # Hydra names the overlay or option that has the key only in the text of its error.
    text = str(error)
    if isinstance(error, YAMLError):
        return f"a configuration file is not YAML: {' '.join(text.split())}"
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _no_such_option(error.missing_cfg_file, error.options)
    if isinstance(error, OverrideParseException):
        if error.override in SWITCHES:
            return f"{error.override}: is not KEY=VALUE: write {error.override}=true"
        advice = "put a VALUE with blanks, brackets, letters beyond a-z or other signs between two pairs of quotes"
        form = "KEY=\"'VALUE'\"" if re.search(r"^[^=]*$|=[\[{]", error.override) else as_text(error.override)
        return f"{error.override}: is not KEY=VALUE, without blanks around =; {advice}: {form}"
    if several := re.match(r"Ambiguous value for argument '(.+)'$", text, re.MULTILINE):
        one = f"; for one text {as_text(several[1])}" if " " in several[1] else ""
        return f"{several[1]}: several values are a sweep, one run for each: python train.py -m {several[1]}{one}"
    if nested := re.match(r"Could not override '(\w+)@([\w.]+)\.(\w+)'", text):
        group, place, name = nested.groups()
        having = options_with(place, name)
        return f"{group}@{place}.{name}: {place}, as chosen, has no such key.{having or ' --help lists its keys'}"
    for pattern, line in OF_HYDRA.items():
        if found := re.match(pattern, text):
            return line.format(*found.groups())
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None or cause.full_key is None:
        return " ".join(text.split())
    return _about_key(cause, text[: text.index("'", 4) + 1] + ": " if text.startswith("In '") else "")


def _no_such_option(missing: str, options: list[str]) -> str:
    group, _, option = missing.partition("/")
    if group == "hydra":
        # A name on the Hub has a slash, as groups of Hydra have.
        group, _, option = missing.rpartition("/")
    if here := HERE.get(f"{group}={option}"):
        return f"{group}={option}: there is no such option: write {here}"
    named = f"; by its name or folder: model=hf model.source={option}" if group == "model" and "/" in option else ""
    if group == "hardware":
        named = "; or give the figures of another machine, hardware.vram_gib=N and its like, beside the nearest"
    return f"{group}={option}: there is no such option; choose from {', '.join(options)}{named}"


def _about_key(cause: OmegaConfBaseException, where: str) -> str:
    key, message = cause.full_key, cause.msg.partition("\n")[0]
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return where + unknown_key(key, cause.parent_node or [])
    if here := HERE.get(f"{key}={cause.value}"):
        return f"{where}{key}={cause.value}: write {here}"
    for pattern, line in ABOUT_KEY.items():
        if found := re.match(pattern, message):
            return line.format(*found.groups(), key=key, where=where, value=cause.value)
    if not_keys := NOT_KEYS.match(message):
        node = cause.parent_node._get_node(cause.key) if isinstance(cause.parent_node, DictConfig) else None
        names = node if isinstance(node, DictConfig) else []
        keys = ", ".join(f"{key}.{name}" for name in names)
        has_none = f"has no value of its own: give one of its keys: {keys}" if keys else "must have a value"
        return f"{where}{key}={not_keys[1]}: {has_none}"
    if other := OF_ANOTHER_TYPE.match(message):
        return f"{where}{key}={other[1]}: must be {KINDS.get(key) or KINDS.get(other[2], other[2])}"
    return f"{where}{key}: {message}"


def as_text(override: str) -> str:
    """Returns KEY=VALUE for the shell, quoted so that Hydra takes the value for one text."""
    key, _, value = override.partition("=")
    mark = "'" if "'" not in value else '"'
    return in_shell(f"{key}={mark}{value.replace(mark, chr(92) + mark)}{mark}")


def in_shell(word: str) -> str:
    """Returns a word for the shell, in double quotes."""
    escaped = re.sub(r'([\\"$`])', r"\\\1", word)
    return f'"{escaped}"'

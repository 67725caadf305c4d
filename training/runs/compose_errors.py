"""Configurations that cannot be composed: one line with the refused value and the allowed ones."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable

import hydra._internal.utils
from hydra.errors import CompactHydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from training.config.modes import is_group, options_of
from training.config.unknown_keys import HERE, options_with, unknown_key
from training.errors import UserError
from training.runs.failures import FAILED, print_failure
from training.visible_text import visible

# OmegaConf's names of types, and the words for them here.
OF_ANOTHER_TYPE = re.compile(
    r"Value '(.*)' (?:of type '.*' (?:could not be converted to|is incompatible with type hint)|is not a valid)"
    r" '?([\w\[]+)"
)
NOT_KEYS = re.compile(r"Invalid type assigned: \w+ is not a subclass of \w+\. value: (.*)")
OF_ANOTHER_NAME = re.compile(r"Invalid value '(.*)', expected one of \[(.*)\]$")
KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false", "str": "a text"}
KINDS |= {"Union[int": "a whole number, or auto"}
KINDS |= dict.fromkeys(("Union[str", "Optional[Union[str"), "bytes, such as 24GiB")
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
        if refused := _refused_directory(error):
            error = refused
        elif is_refusal(error):
            print(f"error: {explain_refusal(error)}", file=sys.stderr)
            sys.exit(FAILED)
        sys.exit(print_failure(error))


def _refused_directory(error: BaseException) -> UserError | None:
    """Returns the error for the user if the directory of the run or the sweep, or a file in it, cannot be made."""
    cause: BaseException | None = error
    # The logging library hides the error of its file behind a ValueError.
    while cause is not None and not (isinstance(cause, OSError) and cause.filename is not None):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not isinstance(error, OSError | ValueError) or cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return None
    return UserError(
        f"{cause.filename}: cannot be written ({cause.strerror}): choose a directory that can be, hydra.run.dir=PATH,"
        " for a sweep hydra.sweep.dir=PATH"
    )


def is_refusal(error: BaseException) -> bool:
    """Tells whether `error` means that a configuration cannot be composed as it is written."""
    if isinstance(error, InstantiationException) and isinstance(error.__cause__, UserError):
        # What a class that an option names told the user.
        return False
    if isinstance(error, CompactHydraException | YAMLError):
        return True
    # Hydra crashes if a number, null, or a list with null is given in place of an option's name.
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError | TypeError) and "/hydra/_internal/" in frames[-1].filename


def explain_refusal(error: Exception) -> str:
    """Returns one line that names the key, the value and the allowed values; `error` must be a refusal."""
    return visible(_explained(error))


def _explained(error: Exception) -> str:
    if isinstance(error, YAMLError):
        return f"a configuration file is not YAML: {' '.join(str(error).split())}"
    if not isinstance(error, CompactHydraException):
        return _unnamed_option(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, option = _group_and_option(error.missing_cfg_file)
        if here := HERE.get(f"{group}={option}"):
            return f"{group}={option}: there is no such option: write {here}"
        named = f"; by its name or folder: model=hf model.source={option}" if group == "model" and "/" in option else ""
        if group == "hardware":
            named = "; or give the figures of another machine, hardware.vram_gib=N and its like, beside the nearest"
        return f"{group}={option}: there is no such option; choose from {', '.join(error.options)}{named}"
    if isinstance(error, OverrideParseException):
        if error.override in SWITCHES:
            return f"{error.override}: is not KEY=VALUE: write {error.override}=true"
        advice = "put a VALUE with blanks, brackets, letters beyond a-z or other signs between two pairs of quotes"
        form = "KEY=\"'VALUE'\"" if re.search(r"^[^=]*$|=[\[{]", error.override) else as_text(error.override)
        return f"{error.override}: is not KEY=VALUE, without blanks around =; {advice}: {form}"
    if several := re.match(r"Ambiguous value for argument '(.+)'$", str(error), re.MULTILINE):
        text = f"; for one text {as_text(several[1])}" if " " in several[1] else ""
        return f"{several[1]}: several values are a sweep, one run for each: python train.py -m {several[1]}{text}"
    if twice := re.match(r"Multiple values for ([^ ]+)\. .*: (.+)'$", str(error)):
        group, option = twice.groups()
        return f"{group}={option}: the group has an option already: write {group}={option} once, without +"
    if nested := re.match(r"Could not override '(\w+)@([\w.]+)\.(\w+)'", str(error)):
        group, place, name = nested.groups()
        having = options_with(place, name)
        return f"{group}@{place}.{name}: {place}, as chosen, has no such key.{having or ' --help lists its keys'}"
    if twice := re.match(r"Could not append to config\. An item is already at '([^']+)'", str(error)):
        return f"+{twice[1]}: the key is there already: write {twice[1]}=VALUE, without +"
    if absent := re.match(r"Could not delete from config\. '([^']+)' does not exist", str(error)):
        return f"~{absent[1]}: is null or no key: leave it out, or give it a value, {absent[1]}=VALUE"
    if other := re.match(r"Could not delete '([^=']+)(=[^']*)?'\. No match in the defaults list", str(error)):
        return f"~{other[1]}{other[2] or ''}: is not chosen: choose an option, {other[1]}=OPTION"
    cause = _cause(error)
    if cause is None or cause.full_key is None:
        return " ".join(str(error).split())
    # Hydra names the overlay or option that has the key only in the text of its error.
    text = str(error)
    where = text[: text.index("'", 4) + 1] + ": " if text.startswith("In '") else ""
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return where + unknown_key(cause.full_key, cause.parent_node or []) + _for_a_job(error)
    message = cause.msg.partition("\n")[0]
    if "does not support deletion" in message:
        return f"~{cause.full_key}: a key cannot be left out: give it a value, {cause.full_key}=VALUE"
    if "is not Optional" in message:
        return f"{where}{cause.full_key}=null: must have a value"
    if "is not a ListConfig" in message:
        return f"{where}{cause.full_key}={cause.value}: must be a list, such as [{cause.value}]"
    if message == "Cannot merge DictConfig with ListConfig":
        return f"{where}{cause.full_key}: has no list of its own: give its keys, {cause.full_key}.KEY=VALUE"
    if not_keys := NOT_KEYS.match(message):
        keys = ", ".join(f"{cause.full_key}.{name}" for name in _keys_below(cause))
        if not keys:
            return f"{where}{cause.full_key}={not_keys[1]}: must have a value"
        return f"{where}{cause.full_key}={not_keys[1]}: has no value of its own: give one of its keys: {keys}"
    if of_another_type := OF_ANOTHER_TYPE.match(message):
        value, kind = of_another_type.groups()
        return f"{where}{cause.full_key}={value}: must be {KINDS.get(kind, kind)}"
    if of_another_name := OF_ANOTHER_NAME.match(message):
        value, names = of_another_name.groups()
        return f"{where}{cause.full_key}={value}: choose from {names}"
    return f"{where}{cause.full_key}: {message}"


def as_text(override: str) -> str:
    """Returns KEY=VALUE for the shell, quoted so that Hydra takes the value for one text."""
    key, _, value = override.partition("=")
    mark = "'" if "'" not in value else '"'
    return in_shell(f"{key}={mark}{value.replace(mark, chr(92) + mark)}{mark}")


def in_shell(word: str) -> str:
    """Returns a word for the shell, in double quotes."""
    escaped = re.sub(r'([\\"$`])', r"\\\1", word)
    return f'"{escaped}"'


def _unnamed_option(error: Exception) -> str:
    """Returns the line about a number, null, true or a list that was given for the name of an option."""
    # Hydra's error does not name the override; the frame that raised it has it.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    override = frame.f_locals.get("override")
    group = getattr(override, "key_or_group", "")
    options = options_of(group) if group else []
    if not options:
        return f"choose options by name, GROUP=OPTION, such as offload=none ({' '.join(str(error).split())})"
    return f"{override.input_line}: must be the name of an option: choose from {', '.join(options)}"


def _for_a_job(error: Exception) -> str:
    """Returns which options of a sweep lack a key, as the end of a line: others of its options may have it."""
    # Hydra's error does not name the job; the frame that composed it does.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        overrides = frame.f_locals.get("sweep_overrides", []) if frame.f_code.co_name == "load_sweep_config" else []
        if options := [each for each in overrides if is_group(each.partition("=")[0])]:
            return (
                f". Of the sweep, {' '.join(options)} lacks it, so no job was started: sweep over options that have it"
            )
    return ""


def _group_and_option(missing: str) -> tuple[str, str]:
    """Splits the path of an option that does not exist. A name on the Hub has a slash, as groups of Hydra have."""
    group, _, option = missing.partition("/")
    return (group, option) if group != "hydra" else missing.rpartition("/")[::2]


def _keys_below(cause: OmegaConfBaseException) -> list[str]:
    """Returns the keys of the node that a value was given to in place of them."""
    node = cause.parent_node._get_node(cause.key) if isinstance(cause.parent_node, DictConfig) else None
    return [str(name) for name in node] if isinstance(node, DictConfig) else []


def _cause(error: BaseException) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error

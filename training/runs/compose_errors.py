"""Configurations that cannot be composed: one line with the refused value and the allowed ones."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable

import hydra._internal.utils
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from training.config.unknown_keys import unknown_key
from training.errors import UserError
from training.runs.failures import FAILED, print_failure
from training.visible_text import visible

# OmegaConf's names of types, and the words for them here.
OF_ANOTHER_TYPE = re.compile(r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)")
OF_ANOTHER_NAME = re.compile(r"Invalid value '(.*)', expected one of \[(.*)\]$")
KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def run(main: Callable[[], None]) -> None:
    """Calls a Hydra `main`. An error ends the process with one line, or a traceback if one line is not enough.

    HYDRA_FULL_ERROR=1 gives the traceback in every case.
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
        return f"choose options by name, GROUP=OPTION, such as offload=none ({' '.join(str(error).split())})"
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}={option}: there is no such option; choose from {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        advice = "put a VALUE with blanks, brackets or other signs between two pairs of quotes: KEY=\"'VALUE'\""
        return f"{error.override}: is not KEY=VALUE; {advice}"
    if several := re.match(r"Ambiguous value for argument '([^']+)'", str(error)):
        return f"{several[1]}: several values are a sweep, one run for each: python train.py -m {several[1]}"
    if twice := re.match(r"Multiple values for ([^ ]+)\. .*: (.+)'$", str(error)):
        group, option = twice.groups()
        return f"{group}={option}: the group has an option already: write {group}={option} once, without +"
    cause = _cause(error)
    if cause is None or cause.full_key is None:
        return " ".join(str(error).split())
    # Hydra names the overlay or option that has the key only in the text of its error.
    text = str(error)
    where = text[: text.index("'", 4) + 1] + ": " if text.startswith("In '") else ""
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return where + unknown_key(cause.full_key, cause.parent_node or [])
    message = cause.msg.partition("\n")[0]
    if "is not Optional" in message:
        return f"{where}{cause.full_key}=null: must have a value"
    if "is not a ListConfig" in message:
        return f"{where}{cause.full_key}={cause.value}: must be a list, such as [{cause.value}]"
    if of_another_type := OF_ANOTHER_TYPE.match(message):
        value, kind = of_another_type.groups()
        return f"{where}{cause.full_key}={value}: must be {KINDS.get(kind, kind)}"
    if of_another_name := OF_ANOTHER_NAME.match(message):
        value, names = of_another_name.groups()
        return f"{where}{cause.full_key}={value}: choose from {names}"
    return f"{where}{cause.full_key}: {message}"


def _cause(error: BaseException) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error

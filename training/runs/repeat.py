"""`repeat=DIR`: the command line of an earlier run again, but for what else is given.

A value that the run had, and its command does not give today, is given too: one that was `auto`, or the default then.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.config.modes import is_group
from training.errors import UserError, first_line
from training.runs.bounded_files import DamagedError, MissingError, leaves_of, parse_yaml, read_yaml
from training.runs.compose_errors import explain_refusal
from training.runs.files import CHOICES_FILE, CONFIG_FILE, home_expanded
from training.runs.invocation import Invocation, key_of, written

KEY, EXPERIMENT = "repeat", "experiment"
# Keys of which each replaces the other.
LENGTH = {"steps", "epochs"}


def repeated(overrides: Sequence[str], more_options: str | None = None) -> list[str]:
    """Returns `overrides` with `repeat=DIR` replaced by those of the run in DIR; what else is given wins.

    `more_options` is a directory of options beside conf/. Raises UserError, beginning with `repeat=DIR`, for a run that
    cannot be repeated.
    """
    given = [text for text in overrides if text.startswith(f"{KEY}=")]
    if not given:
        return list(overrides)
    if given[1:]:
        raise UserError(f"{' '.join(given)}: give the run to repeat once")
    run_dir = home_expanded(KEY, given[0].partition("=")[2].strip("'\""))
    others = [text for text in overrides if text not in given]
    if experiment := next((text for text in others if key_of(text) == EXPERIMENT), None):
        raise UserError(f"{experiment}: {given[0]} gives every value already, and would win: leave one of them out")
    return overrides_of(run_dir, f"{KEY}={run_dir}", others, more_options)


def overrides_of(run_dir: Path, prefix: str, others: Sequence[str], more_options: str | None = None) -> list[str]:
    """Returns the overrides of a saved run, then `others`, which win. Raises UserError, beginning with `prefix`."""
    # Resuming belongs to one run, and not to its configuration. A dictionary is merged into the run's.
    replaced = {"resume", *(_path(text) for text in others if "={" not in text)}
    replaced |= LENGTH if replaced & LENGTH else set()
    recorded = _read(prefix, run_dir, CHOICES_FILE).get("overrides")
    if not isinstance(recorded, list) or not all(isinstance(text, str) for text in recorded):
        raise UserError(f"{prefix}: {CHOICES_FILE} has no overrides: it was not written by a run")
    recorded = [text for text in recorded if not _under(_path(text), replaced)]
    search = [] if more_options is None else [f"hydra.searchpath=[{written(str(Path(more_options).absolute()))}]"]
    try:
        config, _ = Invocation.composed([*recorded, *search])
        today = dict(leaves_of(parse_yaml(OmegaConf.to_yaml(config, resolve=True))))
    except CompactHydraException as error:
        raise UserError(f"{prefix}: {explain_refusal(error)}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{prefix}: {first_line(error)}") from error
    kept = []
    for key, value in leaves_of(_read(prefix, run_dir, CONFIG_FILE)):
        if _under(key, replaced) or "._" in f".{key}":
            continue
        # The keys of a group may be those of an option that follows what else is given.
        if key not in today and not is_group(key.partition(".")[0]):
            problem = f"{key}={written(value)} of that run is no key today: delete it from {CONFIG_FILE} there"
            raise UserError(f"{prefix}: {problem} to repeat the run without it")
        if today.get(key, value) != value:
            kept.append(f"{key}={written(value)}")
    return [*recorded, *kept, *others]


def _read(prefix: str, run_dir: Path, name: str) -> dict[str, Any]:
    try:
        return read_yaml(run_dir / name)
    except MissingError:
        job = run_dir / "0"
        jobs = f", such as {prefix.removesuffix(str(run_dir))}{job}" if (job / name).is_file() else ""
        raise UserError(f"{prefix}: no {name} there: give the directory of a run{jobs}") from None
    except DamagedError as error:
        raise UserError(f"{prefix}: {error}") from error


def _path(override: str) -> str:
    """Returns the key that an override sets, or the place of its group, as in `offload@offload.weights`."""
    return key_of(override).rpartition("@")[2]


def _under(key: str, paths: set[str]) -> bool:
    return any(key == path or key.startswith(f"{path}.") for path in paths)

"""Options of model, dataset and task from a folder of the user's own: `train.py --config-dir DIR`.

DIR/dataset/NAME.yaml is written as a file of conf/dataset is, and names a class of a module on Python's path. So code
is named by the command line alone, and never by a configuration that somebody sent.
"""

import dataclasses
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class

from training.config.declare import schema_of
from training.config.schema import SCHEMAS
from training.errors import UserError, first_line

GROUPS = ("model", "dataset", "task")
# Arguments of datasets that are no keys, because the program gives them (`training.data.datasets`).
GIVEN = frozenset({"seed", "batch_size", "seq_len", "cache_dir"})


def register_own(arguments: Sequence[str]) -> None:
    """Registers the options below the `--config-dir` of a command line. Raises UserError for one of no use."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(list(arguments))[0].config_dir
    for group in GROUPS if folder is not None else ():
        for file in sorted((folder / group).glob("*.yaml")):
            if file.stem in SCHEMAS[group]:
                raise UserError(f"{file}: {group}={file.stem} is an option already: take another name")
            schema = _schema_of(file, group)
            SCHEMAS[group][file.stem] = schema
            ConfigStore.instance().store(group=f"schema/{group}", name=file.stem, node=schema)


def _schema_of(file: Path, group: str) -> type:
    try:
        option = yaml.safe_load(file.read_text()) or {}
        target = option.get("_target_")
        if not target:
            raise UserError(f"{file}: has no _target_: give it the class, _target_: MODULE.CLASS")
        if not any("/schema/" in str(each) for each in option.get("defaults", [])):
            own = f"defaults: [/schema/{group}/{file.stem}@_here_, _self_]"
            raise UserError(f"{file}: lacks the keys of its class: begin it with the line {own}")
        schema = schema_of(get_class(target), GIVEN)
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {first_line(error)}") from error
    except KeyError as error:
        raise UserError(f"{file}: the argument {error} of {target} has no type: give it one") from error
    # A module of somebody else's raises any error as it is imported.
    except Exception as error:
        if isinstance(error, UserError):
            raise
        reason = first_line(error.__cause__ or error)
        raise UserError(
            f"{file}: _target_={target} cannot be imported ({reason}): put the folder of its module on PYTHONPATH"
        ) from error
    names = {entry.name for entry in dataclasses.fields(schema)}
    if group == "model" and "weights" not in names:
        # Every model may begin from files.
        schema = dataclasses.make_dataclass(schema.__name__, [("weights", str | None, None)], bases=(schema,))
    return schema

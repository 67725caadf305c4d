"""The facts of how a run was started. Hydra keeps them in a global; train.py reads it once and passes them on."""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from training.config.modes import CONF, is_group, options_of
from training.errors import UserError


@dataclass(frozen=True)
class Invocation:
    """The start of a run: its directory, options by group, overrides, and the keys that its experiment sweeps."""

    run_dir: Path
    choices: Mapping[str, str | None]
    overrides: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()

    @classmethod
    def current(cls) -> Self:
        """Reads the running job from Hydra's global. Only the entry point calls this."""
        hydra = HydraConfig.get()
        return cls.of(hydra, Path(hydra.runtime.output_dir))

    @classmethod
    def of(cls, hydra: DictConfig, run_dir: Path) -> Self:
        """Reads the node `hydra` of a composed configuration."""
        # Not resolved: an override may refer to a key that does not exist, which is refused later.
        choices = OmegaConf.to_container(hydra.runtime.choices, resolve=False)
        overrides = tuple(OmegaConf.to_container(hydra.overrides.task, resolve=False))
        return cls(run_dir, choices, overrides, tuple(OmegaConf.select(hydra, "sweeper.params") or ()))

    @property
    def overridden(self) -> set[str]:
        """The keys and groups that the command line sets, without the `+` and `~` that it may write before them."""
        return set(map(key_of, self.overrides))

    def refuse_unswept(self) -> None:
        """Raises UserError for an experiment that is a sweep, started without -m and with no key of the sweep."""
        if self.swept and not self.overridden.intersection(self.swept):
            name, first = self.choices["experiment"], self.swept[0]
            found = f"experiment={name}: is a sweep over {', '.join(self.swept)}"
            raise UserError(f"{found}: add -m, or give {first}=VALUE for one run")

    def composed_with(self, changes: Mapping[str, str]) -> tuple[DictConfig, Self]:
        """Composes the same command, with `changes` in place of its overrides of these keys; raises as `composed`."""
        overrides = [each for each in self.overrides if key_of(each) not in changes]
        return self.composed([*overrides, *(f"{key}={value}" for key, value in changes.items())], self.run_dir)

    @classmethod
    def composed(cls, overrides: Sequence[str], run_dir: Path = Path()) -> tuple[DictConfig, Self]:
        """Composes a configuration; returns it and its invocation. Raises Hydra's, OmegaConf's errors and UserError."""
        refuse_unnamed(overrides)
        inside = GlobalHydra.instance().is_initialized()
        with nullcontext() if inside else initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", list(overrides), return_hydra_config=True)
        invocation = cls.of(config.hydra, run_dir)
        with open_dict(config):
            del config["hydra"]
        return config, invocation

    @property
    def title(self) -> str:
        """The options that a reader wants to see first: those of the offload mode and the model."""
        return f"offload={self.choices['offload']} model={self.choices['model']}"


def refuse_unnamed(overrides: Sequence[str]) -> None:
    """Raises UserError for a number, true, null or a list in place of an option: Hydra crashes at it, or merges it."""
    for text in overrides:
        # What cannot be parsed is explained when Hydra refuses it.
        with suppress(HydraException):
            each = OverridesParser.create().parse_override(text)
            if is_group(each.key_or_group) and not (
                each.is_sweep_override() or each.is_delete() or isinstance(each.value(), str)
            ):
                options = ", ".join(options_of(each.key_or_group))
                raise UserError(f"{text}: must be the name of one option: choose from {options}")


def key_of(override: str) -> str:
    """Returns the key or group that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def quoted(text: object) -> str:
    """Quotes a text for Hydra's grammar: paths, say, may have spaces, commas and equal signs."""
    return "'" + str(text).replace("'", "\\'") + "'"


def written(value: Any) -> str:
    """Returns a value that was read as text, or a list of such, in the form that the command line takes."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return value if re.fullmatch(r"[\w.+/%-]+", value) else quoted(value)

"""The folder conf/, and the offload modes in it: every file of conf/offload is a mode, and names its class.

Classes of the package `peers` are other systems, to compare with. The knobs of a mode are the fields of its class. So a
new mode is a file in offload/modes and one in conf/offload; help, benchmarks, sweeps and docs/modes.md find it here.
"""

from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import yaml
from omegaconf import DictConfig

from training.config.cards import PRESETS

CONF = Path(__file__).resolve().parents[2] / "conf"
FOLDER = CONF / "offload"
RESIDENT = "none"
PEERS = "peers."


@dataclass(frozen=True)
class ModeOption:
    """An option of the group `offload`: its name, and what its file says.

    `description` is the comment at the top of the file. `target` is the path of the mode's class; None if the file
    takes it from another option.
    """

    name: str
    description: str
    target: str | None

    @property
    def is_peer(self) -> bool:
        """True for another system."""
        return (self.target or "").startswith(PEERS)


@cache
def all_options(folder: Path = FOLDER) -> dict[str, ModeOption]:
    """Returns modes and peers by name, the resident model first."""
    found = {}
    for path in sorted(folder.glob("*.yaml"), key=lambda path: (path.stem != RESIDENT, path.stem)):
        text = path.read_text()
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        description = " ".join(line.lstrip("# ") for line in comment)
        found[path.stem] = ModeOption(path.stem, description, (yaml.safe_load(text) or {}).get("_target_"))
    return found


def mode_options(folder: Path = FOLDER) -> dict[str, ModeOption]:
    """Returns the modes of this repository by name, the resident model first."""
    return {name: option for name, option in all_options(folder).items() if not option.is_peer}


def modes_table(options: dict[str, ModeOption]) -> str:
    """Returns the options as a table in Markdown, a line each."""
    lines = (f"| `{option.name}` | {option.description} |" for option in options.values())
    return "\n".join(("| `offload=` | what it does |", "|---|---|", *lines))


def weights_node(config: DictConfig) -> tuple[str, DictConfig]:
    """Returns the key and the knobs of the mode that decides where the weights live."""
    key, mode = "offload", config.offload
    while "weights" in mode:
        key, mode = f"{key}.weights", mode.weights
    return key, mode


def is_group(name: str) -> bool:
    """Tells whether `name` is a group; one inside another has a slash, as `hydra/launcher`."""
    return (CONF / name).is_dir()


def options_of(group: str) -> list[str]:
    """Returns the names of the group's options in the order of the alphabet; none for what is no group."""
    cards = PRESETS if group == "hardware" else ()
    return sorted({*cards, *(path.stem for path in (CONF / group).glob("*.yaml"))})

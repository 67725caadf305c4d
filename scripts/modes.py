"""Prints the offload modes with their knobs, or brings the table of modes in the documentation up to date.

python scripts/modes.py            # every mode: description, knobs, defaults, explanations
python scripts/modes.py --write    # rewrites the table in docs/modes.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.config import schema
from training.config.help import knobs
from training.config.modes import FOLDER, ModeOption, mode_options, modes_table
from training.sweeps import launcher

PAGE = FOLDER.parents[1] / "docs" / "modes.md"
START = "<!-- The table of modes: python scripts/modes.py --write makes it from conf/offload. -->\n"
END = "\n<!-- The end of the table of modes. -->"


def with_table(page: str, options: dict[str, ModeOption]) -> str:
    """Returns the page with the table of `options` between the two markers."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{modes_table(options)}{END}{after}"


def described(option: ModeOption) -> str:
    """Returns an option with its knobs, for people."""
    schema.register()
    launcher.register_launcher()
    with initialize_config_dir(str(FOLDER.parent), version_base="1.3"):
        config = compose("config", [f"offload={option.name}"])
    return f"{option.name}: {option.description}\n  {knobs('offload', config)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the table in docs/modes.md")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text(), mode_options()))
        return
    for option in mode_options().values():
        print(described(option))


if __name__ == "__main__":
    main()

"""Brings the table of modes in docs/modes.md up to date with conf/offload.

python scripts/modes.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.config.modes import FOLDER, ModeOption, mode_options, modes_table

PAGE = FOLDER.parents[1] / "docs" / "modes.md"
START = "<!-- The table of modes: python scripts/modes.py makes it from conf/offload. -->\n"
END = "\n<!-- The end of the table of modes. -->"


def with_table(page: str, options: dict[str, ModeOption]) -> str:
    """Returns the page with the table of `options` between the two markers."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{modes_table(options)}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), mode_options()))

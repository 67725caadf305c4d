"""scripts/modes.py: the table in the documentation is up to date, and every mode is described."""

from __future__ import annotations

import subprocess
import sys

from scripts.modes import END, PAGE, START, described, with_table
from tests import ROOT
from training.config.modes import ModeOption, mode_options


def test_the_table_in_the_documentation_is_up_to_date():
    page = PAGE.read_text()
    assert page == with_table(page, mode_options()), "run: python scripts/modes.py --write"


def test_only_the_part_between_the_markers_is_written():
    page = with_table(f"before\n{START}old{END}\nafter\n", {"a": ModeOption("a", "Does this.", None)})
    assert page.startswith(f"before\n{START}| `offload=`")
    assert page.endswith(f"| `a` | Does this. |{END}\nafter\n")


def test_a_mode_is_described_with_its_knobs():
    text = described(mode_options()["layer_stream"])
    assert text.startswith("layer_stream: Each block lives in host memory")
    assert "offload.slots" in text


def test_the_script_prints_every_mode():
    printed = subprocess.run(
        [sys.executable, "scripts/modes.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert all(f"{name}: " in printed for name in mode_options())

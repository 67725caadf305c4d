"""scripts/modes.py: the table in the documentation is up to date."""

from scripts.modes import END, PAGE, START, with_table
from training.config.modes import ModeOption, mode_options


def test_the_table_in_the_documentation_is_up_to_date():
    page = PAGE.read_text()
    assert page == with_table(page, mode_options()), "run: python scripts/modes.py"


def test_only_the_part_between_the_markers_is_written():
    page = with_table(f"before\n{START}old{END}\nafter\n", {"a": ModeOption("a", "Does this.", None)})
    assert page.startswith(f"before\n{START}| `offload=`")
    assert page.endswith(f"| `a` | Does this. |{END}\nafter\n")

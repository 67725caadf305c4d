"""Text of foreign origin, made safe to print and to write into reports."""

import logging
import sys
import unicodedata
from pathlib import Path

import pytest

from tests.training.helpers.in_process import TINY_RUN, command_here
from training.visible_text import VisibleFormatter, shortened, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layer_stream slots=3 \N{EN DASH} 1.5 \N{MULTIPLICATION SIGN}", None),
        ("\u65e5\u672c \u00e9\u00df \U0001f642 a\u00a0b", None),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\r=cmd()\n\tb", r"a\r=cmd()\n\tb"),
        ("\x00\x7f\x85\x9b2J", r"\x00\x7f\x85\x9b2J"),
        ("a\u2028b\u2029", r"a\u2028b\u2029"),
        (
            "\u202eexe.txt\u202c \u2066x\u2069 \u200e\u200f\u061c",
            r"\u202eexe.txt\u202c \u2066x\u2069 \u200e\u200f\u061c",
        ),
        ("\u200b\ufeff\u00ad\U000e0041", r"\u200b\ufeff\xad\U000e0041"),
        ("caf\udcc3\udca9 \ud800", r"caf\xc3\xa9 \ud800"),
    ],
)
def test_characters_that_act_are_shown_as_escapes(text: str, shown: str | None):
    assert visible(text) == (text if shown is None else shown)


@pytest.mark.slow
def test_no_character_that_acts_is_left_and_all_can_be_encoded():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = visible(every)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert shown.encode().decode() == visible(shown) == shown
    assert len(shown.splitlines()) == 1


def test_anything_that_has_a_text_is_taken():
    assert visible(ValueError("a\x1b")) == r"a\x1b"


def test_a_long_text_loses_its_middle():
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcde\N{HORIZONTAL ELLIPSIS}hijk"
    assert len(shortened("x" * 1000, 81)) == 81


def test_log_lines_and_tracebacks_are_visible_line_by_line():
    try:
        raise ValueError("b\x1b")
    except ValueError:
        record = logging.LogRecord("a", logging.INFO, "", 1, "%s is\nodd", ("\x1b[2J",), sys.exc_info())
    first, second, *trace = VisibleFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert (first, second) == (r"INFO \x1b[2J is", "odd")
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", r"ValueError: b\x1b")


@pytest.mark.slow
def test_the_log_of_a_run_quotes_nothing_that_acts(tmp_path: Path):
    tiny = (*TINY_RUN, "dataset=synthetic", "checkpoint.every=3")
    odd = tmp_path / "a\x1b[31m\u202e"
    assert command_here(*tiny, f"hydra.run.dir='{odd}'").returncode == 0
    result = command_here(*tiny, f"hydra.run.dir={tmp_path / 'new'}", f"resume='{odd}'")
    assert result.returncode == 0, result.stderr
    shown = r"resuming after step 6 of " + f"{tmp_path}" + r"/a\x1b[31m\u202e/checkpoints/step-00000006"
    assert shown in result.stderr
    assert shown in (tmp_path / "new" / "train.log").read_text()
    for text in (result.stdout, result.stderr, (tmp_path / "new" / "train.log").read_text()):
        assert not set(text) & set("\x1b\u202e")

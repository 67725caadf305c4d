"""The error that users can fix, and the line that stands for any error."""

import subprocess
import sys

import pytest

from tests import ROOT
from training.errors import UserError, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  first"), "first"),
        (ValueError(), "ValueError"),
        (UserError("steps=0: must be at least 1"), "steps=0: must be at least 1"),
    ],
)
def test_the_first_line_stands_for_an_error(error: Exception, line: str):
    assert first_line(error) == line


def test_a_user_error_ends_a_run_as_failed():
    assert UserError("x").status == "failed"


def test_it_imports_nothing_that_takes_time():
    program = "import sys, training.errors; assert not {'torch', 'hydra', 'omegaconf'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)

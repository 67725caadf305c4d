"""The notebooks of examples/ run, and print what they show."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import torch

from tests import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec("".join(cell["source"]), names)
        shown = "".join("".join(output["text"]) for output in cell["outputs"])
        if not torch.cuda.is_available():
            # The outputs were made on a CPU.
            assert printed.getvalue() == shown
    assert names["losses"] == names["expected"]

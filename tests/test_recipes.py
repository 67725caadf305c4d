"""The programs of docs/recipes.md run as they stand there, with the losses of a resident model."""

import importlib.util
import logging
import re
from pathlib import Path

import pytest
from torch import nn

from offload.streams import registry
from offload.streams.transfer import Transfer
from tests import ROOT

PROGRAMS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE | re.DOTALL)
MODES = re.compile(r"LayerStream\(slots=2.*\)$", re.MULTILINE)
# What a program alone imports, and the package that it needs.
RECIPES = {
    "from transformers import LlamaConfig": "transformers",
    "from trl import SFTConfig": "trl",
    "from trl import DPOConfig": "trl",
    "from accelerate import": "accelerate",
    "from lightning import": "lightning",
    "from peft import": "peft",
}


@pytest.mark.parametrize("imported", RECIPES)
def test_a_recipe_computes_the_losses_of_a_resident_model(
    imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    package = RECIPES[imported]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    caplog.set_level(logging.ERROR)
    monkeypatch.chdir(tmp_path)
    (program,) = (program for program in PROGRAMS if f"\n{imported}" in program)
    as_resident, count = MODES.subn("Resident()", program)
    assert count == (2 if "reference" in program else 1)
    exec(as_resident.replace("import LayerStream", "import Resident"), resident := {})
    # On a GPU each of these would copy the whole model there; peft puts its own small layers where theirs are.
    if package != "peft":
        monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: pytest.fail(f"{type(self).__name__} was moved"))
    copies = []
    copy_in = Transfer.copy_in
    monkeypatch.setattr(Transfer, "copy_in", lambda self, *a, **k: copies.append(a) or copy_in(self, *a, **k))
    exec(program, streamed := {})
    assert copies
    assert len(streamed["losses"]) >= 4
    assert streamed["losses"] == resident["losses"]
    assert registry.holders("cpu") == 0

"""Packages that remark on the machine when they are imported."""

import logging
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from models import quiet_imports
from models.quiet_imports import hide_bars, import_quantisers, remarks_collected, without_remarks
from tests import ROOT

LOUD = """
import logging, sys, warnings
print("printed")
logging.warning("logged")
warnings.warn("warned")
{end}
"""


@pytest.mark.parametrize("end", ["", "raise OSError('no such library')"])
def test_a_loud_package_is_imported_without_a_word(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "loud_package.py").write_text(LOUD.format(end=end))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quiet_imports, "QUANTISERS", ("loud_package", "package_that_is_not_there"))
    import_quantisers()
    assert ("loud_package" in sys.modules) == (end == "")
    sys.modules.pop("loud_package", None)
    assert capfd.readouterr() == ("", "")


def test_afterwards_all_is_heard_again(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(KeyError), without_remarks():
        raise KeyError
    print("printed")
    assert logging.root.manager.disable == 0
    with pytest.warns(UserWarning, match="warned"):
        warnings.warn("warned", stacklevel=1)
    assert capfd.readouterr().out == "printed\n"


ADAPTED = """
import sys
import torch
from models.adapters import Lora, inject
from models.llama import Llama

with torch.device("meta"):
    model = Llama(8, 8, 8, 1, 1, 1)
inject(model, Lora(rank=1, alpha=1), torch.float32)
# All of torch's compiler, which nothing here needs.
assert "torch._inductor.compile_fx" not in sys.modules
"""


OF_TRANSFORMERS = """
from models.quiet_imports import import_quantisers

import_quantisers()
from models.hf import build_hf
"""


@pytest.mark.parametrize("program", [ADAPTED, OF_TRANSFORMERS], ids=["adapted", "of_transformers"])
@pytest.mark.slow
def test_models_and_adapters_are_made_without_a_word(program: str):
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert (ended.stdout, ended.stderr) == ("", "")


def test_bars_of_libraries_are_hidden_but_not_those_of_downloads():
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as of_transformers

    of_transformers.enable_progress_bar()
    try:
        hide_bars()
        assert not of_transformers.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
    finally:
        of_transformers.enable_progress_bar()


def test_what_libraries_log_is_collected_once_and_shown_again_afterwards():
    logger = logging.getLogger("diffusers")
    before = logger.handlers
    with suppress(KeyError), remarks_collected() as remarks:
        for number in (1, 1, 2):
            logging.getLogger("diffusers.some.part").warning("%d is long", number)
        logging.getLogger("transformers").warning("so is this")
        raise KeyError
    assert remarks == ["1 is long", "2 is long", "so is this"]
    assert logger.handlers is before

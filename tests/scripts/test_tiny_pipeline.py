"""The tiny pipeline and its pictures are made, and experiment=pictures trains on them."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import tiny_pipeline
from tests import ROOT
from tests.training.helpers.in_process import run_here
from tests.training.helpers.results import losses
from training.errors import UserError


@pytest.mark.slow
def test_libraries_make_no_remarks_before_its_own_lines():
    done = subprocess.run(
        [sys.executable, "scripts/tiny_pipeline.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_the_experiment_trains_on_what_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tiny_pipeline.py", "shapes", "--count=12", "--vae-steps=2"])
    tiny_pipeline.main()
    assert len({path.read_text() for path in (tmp_path / "shapes" / "pictures").glob("*.txt")}) == 12
    few = ("steps=3", "log_every=1", "batch_size=2", "task.sample_steps=2", "device=cpu", "hardware=h200")
    run_here(tmp_path / "run", "experiment=pictures", *few)
    found = losses(tmp_path / "run")
    assert len(found) == 3
    assert len(list((tmp_path / "run" / "samples").glob("*.png"))) == 2
    # That of the noise, of a network that knows nothing yet.
    assert found[0] == pytest.approx(1, abs=0.4)
    with pytest.raises(UserError, match="shapes is not empty: give a new folder"):
        tiny_pipeline.main()

"""`pip install .` installs the engine, and the example in the docstring of the package runs."""

import inspect
import shutil
import subprocess
import sys
import textwrap
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import offload
from offload.streams import registry
from tests import ROOT

# What a build reads.
SOURCES = ("offload", "pyproject.toml", "README.md", "LICENSE")


def test_the_example_runs(capsys: pytest.CaptureFixture[str]):
    lines = inspect.getdoc(offload).splitlines()
    example = [line for line in lines if line.startswith("    ")]
    exec(textwrap.dedent("\n".join(example)), {})
    copied, *words = capsys.readouterr().out.split()
    assert " ".join(words) == "bytes copied to the device"
    assert int(copied) > 0
    assert registry.holders("cpu") == 0


@pytest.mark.slow
def test_the_wheel_has_the_engine_alone(tmp_path: Path):
    source = tmp_path / "source"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    options = [
        "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--wheel-dir", tmp_path,
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, source], check=True, capture_output=True, timeout=300
    )
    (wheel,) = tmp_path.glob("lightering-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    engine = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "offload").rglob("*")
        if path.suffix in (".py", ".c", ".h", ".typed")
    }
    assert "offload/py.typed" in engine
    assert fields["Version"] == offload.__version__
    assert {name for name in names if ".dist-info/" not in name} == engine
    assert [line.partition(">")[0].partition("<")[0] for line in fields.get_all("Requires-Dist")] == ["torch"]

"""The files for people and programs that find the repository: they name what is there."""

import json
import os
import re
import tomllib

import yaml

import offload
from tests import ROOT


def test_the_dockerfile_runs_the_commands_of_the_readme():
    lines = [line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1].isupper()]
    copied = [source for word, rest in lines if word == "COPY" for source in rest.split()[:-1]]
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    ran = next(rest.split()[0] for word, rest in lines if word == "RUN")
    (entry,) = (json.loads(rest) for word, rest in lines if word == "ENTRYPOINT")
    assert entry == [ran]
    assert os.access(ROOT / ran, os.X_OK)
    (command,) = (json.loads(rest) for word, rest in lines if word == "CMD")
    readme = (ROOT / "README.md").read_text()
    assert " ".join([*entry, *command]) in readme
    assert f"`{ran} pytest`" in readme
    # An environment of the host would replace that of the image.
    assert ".venv" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_image_has_a_python_that_the_project_supports():
    (version,) = re.findall(r"^FROM python:3\.(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    lowest, above = re.findall(
        r"3\.(\d+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    assert int(lowest) <= int(version) < int(above)


def test_citation_and_changelog_are_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "authors"} <= citation.keys()
    assert citation["title"].lower() == project["name"]
    assert (citation["version"], citation["license"]) == (offload.__version__, project["license"])
    assert f"\n## {offload.__version__} " in (ROOT / "CHANGELOG.md").read_text()

"""dataset.folder: one folder, a list, repeats, and what is refused."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from training.data.captioned.folders import folders_of
from training.errors import UserError


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("cats", "dogs", "kohya/10_cat", "cats/old"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "repeats"),
    [
        ("ROOT/cats", {"cats": 1}),
        ("[ROOT/dogs,ROOT/cats]", {"dogs": 1, "cats": 1}),
        ("{ROOT/dogs:1,ROOT/cats:3}", {"dogs": 1, "cats": 3}),
        ("{ROOT/kohya/10_cat:10}", {"kohya/10_cat": 10}),
        ("{ROOT/kohya:1}", {"kohya": 1}),
    ],
)
def test_what_a_command_line_gives(folders: Path, given: str, repeats: dict[str, int]) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"dataset.folder={given.replace('ROOT', str(folders))}"])
    found = folders_of(override.value())
    assert list(found.items()) == [(folders / name, count) for name, count in repeats.items()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ROOT/birds", r"dataset\.folder=.*birds: no such folder"),
        ("", r"dataset\.folder=: no such folder"),
        ([], r"dataset\.folder is empty: give dataset\.folder=DIR, \[DIR, DIR\] or \{DIR: repeats\}$"),
        ({}, r"dataset\.folder is empty"),
        (None, r"dataset\.folder=None: must be DIR, \[DIR, DIR\] or \{DIR: repeats\}$"),
        ([3], r"dataset\.folder=\[3\]: must be DIR"),
        ({"ROOT/cats": 0}, r"dataset\.folder=\{.*cats: 0\}: repeats must be a whole number of at least 1$"),
        ({"ROOT/cats": 1.5}, r"dataset\.folder=\{.*cats: 1\.5\}: repeats must be"),
        ({"ROOT/cats": True}, r"dataset\.folder=\{.*cats: True\}: repeats must be"),
        (["ROOT/cats", "ROOT/cats"], r"dataset\.folder: .*cats and .*cats have the same pictures"),
        (["ROOT/cats/old", "ROOT/cats"], r"dataset\.folder: .*cats and .*old have the same pictures"),
        (["ROOT/cats", "ROOT/cats/old"], r"dataset\.folder: .*old and .*cats have the same pictures"),
        ("ROOT/kohya", r".*kohya: 10_cat is a name with repeats, .*\{ROOT/kohya/10_cat: 10\} .* or \{ROOT/kohya: 1\}"),
        (["ROOT/kohya/10_cat"], r".*: 10_cat is a name with repeats, which are not read: .*\{ROOT/kohya/10_cat: 10\}"),
    ],
)
def test_other_values_are_refused(folders: Path, given: object, message: str) -> None:
    def rooted(value: object) -> object:
        if isinstance(value, dict):
            return {rooted(name): count for name, count in value.items()}
        if isinstance(value, list):
            return [rooted(name) for name in value]
        return value.replace("ROOT", str(folders)) if isinstance(value, str) else value

    with pytest.raises(UserError, match=f"^{message.replace('ROOT', str(folders))}"):
        folders_of(rooted(given))

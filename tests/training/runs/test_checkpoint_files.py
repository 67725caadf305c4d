"""The names of checkpoints, and what stands beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.runs.checkpoint_files import checkpoints_in, folder_of, free_aside, partials_in, step_of


@pytest.mark.parametrize("step", [0, 7, 12_345_678, 10**12])
def test_a_folder_has_its_step_in_its_name(tmp_path: Path, step: int):
    assert step_of(folder_of(tmp_path, step)) == step


@pytest.mark.parametrize(
    "name", ["step-7", "step-0000000x", "step-00000007.partial", "step-00000007.aside", "xstep-00000007", "manifest"]
)
def test_other_names_have_no_step(name: str):
    assert step_of(Path(name)) is None


def test_the_newest_come_first_and_nothing_but_folders(tmp_path: Path):
    for step in (3, 200_000_000, 20, 100):
        folder_of(tmp_path, step).mkdir(parents=True)
    home = folder_of(tmp_path, 0).parent
    (home / "step-00000500").write_text("a file")
    (home / "step-00000600.partial").mkdir()
    assert [step_of(folder) for folder in checkpoints_in(home)] == [200_000_000, 100, 20, 3]
    assert [path.name for path in partials_in(home)] == ["step-00000600.partial"]
    assert checkpoints_in(tmp_path / "nowhere") == []


def test_a_folder_is_set_aside_under_a_free_name(tmp_path: Path):
    folder = folder_of(tmp_path, 3)
    folder.parent.mkdir()
    found = []
    for _ in range(3):
        folder.mkdir()
        found.append(folder.rename(free_aside(folder)).name)
    assert found == ["step-00000003.aside", "step-00000003.aside-2", "step-00000003.aside-3"]
    folder.with_name("step-00000003.aside-4").symlink_to("nowhere")
    assert free_aside(folder).name == "step-00000003.aside-5"

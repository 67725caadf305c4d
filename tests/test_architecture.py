"""The rules that keep the rooms apart, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    "offload": {"hydra", "omegaconf", "wandb", "datasets", "models", "training", "numpy"},
    "models": {"hydra", "omegaconf", "wandb", "datasets", "training", "offload"},
    "training": {"train"},
}
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
class TestSource:
    def test_imports_point_down(self, path: Path):
        room = path.relative_to(ROOT).parts[0]
        tops = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
        assert not tops & ROOMS[room]

    def test_streams_events_and_asynchronous_copies_are_made_in_one_place(self, path: Path):
        name = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text())
        if name != "offload/registry.py":
            assert not {"torch.cuda.Stream", "torch.cuda.Event", "torch.Stream", "torch.Event"} & calls(tree)
        asynchronous = any(
            keyword.arg == "non_blocking" for node in ast.walk(tree) if isinstance(node, ast.Call)
            for keyword in node.keywords
        )  # fmt: skip
        assert asynchronous == (name == "offload/transfer.py")
        assert not any(call.endswith(".record_stream") for call in calls(tree))

    def test_files_stay_readable(self, path: Path):
        assert len(path.read_text().splitlines()) <= 400


def test_tests_and_programs_stay_readable():
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").glob("*.py")):
        assert len(path.read_text().splitlines()) <= 400, path


@pytest.mark.parametrize("path", sorted((ROOT / "offload" / "modes").glob("*.py")), ids=lambda path: path.stem)
def test_no_mode_imports_another(path: Path):
    assert not {name for name in imports(ast.parse(path.read_text())) if name.startswith("offload.modes")}


def test_nothing_calls_cuda_at_import():
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                assert not any(call.startswith("torch.cuda") for call in calls(node)), path

"""The rules of the layout, checked in the source: imports, where streams are made, and a test file for each file."""

import ast
import functools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import ROOT

# The top-level packages, each with the modules that it must not import.
FORBIDDEN = {
    "offload": {"hydra", "omegaconf", "wandb", "datasets", "models", "training", "numpy", "peers"},
    "models": {"hydra", "omegaconf", "wandb", "datasets", "training", "offload", "peers"},
    "peers": {"hydra", "omegaconf", "wandb", "datasets", "training", "numpy", "train"},
    # It finds peers by the names of their classes in conf/offload alone.
    "training": {"train", "peers"},
}
# The floors of the engine, from the lowest up. A folder imports from itself and from lower floors only.
FLOORS = (
    ("torch_private",),
    (".",),
    ("streams",),
    ("memory",),
    ("weights", "activations", "microbatches"),
    ("sharing", "files"),
    ("optimizer",),
    ("speculation",),
    ("modes",),
    ("planning",),
)
# The floors inside of a folder, likewise.
INNER_FLOORS = (
    (("weights/units",), ("weights/gradients",), ("weights/prefetching",), ("weights/windows",), ("weights",)),
)
FLOOR_OF = {folder: number for number, floor in enumerate(FLOORS) for folder in floor}
INNER_FLOOR_OF = {folder: number for floors in INNER_FLOORS for number, floor in enumerate(floors) for folder in floor}
# The folders of training, from the lowest up; its own files lie below them. A folder imports from itself and from those
# before it.
TRAINING_FOLDERS = (
    "", "config", "runs", "metrics", "profiling", "data", "weights", "tasks", "checkpoints", "parallel", "settle",
    "evaluation", "planning", "run", "comparison", "sweeps", "saved_runs",
)  # fmt: skip
SOURCES = sorted(path for package in FORBIDDEN for path in (ROOT / package).rglob("*.py"))
TRAINING = sorted((ROOT / "training").rglob("*.py"))
ENGINE = sorted((ROOT / "offload").rglob("*.py"))
TESTS = ROOT / "tests"
# The one file that uses private names of torch, and the private names that other files may use as well.
TORCH_INTERNALS = ROOT / "offload" / "torch_private" / "torch_internals.py"
OPEN_NAMES = {"_version", "_parameters", "_buffers"}
PRIVATE_NAMES = set(re.findall(r"\b_[A-Za-z]\w*", TORCH_INTERNALS.read_text())) - OPEN_NAMES
# The public faces of the engine, from which all else imports, with their files; and the one program that looks inside,
# because it measures the kernels of the update one by one.
FACES = {
    "offload": ROOT / "offload" / "__init__.py",
    "offload.planning": ROOT / "offload" / "planning" / "__init__.py",
    "offload.sharing": ROOT / "offload" / "sharing" / "__init__.py",
    "offload.knobs": ROOT / "offload" / "knobs.py",
}
LOOKS_INSIDE = ROOT / "scripts" / "bench_update.py"
USERS = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "offload"]
USERS += sorted({ROOT / "train.py", *(ROOT / "scripts").glob("*.py")} - {LOOKS_INSIDE})
# The files of offload/modes that are one mode each, without those that several modes share.
SHARED_BY_MODES = {"__init__", "mode", "weight_mode", "activation_mode"}
MODES = [path for path in sorted((ROOT / "offload" / "modes").glob("*.py")) if path.stem not in SHARED_BY_MODES]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {f"{node.module}"}
    return found


def imported_modules(path: Path) -> set[Path]:
    """Returns the source files of this repository that `path` imports, also inside functions."""
    return {ROOT / Path(*name.split(".")).with_suffix(".py") for name in imports(tree_of(path))}.intersection(SOURCES)


def folder_in_engine(path: Path) -> str:
    return path.parent.relative_to(ROOT / "offload").as_posix()


def is_below(folder: str, other: str) -> bool:
    top, other_top = folder.partition("/")[0], other.partition("/")[0]
    if top == other_top:
        return INNER_FLOOR_OF[folder] < INNER_FLOOR_OF[other]
    return FLOOR_OF[top] < FLOOR_OF[other_top]


def calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def keywords(tree: ast.AST) -> set[str | None]:
    """Returns the names of the keyword arguments of all calls."""
    return {
        keyword.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords
    }  # fmt: skip


def public_names(face: Path) -> list[str]:
    """Returns the names in `__all__` of a package, from its source."""
    (names,) = (
        node.value for node in ast.parse(face.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )  # fmt: skip
    return ast.literal_eval(names)


def private_names_of_torch(tree: ast.AST) -> set[str]:
    """Returns the private names of torch that are imported or looked up, known ones on any object."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if "._" in name or name.startswith("torch.multiprocessing.reductions")}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            name = ast.unparse(node)
            if node.attr in PRIVATE_NAMES or name.split(".")[0] in ("torch", "nn", "F"):
                found.add(name)
    return found


def named(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_packages_import_what_they_may():
    def tops(path: Path) -> set[str]:
        return {name.split(".")[0] for name in imports(tree_of(path))}

    assert not named(path for path in SOURCES if tops(path) & FORBIDDEN[path.relative_to(ROOT).parts[0]])


def test_streams_events_and_asynchronous_copies_are_made_in_one_place():
    makers = {"torch.cuda.Stream", "torch.cuda.Event", "torch.Stream", "torch.Event"}
    called = {path: calls(tree_of(path)) for path in SOURCES}
    assert named(path for path in SOURCES if makers & called[path]) == ["offload/streams/registry.py"]
    asynchronous = named(path for path in SOURCES if "non_blocking" in keywords(tree_of(path)))
    assert asynchronous == ["offload/streams/transfer.py"]
    assert not named(path for path in SOURCES if any(name.endswith(".record_stream") for name in called[path]))


def test_files_stay_readable():
    files = {*SOURCES, *TESTS.rglob("*.py"), *(ROOT / "scripts").glob("*.py")}
    assert not named(path for path in sorted(files) if len(path.read_text().splitlines()) > 400)


def test_each_file_has_a_test_file_of_its_name():
    assert not named(
        path for path in SOURCES
        if path.name != "__init__.py" and not (TESTS / path.relative_to(ROOT).with_name(f"test_{path.name}")).is_file()
    )  # fmt: skip


def test_each_file_says_in_its_first_line_what_it_holds():
    def says(path: Path) -> bool:
        return bool((ast.get_docstring(tree_of(path)) or "").partition("\n")[0])

    short = {path for path in SOURCES if path.name == "__init__.py" and len(path.read_text().splitlines()) <= 1}
    assert not named(path for path in SOURCES if path not in short and not says(path))


def test_floors_import_downwards():
    wrong = []
    # The face of the engine stands on all floors.
    for path in set(ENGINE) - {FACES["offload"]}:
        folder = folder_in_engine(path)
        # Through a face every module would import every other.
        wrong += [(path, face) for face in imports(tree_of(path)) & FACES.keys() - {"offload.knobs"}]
        for other in imported_modules(path):
            imported = folder_in_engine(other)
            if imported != folder and not is_below(imported, folder):
                wrong.append((path, other))
    assert not wrong


def folder_in_training(path: Path) -> int:
    """Returns the place of a file's folder among TRAINING_FOLDERS."""
    folder, _, _ = path.parent.relative_to(ROOT / "training").as_posix().partition("/")
    return TRAINING_FOLDERS.index("" if folder == "." else folder)


def test_folders_of_training_import_downwards():
    assert not [
        (path, other) for path in TRAINING for other in imported_modules(path)
        if other.is_relative_to(ROOT / "training") and folder_in_training(other) > folder_in_training(path)
    ]  # fmt: skip


def test_private_names_of_torch_are_used_in_one_file():
    assert not named(path for path in ENGINE if path != TORCH_INTERNALS and private_names_of_torch(tree_of(path)))


def test_private_names_of_torch_are_found():
    seen = "import torch\nfrom torch._C import x\nfrom torch.nn.modules.batchnorm import _NormBase\ny = storage._cdata"
    assert private_names_of_torch(ast.parse(f"{seen}\nz = torch._foreach_add\nself._mine = tensor._version")) == {
        "torch._C.x",
        "torch.nn.modules.batchnorm._NormBase",
        "storage._cdata",
        "torch._foreach_add",
    }


def test_names_of_the_engine_come_from_its_public_faces():
    public = {f"{face}.{name}" for face, file in FACES.items() for name in public_names(file)} | FACES.keys()
    used = {
        (path.name, name) for path in USERS for name in imports(tree_of(path)) if name.partition(".")[0] == "offload"
    }
    assert not sorted((path, name) for path, name in used if name not in public)


@pytest.mark.parametrize("face", FACES)
def test_a_public_face_documents_its_names(face: str):
    described = set(re.findall(r"\b\w+\b", ast.get_docstring(ast.parse(FACES[face].read_text()))))
    assert not set(public_names(FACES[face])) - described


def test_every_folder_of_the_engine_has_a_floor():
    assert {
        folder_in_engine(path) for path in ENGINE if path != FACES["offload"]
    } == FLOOR_OF.keys() | INNER_FLOOR_OF.keys()


def test_no_modules_import_each_other_in_a_circle():
    graph = {path: imported_modules(path) for path in SOURCES}
    while leaves := [path for path, imported in graph.items() if not imported & graph.keys()]:
        for path in leaves:
            del graph[path]
    assert not graph, [str(path.relative_to(ROOT)) for path in graph]


def test_tests_import_their_helpers_by_full_name():
    """`tests.offload.helpers.late`, not `late` or `.helpers.late`."""
    paths = sorted(TESTS.rglob("*.py"))
    bare_names = {path.stem for path in paths} - FORBIDDEN.keys()
    # To parse all takes seconds.
    suspicious = re.compile(rf"^\s*(from\s*\.|(from|import)\s+({'|'.join(bare_names)})\b)", re.MULTILINE)

    def is_wrong(tree: ast.Module) -> bool:
        relative = any(node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        return relative or bool({name.partition(".")[0] for name in imports(tree)} & bare_names)

    assert not named(path for path in paths if suspicious.search(path.read_text()) and is_wrong(tree_of(path)))


def test_no_mode_imports_another():
    assert not named(path for path in MODES if imported_modules(path) & set(MODES))


def test_an_adapter_is_short_and_imports_its_system_when_it_is_used():
    adapters = sorted((ROOT / "peers").glob("*.py"))
    assert not named(path for path in adapters if path.stem != "peer" and len(path.read_text().splitlines()) > 100)
    allowed = {*sys.stdlib_module_names, "torch", "offload", "models", "peers"}

    def tops(path: Path) -> set[str]:
        outside = [node for node in tree_of(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        return {name.partition(".")[0] for name in imports(ast.Module(outside, []))}

    assert not named(path for path in adapters if tops(path) - allowed)


def test_every_folder_has_its_room_in_the_documentation():
    rooms = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("```")[1]
    described = [line.split()[0].rstrip("/") for line in rooms.strip().splitlines()]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES} | {"scripts", "tests"}
    assert sorted(described) == sorted(folders)


def test_nothing_calls_cuda_at_import():
    def is_called(path: Path) -> bool:
        body = [node for node in tree_of(path).body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        return any(call.startswith("torch.cuda") for node in body for call in calls(node))

    assert not named(path for path in SOURCES if is_called(path))

"""Before the imports: libraries that are not installed, Ctrl-C, and the setting of torch's allocator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from training.runs import starting
from training.runs.failures import explain

NAMES = (starting.ALLOCATOR_VARIABLE, *starting.OLDER_VARIABLES)

# As libraries do: torch's import swallows Ctrl-C in some of its parts, and aborts in others.
SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # A process in the background would ignore Ctrl-C.
    handled = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    arguments = [handled + argument if argument.startswith("\n") else argument for argument in arguments]
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def test_a_python_without_the_libraries_is_one_line():
    # -S leaves out what is installed.
    ended = run("-S", "train.py", "steps=1")
    assert ended.returncode == 1
    assert ended.stderr == (
        f"error: torch, hydra, omegaconf are not installed for {sys.executable}: put scripts/run.sh in front of the"
        f" command, or install: {sys.executable} -m pip install -r requirements.txt\n"
    )


@pytest.mark.parametrize("program", ["train.py", "scripts/show.py"])
def test_native_windows_is_one_line(program: str):
    as_windows = f"import runpy, sys; sys.platform = 'win32'; runpy.run_path('{program}', run_name='__main__')"
    # -S: before any library is looked for.
    ended = run("-S", "-c", as_windows, PYTHONPATH=str(ROOT))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: native Windows is not supported: run it on Linux, or in WSL (wsl --install)\n"


@pytest.mark.parametrize(("command", "library"), [("train.py", "hydra"), ("scripts/generate.py RUN PROMPT", "torch")])
def test_a_program_ends_where_an_import_swallows_ctrl_c(tmp_path: Path, command: str, library: str):
    (tmp_path / f"{library}.py").write_text(SWALLOWS + "raise SystemExit('the import ran on')")
    ended = run(*command.split(), PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


def test_an_interrupted_program_cleans_up_and_ends_with_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended, starting.interrupt_in_one_line():
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "error: interrupted\n")


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch):
    for name in NAMES:
        # Set first, so that the values of before come back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("nothing_set")
def test_segments_expand_where_nothing_is_set():
    assert not starting.segments_expand()
    starting.expand_segments()
    assert starting.segments_expand()
    assert [os.environ.get(name) for name in NAMES] == ["expandable_segments:True", None, None]


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("value", "expand"),
    [("expandable_segments:False", False), ("max_split_size_mb:64", False), ("a:1,expandable_segments:True", True)],
)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expand: bool):
    monkeypatch.setenv(name, value)
    starting.expand_segments()
    assert {key: os.environ[key] for key in NAMES if key in os.environ} == {name: value}
    assert starting.segments_expand() is expand


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize("expand", [False, True])
def test_too_little_memory_names_the_setting_where_it_is_not_made(monkeypatch: pytest.MonkeyPatch, expand: bool):
    monkeypatch.setenv(NAMES[0], f"expandable_segments:{expand}")
    reason = explain(RuntimeError("CUDA error: out of memory")).reason
    advice = f"; {NAMES[0]}=expandable_segments:True before the command joins free pieces of memory"
    assert reason.endswith(advice) is not expand
    assert ("segments" in reason) is not expand


# What train.py does, and scripts that import torch before they call it.
AS_TRAIN = "from training.runs import starting; starting.expand_segments(); import torch"
AS_SCRIPT = "import torch; from training.runs import starting; starting.expand_segments()"
SHOW = "torch.ones(1, device='cuda'); print([s['is_expandable'] for s in torch.cuda.memory_snapshot()])"


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("start", [AS_TRAIN, AS_SCRIPT])
def test_the_setting_is_in_force_on_a_gpu(start: str):
    command = [sys.executable, "-c", f"{start}; {SHOW}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout == "[True]\n"


def test_the_last_that_is_due_at_the_end_spares_the_collections():
    """Of the interpreter, which come after it."""
    late = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))"
    early = late.replace("import atexit, gc; ", "")
    program = f"import atexit, gc; {early}; from training.runs import starting; starting.end_soon(); {late}"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    before, after = map(int, ended.stdout.split())
    assert before == 0 < after

"""A run that ends with `_exit` at a call that changes its files, for each call of a whole run that resumes and saves.

Before each open, write, fsync, rename, removal, mkdir and truncation, and also in the middle of each write. The run
begins with two checkpoints, of which its save removes the older one, and with what a killed save left.
"""

import builtins
import io
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Lock

from tests.faults.outcome import Outcome
from tests.faults.runs import RESIDENT, Whole, modes_and_optimizers, newest, run
from training.runs.checkpoint_files import folder_of
from training.runs.files import partial_path

STEPS = 3
STATUS = 77
"""with which a run exits at its call"""

Call = tuple[str, str, int]
"""the operation, the file in the run's directory, and how often this file had this operation before"""


class Calls:
    """Counts the calls of this process that change files under `root`, and exits at one of them.

    Args:
        root: a folder; other files are not counted.
        reached: called with each call.
    """

    def __init__(self, root: Path, reached: Callable[[Call], None]):
        self._root = f"{root.resolve()}/"
        self._reached = reached
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()

    def install(self) -> None:
        """Takes the place of the functions of `os` and of `open`, for the rest of the process."""
        self._os = {name: getattr(os, name) for name in ("open", "fsync", *BY_PATH)}
        for name in BY_PATH:
            setattr(os, name, self._by_path(name))
        os.open, os.fsync = self._os_open, self._fsync
        self._open = builtins.open
        builtins.open = io.open = self._opened

    def count(self, operation: str, path: str | os.PathLike, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = os.path.abspath(path)
        if not path.startswith(self._root):
            return
        name = path.removeprefix(self._root)
        with self._lock:
            self._counts[operation, name] += 1
            self._reached((operation, name, self._counts[operation, name]))

    def _by_path(self, name: str) -> Callable:
        function = self._os[name]

        def counted(path, *arguments, **named):
            self.count(name, path, named.get("dir_fd"))
            return function(path, *arguments, **named)

        return counted

    def _os_open(self, path, flags, *arguments, **named):
        self.count("open", path, named.get("dir_fd"))
        return self._os["open"](path, flags, *arguments, **named)

    def _fsync(self, descriptor):
        self.count("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        return self._os["fsync"](descriptor)

    def _opened(
        self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None
    ):
        if isinstance(file, int) or opener is not None or not set(mode) & set("wxa"):
            return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        self.count("open", file)
        raw = CountedFile(self, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


BY_PATH = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "truncate", "link", "symlink")


class CountedFile(io.FileIO):
    """A file whose writes are counted, twice: at their start, and when half of the bytes are written."""

    def __init__(self, calls: Calls, file, mode: str):
        super().__init__(file, mode)
        self._calls = calls

    def write(self, data) -> int:
        """Writes all of `data`."""
        data = memoryview(data).cast("B")
        self._calls.count("write", self.name)
        half = len(data) // 2
        if half and super().write(data[:half]) != half:
            return half
        self._calls.count("half of a write", self.name)
        return half + super().write(data[half:])


def survey(work: Path, outcome: Outcome, seed: int) -> None:
    """Ends a run at each of its calls, or at `outcome.planned` of them, spread evenly."""
    whole, choices = Whole.of(work / "whole", STEPS), modes_and_optimizers(seed)
    run_dir, begun = work / "run", work / "begun"
    _begin(begun)
    shutil.copytree(begun, run_dir)
    calls = _calls_of(run_dir)
    if problem := whole.problem(run_dir, STEPS):
        raise RuntimeError(f"counting the calls changes the run: {problem}")
    outcome.planned = min(outcome.planned, len(calls))
    chosen = [calls[number * len(calls) // outcome.planned] for number in range(outcome.planned)]
    for call in outcome.in_time(chosen):
        shutil.rmtree(run_dir)
        shutil.copytree(begun, run_dir)
        operation, name, count = call
        ended = run(run_dir, next(choices), STEPS, before=partial(_exit_at, run_dir, call))
        problem = ended.problem(STATUS) or whole.problem(run_dir)
        if newest(run_dir) < STEPS - 1:
            problem = f"the newest checkpoint is of step {newest(run_dir)}"
        resumed = run(run_dir, next(choices), STEPS)
        problem = problem or resumed.problem() or whole.problem(run_dir, STEPS)
        outcome.add(operation, f"{operation} number {count} of {name}", problem)


def _begin(run_dir: Path) -> None:
    """Makes a run that has two checkpoints, and what a killed save left."""
    if problem := run(run_dir, RESIDENT, STEPS - 1).problem():
        raise RuntimeError(problem)
    leftover = partial_path(folder_of(run_dir, 9))
    leftover.mkdir()
    (leftover / "state.json").write_text("{")


def _calls_of(run_dir: Path) -> list[Call]:
    """Returns the calls of a whole run, in their order."""
    record = run_dir.with_name("calls")

    def recorded() -> None:
        # A file of its own, because the run ends without returning here.
        descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        Calls(run_dir, lambda call: os.write(descriptor, ("\t".join(map(str, call)) + "\n").encode())).install()

    if problem := run(run_dir, RESIDENT, STEPS, before=recorded).problem():
        raise RuntimeError(problem)
    return list(_read(record))


def _read(record: Path) -> Iterator[Call]:
    for line in record.read_text().splitlines():
        operation, name, count = line.split("\t")
        yield operation, name, int(count)


def _exit_at(run_dir: Path, wanted: Call) -> None:
    def reached(call: Call) -> None:
        if call == wanted:
            sys.stdout.flush()
            os._exit(STATUS)

    Calls(run_dir, reached).install()

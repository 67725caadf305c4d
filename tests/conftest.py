"""Sets up every pytest run: the worker processes, and the signals that tests send."""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.logging import catching_logs

# More threads have nothing to do for tensors this small, and wait actively: on a busy machine ten times as long. Before
# torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of images that set it: each program that a test starts would compile the repository again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# Loggers that hand nothing on to the root, and of how many loggers they were found.
_apart: list[logging.Logger] = []
_looked_at = 0
_attach = catching_logs.__enter__


def pytest_configure(config: pytest.Config) -> None:
    catching_logs.__enter__ = _attached
    _compile_once(config)
    # A process that was started in the background, as by a CI runner, ignores Ctrl-C (under nohup also SIGHUP). The
    # programs that tests start to interrupt them would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    # What is imported stays: looking for garbage among it takes an eighth of the time.
    gc.disable()
    if hasattr(session.config, "workerinput"):
        # Before diffusers does, which would import all of torch's compiler with them. Not at the top: it imports torch.
        from models.quiet_imports import import_quantisers

        import_quantisers()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    begun = set()
    for item in items:
        if not item.get_closest_marker("sampled"):
            continue
        # A checksum of its name and not its place: so all values of one parameter meet those of another. Of a test with
        # few variants, at least the first always runs.
        function = item.nodeid.partition("[")[0]
        if function in begun and zlib.crc32(item.nodeid.encode()) % 5:
            item.add_marker(pytest.mark.slow)
        begun.add(function)
    # The rest takes 15 minutes on two cores. `pytest -m slow`, or their file alone, runs them; what they test is tested
    # by others too, in fewer cases.
    if config.option.markexpr or _names_files(config):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_runtest_logstart() -> None:
    _look_at_loggers()


def pytest_collection_finish() -> None:
    # By now nearly everything is imported. A collection that looks at all of it takes a second, and tests make many;
    # young objects are looked at more rarely too.
    gc.freeze()
    gc.set_threshold(100_000)
    # It counts them one by one, in 30 ms, and each run within this process asks whether there are any.
    gc.get_freeze_count = lambda: 1
    _seed_no_absent_devices()


@pytest.fixture
def small_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the activations of tiny models leave the device, in runs within this process."""
    # Not at the top: it imports torch.
    from tests.offload.helpers.small import swap_small

    swap_small(monkeypatch)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Decides what `-n auto`, the default in pyproject.toml, means: 0 for no workers, None for one a core.

    A run of single files has no workers, because starting them takes longer than they save. Neither has a run that
    may contain tests of the GPU: several processes would share its memory and disturb each other's timings.
    """
    if _names_files(config):
        return 0
    if "not gpu" in config.option.markexpr:
        return None
    # Not at the top: it takes seconds, and a worker must set OMP_NUM_THREADS first.
    import torch

    return 0 if torch.cuda.is_available() else None


def _compile_once(config: pytest.Config) -> None:
    """Sets $CC, for this process and those that it starts, to a compiler that makes each library once a run."""
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None or "LIGHTERING_COMPILED" in os.environ:
        return
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    os.environ["LIGHTERING_COMPILED"], os.environ["LIGHTERING_COMPILER"] = folder.name, compiler
    os.environ["CC"] = str(Path(__file__).parent / "compile_once.sh")


def _attached(self: catching_logs) -> logging.Handler:
    """Does what pytest's does.

    That looks at each of a thousand loggers of libraries six times a test; this once, and where there are more.
    """
    if self.level is not None:
        return _attach(self)
    if len(logging.root.manager.loggerDict) != _looked_at:
        _look_at_loggers()
    self.attached_loggers += (logging.root, *_apart)
    for logger in self.attached_loggers:
        logger.addHandler(self.handler)
    return self.handler


def _look_at_loggers() -> None:
    global _looked_at
    loggers = logging.root.manager.loggerDict
    _looked_at, _apart[:] = len(loggers), [each for each in loggers.values() if not getattr(each, "propagate", True)]


def _seed_no_absent_devices() -> None:
    """Keeps torch.manual_seed from queueing a call, with the stack as text, for each kind of device that is missing.

    That takes 4 ms, and tests seed tens of thousands of times.
    """
    torch = sys.modules.get("torch")
    for devices in (torch.cuda, torch.mtia, torch.xpu) if torch else ():
        if not devices.is_available():
            devices.manual_seed_all = lambda seed: None


def _names_files(config: pytest.Config) -> bool:
    return all(Path(argument.partition("::")[0]).is_file() for argument in config.args)

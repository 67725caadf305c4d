"""The directory of a run: refused commands leave earlier results alone, and one run at a time writes there."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.training.helpers.in_process import ROOT, TINY_RUN, command_here, run_here, train_tiny
from training.comparison.runs import read_run
from training.errors import UserError
from training.runs import directory
from training.runs.directory import fresh_directory, holds_results, locked, register_fresh


def content(folder: Path) -> dict[str, bytes]:
    """Returns the content of all files except the lock, which names the last process that held it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["train/step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_tiny(folder, "checkpoint.every=3")
    return folder


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished_once, tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("seed=3",), "has checkpoints of another run"),
        (("resume=auto", "optimizer.lr=1"), "is not the checkpoint's in optimizer.lr"),
        (("steps=-1",), "steps=-1: must be at least 1, or null"),
        (("plan=true", "offload=layer_stream"), "has the metrics.jsonl of another run"),
        (("resume=auto", "offload=bounce_linear", "offload.resident=99"), "offload.resident=99: the model has"),
    ],
)
@pytest.mark.slow
def test_a_refused_command_leaves_a_finished_run_as_it_was(finished: Path, overrides: tuple[str, ...], message: str):
    before = content(finished)
    assert message in train_tiny(finished, "checkpoint.every=3", *overrides, status=1)
    assert content(finished) == before
    run = read_run(finished)
    assert (run.status, run.config["seed"], run.choices["offload"]) == ("ok", "0", "none")


def test_a_refused_command_leaves_a_killed_run_as_it_was(finished: Path):
    (finished / "summary.json").unlink()
    train_tiny(finished, "steps=-1", status=1)
    assert read_run(finished).status == "killed"


def test_a_directory_with_a_configuration_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    line = train_tiny(tmp_path, status=1)
    assert f"{tmp_path / 'config.yaml'}: not written by a run, which would replace it: choose" in line
    assert content(tmp_path) == {"config.yaml": b"mine: 1\n"}
    assert not (tmp_path / ".lock").exists()


def test_the_folder_of_the_program_takes_no_run():
    before = set(os.listdir(ROOT))
    with pytest.raises(UserError, match="the folder of this program: choose a directory of its own"), locked(ROOT):
        pass
    assert set(os.listdir(ROOT)) == before


@pytest.mark.slow
def test_a_run_that_is_refused_in_a_directory_of_its_own_says_why_there(tmp_path: Path):
    train_tiny(tmp_path, "steps=-1", "offload=layer_stream", status=1)
    run = read_run(tmp_path)
    assert (run.status, run.reason) == ("failed", "steps=-1: must be at least 1, or null")
    assert (run.config["steps"], run.choices["offload"]) == ("-1", "layer_stream")
    # Nothing is lost when the next one takes its place.
    line = train_tiny(tmp_path, "seed='${nowhere}'", status=1)
    assert f"error: {read_run(tmp_path).reason}\n" == line
    train_tiny(tmp_path, "steps=2")
    assert read_run(tmp_path).status == "ok"


def test_a_run_says_what_it_was_composed_of(finished: Path):
    assert not (finished / ".hydra").exists()
    made_of = yaml.safe_load((finished / "choices.yaml").read_text())
    assert made_of["choices"]["dataset"] == "synthetic"
    assert made_of["overrides"] == [*TINY_RUN, "checkpoint.every=3"]


def test_a_new_run_does_not_mix_with_the_metrics_of_another(tmp_path: Path, finished_once: Path):
    run_here(tmp_path, *TINY_RUN)
    before = content(tmp_path)
    checkpoint = f"resume={finished_once}/checkpoints/step-00000003"
    for overrides in (("seed=5",), ("checkpoint.every=3", checkpoint)):
        with pytest.raises(UserError, match=f"{tmp_path} has the metrics.jsonl of another run: choose another place"):
            run_here(tmp_path, *TINY_RUN, *overrides)
    assert content(tmp_path) == before
    assert steps(tmp_path) == [2, 4, 6]


def test_a_job_that_is_queued_again_before_its_first_checkpoint_begins_anew(tmp_path: Path):
    run_here(tmp_path, *TINY_RUN)
    # One that was killed has none.
    (tmp_path / "summary.json").unlink()
    run_here(tmp_path, *TINY_RUN, "resume=auto", "checkpoint.every=100", "log_every=3")
    assert steps(tmp_path) == [3, 6]


@pytest.mark.parametrize("logged", ["", '{"train/step": 2'])
def test_where_nothing_was_logged_a_run_begins(tmp_path: Path, logged: str):
    (tmp_path / "metrics.jsonl").write_text(logged)
    run_here(tmp_path, *TINY_RUN)
    assert steps(tmp_path) == [2, 4, 6]


@pytest.mark.parametrize(
    ("files", "holds"),
    [
        ({}, False),
        ({"summary.json": '{"status": "failed", "reason": "no"}'}, False),
        ({"summary.json": '{"status": "planned", "planned/perf/step_ms": 2.0}'}, True),
        ({"summary.json": "{"}, True),
        ({"metrics.jsonl": '{"train/step": 2}\n'}, True),
        ({"checkpoints/step-00000003/state.json": ""}, True),
    ],
)
def test_what_counts_as_results(tmp_path: Path, files: dict[str, str], holds: bool):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert holds_results(tmp_path) is holds


def test_the_lock_goes_with_its_process(tmp_path: Path):
    with (
        locked(tmp_path),
        pytest.raises(UserError, match=rf"another run writes to .*process {os.getpid()}"),
        locked(tmp_path),
    ):
        pass
    script = (
        "import os, signal, sys; from pathlib import Path; from training.runs.directory import locked\n"
        "with locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, timeout=300).returncode == -signal.SIGKILL
    with locked(tmp_path):
        pass


def test_where_locks_are_unknown_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def unknown(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(directory.fcntl, "flock", unknown)
    with locked(tmp_path):
        assert "cannot be locked" in caplog.text


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read_only(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(directory.os, "open", read_only)
    wanted = rf"^{tmp_path / '.lock'}: cannot be written \(Read-only file system\): choose .*, hydra\.run\.dir=PATH$"
    with pytest.raises(UserError, match=wanted), locked(tmp_path):
        pass


def test_each_of_many_gets_a_directory_of_its_own(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(fresh_directory, [str(tmp_path / "day" / "second")] * 8))
    assert sorted(made) == sorted(
        str(tmp_path / "day" / name) for name in ("second", *(f"second-{number}" for number in range(2, 9)))
    )
    assert all(Path(path).is_dir() for path in made)


def test_all_readers_of_a_configuration_get_one_directory(tmp_path: Path):
    register_fresh()
    config = OmegaConf.create({"day": str(tmp_path), "dir": "${fresh:${day}/second}"})
    assert config.dir == config.dir == config.copy().dir == str(tmp_path / "second")
    assert OmegaConf.create({"day": str(tmp_path), "dir": "${fresh:${day}/second}"}).dir == str(tmp_path / "second-2")


def test_a_run_makes_one_directory_and_help_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory, "fresh_directory", lambda path: fresh_directory(str(tmp_path / path)))
    for arguments, made in ((("--cfg", "job"), 0), (("steps=0",), 1)):
        command_here(*arguments)
        assert len([*tmp_path.glob("outputs/*/*")]) == made

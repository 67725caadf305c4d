import logging
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from enum import Enum
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf
from PIL import Image

from tests.training.helpers.time_limit import time_limit
from tests.training.helpers.wandb_files import records_of, summary_of, wandb_runs, without_internals
from training.errors import UserError
from training.metric_names import COUNTS, METRIC_KEYS
from training.metrics import wandb_tracker
from training.metrics.wandb_tracker import Tracker, plain
from training.runs.records import MetricsWriter, read_metrics

FAKE_KEY = "0123456789" * 4
# No test of what wandb does may meet the end of a wait because the machine is busy.
PATIENT_S = 600.0
# The same for the trackers of other processes.
PATIENT = """
import sys, psutil
from pathlib import Path
from training.metrics import wandb_tracker
from training.metrics.wandb_tracker import Tracker
wandb_tracker._START_LIMIT_S = wandb_tracker._FINISH_LIMIT_S = 600.0
wandb_tracker._SETTINGS |= {"init_timeout": 600.0, "finish_timeout": 600.0}
"""


@pytest.fixture(autouse=True)
def newcomer(tmp_path, monkeypatch, caplog):
    """A user without wandb account, settings or key, whose home is tmp_path/home."""
    home = tmp_path / "home"
    home.mkdir()
    set_here = [name for name in os.environ if name.startswith(("WANDB_", "XDG_", "OFFLOAD_"))]
    for variable in {"WANDB_CACHE_DIR", "WANDB_DATA_DIR", *set_here}:
        monkeypatch.setenv(variable, "")  # so that what a Tracker puts there is undone after the test
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / ".netrc"))
    monkeypatch.setattr(wandb_tracker, "_START_LIMIT_S", PATIENT_S)
    monkeypatch.setattr(wandb_tracker, "_FINISH_LIMIT_S", PATIENT_S)
    patient = {"init_timeout": PATIENT_S, "finish_timeout": PATIENT_S}
    monkeypatch.setattr(wandb_tracker, "_SETTINGS", wandb_tracker._SETTINGS | patient)
    caplog.set_level(logging.INFO, logger="training.metrics.wandb_tracker")
    # A killed service leaves its socket there; the path must stay short.
    with tempfile.TemporaryDirectory(prefix="w") as sockets:
        monkeypatch.setenv("TMPDIR", sockets)
        yield


@pytest.fixture
def gives_up_online(monkeypatch):
    """Ends an attempt to start a run online after a second, and no other."""
    init = Tracker._init

    def quick(self, wandb, **arguments):
        with monkeypatch.context() as patch:
            if arguments["mode"] == "online":
                patch.setitem(wandb_tracker._SETTINGS, "init_timeout", 1.0)
            return init(self, wandb, **arguments)

    monkeypatch.setattr(Tracker, "_init", quick)


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def tracking_lines(caplog, level):
    records = [record for record in caplog.records if record.name == "training.metrics.wandb_tracker"]
    return [record.getMessage() for record in records if record.levelno == level]


def warnings(caplog):
    return tracking_lines(caplog, logging.WARNING)


def service():
    (process,) = [
        child
        for child in psutil.Process().children()
        if child.name().startswith("wandb-core") and child.status() != psutil.STATUS_ZOMBIE
    ]
    return process


def recorded(run_dir, step=1, mode="offline", **options):
    """The only wandb run of a tracker that records `step`."""
    tracker = Tracker(mode, run_dir=run_dir, config={}, **options)
    tracker.log({"train/step": step}, step)
    tracker.finish({})
    (wandb_run,) = wandb_runs(run_dir)
    return wandb_run


def full_record(step):
    values = {key: 1.5 * step + place / 7 for place, key in enumerate(METRIC_KEYS)}
    counts = {key: 8 * step for key in COUNTS if key in METRIC_KEYS}
    return values | counts | {"train/step": step, "train/skipped_steps": step // 10}


@pytest.mark.slow
def test_an_offline_run_reads_back_equal_to_metrics_jsonl(run_dir, tmp_path, caplog, capfd):
    config = {"seed": 1, "model": {"name": "tiny", "layers": [1, 2]}, "note": None}
    names = {"project": "lightering", "name": "tiny-none-1", "tags": ["offload=none"]}
    tracker = Tracker("auto", run_dir=run_dir, config=config, **names)
    writer = MetricsWriter(run_dir)
    for step in (10, 20, 30):
        writer.write(full_record(step))
        tracker.log(full_record(step), step)
    tracker.finish({})

    (wandb_run,) = wandb_runs(run_dir)
    summary = summary_of(wandb_run)
    assert without_internals(summary["summary"]) == read_metrics(run_dir)[-1]
    assert summary["config"] == config
    assert {name: summary[name] for name in names} == names
    assert (summary["state"], summary["exit_code"]) == ("finished", 0)
    history = [without_internals(line["item"]) for line in records_of(wandb_run, "history")]
    assert history == read_metrics(run_dir)
    step_metrics = {line.get("glob_name"): line.get("step_metric") for line in records_of(wandb_run, "metric")}
    assert step_metrics["*"] == "train/step"

    (line,) = tracking_lines(caplog, logging.INFO)
    assert "no API key" in line
    assert f"wandb sync {wandb_run}" in line
    assert warnings(caplog) == []
    assert capfd.readouterr() == ("", "")  # nothing from wandb itself
    assert list((tmp_path / "home").iterdir()) == []  # nothing written outside the run's directory


def test_what_is_zero_in_every_step_is_not_logged(tmp_path, monkeypatch):
    logged = []
    run = SimpleNamespace(log=lambda values, **_: logged.append([*values]))
    monkeypatch.setattr(Tracker, "_submit", lambda self, task: task(run))
    tracker = Tracker("disabled", run_dir=tmp_path, config={})
    for rss in (0.0, 2.0, 0.0):
        tracker.log({"transfer/h2d_gib": 0.0, "train/lr": 0.0, "memory/rss_gib": rss}, 1)
    assert logged == [["train/lr"], *2 * [["train/lr", "memory/rss_gib"]]]


@pytest.mark.parametrize("system", [False, True])
def test_the_load_of_the_machine_is_sampled_where_asked(run_dir, monkeypatch, system):
    given = {}
    monkeypatch.setattr("wandb.init", lambda **arguments: given.update(arguments["settings"]))
    Tracker("offline", run_dir=run_dir, config={}, system=system).finish({})
    assert given["x_disable_stats"] is not system


def test_runs_whose_folder_is_that_of_a_sweep_are_all_synced_from_there(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "a sweep"))
    for _ in range(2):
        Tracker("offline", run_dir=run_dir, config={}).finish({})
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run", str(tmp_path / "a sweep" / "wandb")]
    assert b"Would sync 2 run(s)" in subprocess.run(command, capture_output=True, timeout=300).stderr


def test_an_empty_variable_counts_as_one_that_is_not_set(run_dir, monkeypatch, caplog):
    for name in ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_RUN_ID", "WANDB_CONSOLE", "WANDB_TAGS", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "")
    assert summary_of(recorded(run_dir, mode="auto"))["state"] == "finished"
    (line,) = tracking_lines(caplog, logging.INFO)
    assert "no API key" in line
    assert warnings(caplog) == []


def test_the_closing_summary_replaces_last_values_and_a_failure_is_marked(run_dir):
    tracker = Tracker("offline", run_dir=run_dir, config={})
    tracker.log({"train/step": 1, "perf/step_ms": 900.0, "train/loss": 3.0}, 1)
    tracker.finish({"perf/step_ms": 20.0, "train/first_loss": 3.0, "status": "failed"}, exit_code=1)
    tracker.finish({"perf/step_ms": 0.0})  # a second finish does nothing
    tracker.log({"perf/step_ms": 0.0}, 2)
    (wandb_run,) = wandb_runs(run_dir)
    summary = summary_of(wandb_run)
    assert without_internals(summary["summary"]) == {
        "train/step": 1, "perf/step_ms": 20.0, "train/loss": 3.0, "train/first_loss": 3.0, "status": "failed"
    }  # fmt: skip
    assert summary["exit_code"] == 1


@pytest.mark.parametrize("variable", ["OFFLOAD_SWEEP_GROUP", "WANDB_RUN_GROUP"])
@pytest.mark.slow
def test_group(run_dir, monkeypatch, variable):
    monkeypatch.setenv(variable, "mine")
    assert records_of(recorded(run_dir), "run")[0]["run_group"] == "mine"


def test_a_service_killed_in_mid_run_warns_once(run_dir, tmp_path, caplog):
    tracker = Tracker("offline", run_dir=run_dir, config={})
    tracker.log({"train/step": 1}, 1)
    process = service()
    process.kill()
    psutil.wait_procs([process], timeout=300)
    # Less than the limit of a wait that nothing ends.
    with time_limit(300):
        for step in range(2, 50):
            tracker.log({"train/step": step}, step)
        tracker.finish({"status": "ok"})
    (warning,) = warnings(caplog)
    assert "tracking stopped" in warning
    assert "\n" not in warning

    next_dir = tmp_path / "next"
    next_dir.mkdir()
    assert summary_of(recorded(next_dir, 5))["step"] == 5


def test_a_service_of_a_parent_process_is_left_alone(run_dir, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_SERVICE", f"3-{os.getppid()}-unix-/nowhere/socket")
    assert summary_of(recorded(run_dir))["step"] == 1
    assert warnings(caplog) == []


def test_a_service_that_hangs_is_ended_within_the_limit(run_dir, monkeypatch, caplog):
    monkeypatch.setattr(wandb_tracker, "_FINISH_LIMIT_S", 0.5)
    tracker = Tracker("offline", run_dir=run_dir, config={})
    process = service()
    process.send_signal(signal.SIGSTOP)
    # No answer comes before `finish` ends the service: a call that waited for one would not return.
    with time_limit(300):
        tracker.log({"train/step": 1}, 1)
        tracker.finish({})
    (warning,) = warnings(caplog)
    assert "did not finish within" in warning
    # One that was killed takes a moment to end.
    _, left = psutil.wait_procs([process], timeout=300)
    assert not left


def test_records_that_no_one_takes_do_not_pile_up(run_dir, monkeypatch, caplog):
    monkeypatch.setattr(wandb_tracker, "_QUEUE_LENGTH", 20)
    tracker = Tracker("offline", run_dir=run_dir, config={})
    service().send_signal(signal.SIGSTOP)
    large = {"text": "x" * 2**20}  # fills the socket
    for step in range(1, 100):
        tracker.log(large | {"train/step": step}, step)
    tracker.finish({})
    (warning,) = warnings(caplog)
    assert "does not answer" in warning


def test_a_thread_that_cannot_start_is_one_warning(run_dir, monkeypatch, caplog):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    tracker = Tracker("offline", run_dir=run_dir, config={})
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.finish({})
    (warning,) = warnings(caplog)
    assert warning.startswith("tracking stopped: RuntimeError: can't start new thread; the run is unharmed, ")
    assert tracker.id is None


def test_a_start_that_hangs_is_left_behind(run_dir, monkeypatch, caplog):
    import wandb

    monkeypatch.setattr(wandb_tracker, "_START_LIMIT_S", 0.2)
    go = threading.Event()
    monkeypatch.setattr(wandb, "setup", lambda settings: go.wait(PATIENT_S))
    # Nothing ends the start before: a call that waited for it would not return.
    with time_limit(300):
        tracker = Tracker("offline", run_dir=run_dir, config={})
        tracker.log({"train/step": 1}, 1)
    go.set()
    tracker.finish({})
    (warning,) = warnings(caplog)
    assert "did not start within" in warning


@pytest.mark.parametrize("network", ["refused", "silent"])
@pytest.mark.slow
def test_a_key_without_network_falls_back_to_offline(run_dir, monkeypatch, caplog, network, gives_up_online):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if network == "silent":
            server.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
        with time_limit(300):
            wandb_run = recorded(run_dir, 3, mode="auto")  # and none from the attempt
    assert without_internals(summary_of(wandb_run)["summary"]) == {"train/step": 3}
    (warning,) = warnings(caplog)
    assert f"wandb sync {wandb_run}" in warning
    assert "\n" not in warning
    assert FAKE_KEY not in caplog.text


@pytest.mark.parametrize("source", ["tracking.mode", "WANDB_MODE", "bad key"])
def test_online_without_a_usable_key_warns_once_and_records_offline(run_dir, monkeypatch, caplog, source):
    if source == "WANDB_MODE":
        monkeypatch.setenv("WANDB_MODE", "online")
    if source == "bad key":
        monkeypatch.setenv("WANDB_API_KEY", "short")
    wandb_run = recorded(run_dir, mode="online" if source == "tracking.mode" else "auto")
    assert wandb_run.name.startswith("offline-run-")
    (warning,) = warnings(caplog)
    assert f"wandb sync {wandb_run}" in warning


def test_on_a_terminal_nothing_is_asked(run_dir):
    code = f"{PATIENT}Tracker('online', run_dir=Path({str(run_dir)!r}), config={{}}).finish({{}}); print('trained')"
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True
    )
    os.close(terminal)
    shown = b""
    try:
        while b"trained" not in shown:
            assert select.select([controller], [], [], 300)[0], shown
            shown += os.read(controller, 4096)
        assert process.wait(300) == 0
    finally:
        process.kill()
        os.close(controller)
    assert b"no API key" in shown


@pytest.mark.parametrize(("mode", "environment"), [("disabled", {}), ("auto", {"WANDB_MODE": "disabled"})])
def test_disabled_does_not_import_wandb(run_dir, mode, environment):
    code = (
        f"{PATIENT}tracker = Tracker({mode!r}, run_dir=Path({str(run_dir)!r}), config={{}})\n"
        "tracker.log({'train/step': 1}, 1); tracker.finish({})\n"
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | environment, timeout=300)
    assert list(run_dir.iterdir()) == []


def test_a_process_whose_service_died_keeps_its_exit_code_and_ends_quietly(run_dir):
    code = (
        f"{PATIENT}tracker = Tracker('offline', run_dir=Path({str(run_dir)!r}), config={{}})\n"
        "[child.kill() for child in psutil.Process().children()]\n"
        "tracker.log({'train/step': 1}, 1); tracker.finish({}); sys.exit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert len(ended.stderr.splitlines()) == 1  # the warning
    assert "tracking stopped" in ended.stderr


def test_an_unknown_mode_names_the_choices(run_dir):
    with pytest.raises(UserError, match=r"tracking\.mode=maybe: .*auto, online, offline, disabled"):
        Tracker("maybe", run_dir=run_dir, config={})


def test_config_becomes_plain_and_resolved(tmp_path):
    class Precision(Enum):
        BF16 = "bf16"

    node = OmegaConf.create({"seed": 3, "nested": {"twice": "${seed}", "list": [1, "${seed}"]}})
    config = plain({"job": node, "path": tmp_path, "pair": (1, 2.5), "on": True, "none": None, 4: Precision.BF16})
    assert config == {
        "job": {"seed": 3, "nested": {"twice": 3, "list": [1, 3]}}, "path": str(tmp_path), "pair": [1, 2.5],
        "on": True, "none": None, "4": "Precision.BF16",
    }  # fmt: skip
    assert type(config["job"]["nested"]) is dict


def test_samples_are_rows_of_one_incremental_table(tmp_path, monkeypatch):
    logged = []

    def log(values, **where):
        logged.append((values["samples"], [list(row) for row in values["samples"].data], values["train/step"], where))

    monkeypatch.setattr(Tracker, "_submit", lambda self, task: task(SimpleNamespace(log=log)))
    tracker = Tracker("disabled", run_dir=tmp_path, config={})
    tracker.log_sample({"prompt": "a", "text": "ab\n"}, 0)
    tracker.log_sample({"prompt": "a", "text": "ac"}, 4)
    (table, first, *_), (again, both, step, where) = logged
    assert again is table
    assert (table.columns, table.log_mode) == (["step", "prompt", "text"], "INCREMENTAL")
    assert (first, both) == ([[0, "a", "ab\n"]], [[0, "a", "ab\n"], [4, "a", "ac"]])
    assert (step, where) == (4, {"step": 4, "commit": False})


def test_a_picture_is_passed_as_its_file(tmp_path, monkeypatch):
    picture, logged = tmp_path / "step-000004.png", []
    Image.new("RGB", (4, 2)).save(picture)
    run = SimpleNamespace(log=lambda values, **where: logged.append(values["samples"]))
    monkeypatch.setattr(Tracker, "_submit", lambda self, task: task(run))
    Tracker("disabled", run_dir=tmp_path, config={}).log_sample({"caption": "letters", "picture": picture}, 4)
    ((step, caption, entry),) = logged[0].data
    assert (step, caption, entry.image.size) == (4, "letters", (4, 2))

"""Sweeps through submitit and programs that stand in for SLURM's."""

import os
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("submitit", reason="hydra-submitit-launcher is not installed (pip install hydra-submitit-launcher)")

from tests.training.helpers.sweeps import Sweep, start, write_script
from training.errors import UserError
from training.sweeps import cluster
from training.sweeps.cluster import ClusterJob, SlurmLauncher
from training.sweeps.job import SweepJob

# sbatch runs the script once for each number of its array, beside itself. Number 1 loses its host, if KILL is set.
SBATCH = """#!/bin/bash
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
cp "$1" "$SEEN/script-$RANDOM"
for number in $(seq 0 "${last:-0}"); do
    export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=here
    [ -n "$last" ] && export SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$number
    bash "$1" > /dev/null 2>&1 &
done
echo "Submitted batch job 7"
"""
# Of its arguments, those that begin the command follow the option --error PATH.
SRUN = """#!/bin/bash
[ "$SLURM_ARRAY_TASK_ID" = "$LOST" ] && { touch "$SEEN/lost"; exit; }
while [ "$1" != --error ]; do shift; done
shift 2
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
[ -e "$SEEN/lost" ] && echo "7_$LOST|NODE_FAIL|here"
"""


def slurm(folder: Path, *arguments: str, lost: str) -> Sweep:
    """Runs a sweep with programs in place of SLURM's; number `lost` of the array loses its host."""
    write_script(folder)
    (folder / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "SEEN": str(folder), "LOST": lost}
    command = ("-m", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=sweep", *arguments)
    return Sweep(start(folder, *command, environment=environment), folder / "sweep")


@pytest.mark.slow
def test_slurm_gets_an_array_and_a_job_whose_host_is_lost_is_a_row(tmp_path: Path):
    keys = ("hydra.launcher.partition=long", "hydra.launcher.timeout_min=90")
    done = slurm(tmp_path, "act=ok,exit,raise,kill", "note='[a, b]'", *keys, lost="1")
    (script,) = tmp_path.glob("script-*")
    lines = {line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if line.startswith("#SBATCH")}
    assert {"array=0-3%4", "partition=long", "time=90", "nodes=1", "ntasks-per-node=1", "gpus-per-node=1"} <= lines
    assert "job 1 is slurm's job 7_1; its output: " in done.stdout
    assert done.seen(0)["note"] == "[a, b]"
    assert done.row(1)["why"].startswith("7_1 ended as NODE_FAIL (")
    killed = "SIGKILL, as the kernel does when the host is out of memory"
    rows = [tuple(done.row(number)[column] for column in ("name", "status", "why")) for number in (0, 2, 3)]
    assert rows == [
        ("act=ok", "ok", ""),
        ("act=raise", "failed", "ValueError: a broken [job]"),
        ("act=kill", "killed", killed),
    ]
    assert (done.exit_status, done.row(1)["status"]) == (1, "killed")
    assert done.stderr.splitlines()[-1].endswith(f"; job 2 failed: ValueError: a broken [job]; job 3 killed: {killed}")
    assert {"job 0: ok", "job 2: failed: ValueError: a broken [job]"} <= {*done.stdout.splitlines()}


def test_an_interrupted_sweep_leaves_slurm_s_jobs_and_tells_how_to_end_them(tmp_path: Path, capsys):
    class Queued:
        job_id = "7_0"

        def done(self) -> bool:
            raise KeyboardInterrupt

    launcher = SlurmLauncher(timeout_min=60)
    launcher._config = OmegaConf.create({"hydra": {"sweep": {"dir": "runs/a"}}})
    launcher._submit = lambda jobs, gpus, group: [Queued()]
    with pytest.raises(KeyboardInterrupt):
        launcher._run([SweepJob(0, [], tmp_path)], [OmegaConf.create({"device": "cpu"})], "group")
    assert "scancel 7_0 ends them" in capsys.readouterr().out


def test_a_job_that_slurm_starts_again_resumes(tmp_path: Path, monkeypatch):
    commands = []
    monkeypatch.setattr(SweepJob, "run", lambda self, command, environment, early_s: commands.append(command))
    job = SweepJob(0, [], tmp_path)
    for restarts in ("0", "1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        assert ClusterJob(job, ["train"], "group", 0)() is job
        ClusterJob(job, ["train", "resume=runs/a"], "group", 0)()
    resumed = ["train", "resume=runs/a"]
    assert commands == [["train"], resumed, ["train", "resume=auto"], resumed]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_scheduler_s_signals_end_a_job_saved(tmp_path: Path, number: signal.Signals, monkeypatch):
    wait = SweepJob._wait

    def noted(*arguments) -> None:
        (tmp_path / "waits").touch()
        wait(*arguments)

    monkeypatch.setattr(SweepJob, "_wait", noted)
    waits = f"until [ -e {tmp_path}/waits ]; do sleep 0.05; done"
    saves = f"trap 'echo > {tmp_path}/saved; exit 0' TERM; {waits}; kill -{number.name} $PPID; sleep 600 & wait"
    command = ["bash", "-c", saves]
    before = signal.getsignal(number)
    assert ClusterJob(SweepJob(0, [], tmp_path, timeout_min=60), command, "group", 0)().exit_status == 0
    assert (tmp_path / "saved").exists()
    assert signal.getsignal(number) == before


def test_a_job_asks_for_a_gpu_for_each_device():
    def gpus(launcher: SlurmLauncher, **config) -> int | None:
        return launcher._gpus(OmegaConf.create(config))

    launcher = SlurmLauncher(timeout_min=60, gpus_per_node=None)
    assert gpus(launcher, device="auto", devices=2) == 2
    assert gpus(launcher, device="cpu", devices=2) is None
    assert gpus(SlurmLauncher(timeout_min=60, gpus_per_node=8), device="cuda", devices=2) == 8


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"nodes": 2}, "nodes=2: must be 1: .*slurm.sbatch"),
        ({"tasks_per_node": 4}, "tasks_per_node=4: must be 1: .*devices=N"),
        ({"max_num_timeout": 1}, "max_num_timeout=1: must be 0: .*resume=auto"),
        ({"timeout_min": 0}, "timeout_min=0: "),
    ],
)
def test_options_that_a_sweep_cannot_have_are_refused(options: dict, refused: str):
    with pytest.raises(UserError, match=rf"^hydra.launcher.{refused}"):
        SlurmLauncher(**{"timeout_min": 60} | options)._check_options()


def test_a_scheduler_that_is_not_there_takes_no_job(tmp_path: Path):
    write_script(tmp_path)
    process = start(tmp_path, "-m", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=sweep", environment={"PATH": ""})
    done = Sweep(process, tmp_path / "sweep")
    assert done.exit_status == 1
    assert done.stderr.startswith("error: hydra/launcher=submitit_slurm: no job was submitted: ")
    assert "Traceback" not in done.stderr


def test_without_the_package_one_line_tells_how_to_install_it(monkeypatch):
    monkeypatch.setattr(cluster, "is_installed", lambda: False)
    # Keys that only the package knows are taken.
    node = OmegaConf.merge(OmegaConf.create(cluster._options()), {"partition": "long"})
    launcher = SlurmLauncher(**{key: value for key, value in node.items() if key != "_target_"})
    with pytest.raises(UserError, match=r"submitit_slurm: .* is missing: pip install hydra-submitit-launcher$"):
        launcher._check_options()

"""scripts/slurm.sbatch with programs in place of SLURM's: a host is a torchrun on this machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from tests import ROOT
from tests.training.helpers.in_process import run_here
from tests.training.helpers.results import content
from tests.training.helpers.sweeps import wait_until
from tests.training.parallel.conftest import RUN
from training.runs.records import read_metrics, read_summary

SCRIPT = ROOT / "scripts" / "slurm.sbatch"
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames here[0-1]" ] && printf 'localhost\\nother\\n'
"""
# Starts the command, which follows its options, once for each host, and writes the number of each process down.
SRUN = """#!/bin/bash
while [[ "$1" = --* ]]; do shift; done
for number in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$number "$@" > "$SEEN/host$number.out" 2>&1 &
    echo $! > "$SEEN/host$number.pid"
    hosts+=($!)
done
status=0
for host in "${hosts[@]}"; do wait "$host" || status=$?; done
exit $status
"""
# In place of the interpreter: what a host is told.
PYTHON = """#!/bin/bash
printf '%s\\n' "$OMP_NUM_THREADS" "$@"
"""
# The first host's is a run that takes a moment to save.
SAVES = """#!/bin/bash
[ "$SLURM_NODEID" = 0 ] || exit 0
trap 'sleep 0.5; echo saved; exit 0' TERM
mkdir -p "$RUN_DIR" && echo $$ > "$RUN_DIR/.lock"
while true; do sleep 0.1; done
"""


def environment(folder: Path, **variables: str | int) -> dict[str, str]:
    """Returns the environment of a job of two hosts whose programs are in `folder`."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    own = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SEEN": folder,
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_JOB_NODELIST": "here[0-1]",
        "SLURM_NNODES": 2,
        "RUN_DIR": folder / "run",
    }
    return os.environ | {name: str(value) for name, value in (own | variables).items()}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Returns a function that starts a run of two hosts with two processes each; they end with the test."""
    threads = str(torch.get_num_threads())
    real = environment(tmp_path, PYTHON=sys.executable, PROCESSES=2, OMP_NUM_THREADS=threads)

    def start(*keys: str) -> subprocess.Popen:
        return subprocess.Popen([SCRIPT, *RUN, "microbatches=1", "eval.every=null", *keys], cwd=ROOT, env=real)

    yield start
    for file in tmp_path.glob("host*.pid"):
        end(int(file.read_text()))


def end(number: int) -> None:
    """Kills a process and all that it started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(number)
        for lost in (*process.children(recursive=True), process):
            lost.kill()


def wait_for_step(folder: Path, step: int) -> None:
    path = folder / "run" / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= step, f"{path} was not written")


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("host*.out")))


def test_each_host_gets_a_torchrun(tmp_path: Path):
    told = environment(tmp_path, PYTHON=tmp_path / "python", SLURM_GPUS_ON_NODE=4, SLURM_JOB_ID=123_456)
    told.pop("OMP_NUM_THREADS", None)
    cores = int(subprocess.run(["nproc"], env=told, capture_output=True, check=True, timeout=300).stdout)
    subprocess.run([SCRIPT, "model=llama7b", "name=a b"], cwd=ROOT, env=told, check=True, timeout=300)
    for host in (0, 1):
        threads, *arguments = (tmp_path / f"host{host}.out").read_text().splitlines()
        # Versions of nproc that know the limits of a container tell fewer than the process may use.
        assert int(threads) == -(-cores // 4)
        assert " ".join(arguments) == (
            f"-m torch.distributed.run --nnodes 2 --node-rank {host} --nproc-per-node 4 --master-addr localhost"
            " --master-port 23456 --max-restarts 0 train.py checkpoint.on_signal=true resume=auto model=llama7b"
            f" name=a b hydra.run.dir='{tmp_path / 'run'}'"
        )


def test_the_job_ends_as_its_run_does(tmp_path: Path):
    (tmp_path / "fails").write_text("#!/bin/bash\nexit 3\n")
    (tmp_path / "fails").chmod(0o755)
    told = environment(tmp_path, PYTHON=tmp_path / "fails")
    assert subprocess.run([SCRIPT], cwd=ROOT, env=told, timeout=300).returncode == 3


def test_outside_of_slurm_it_says_so():
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run([SCRIPT], cwd=ROOT, env=outside, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, f"scripts/{SCRIPT.name}: not a job of SLURM: submit it with sbatch\n")


def test_a_signal_goes_to_the_run_alone(tmp_path: Path):
    (tmp_path / "saves").write_text(SAVES)
    (tmp_path / "saves").chmod(0o755)
    process = subprocess.Popen([SCRIPT], cwd=ROOT, env=environment(tmp_path, PYTHON=tmp_path / "saves"))
    lock = tmp_path / "run" / ".lock"
    wait_until(lambda: lock.exists() and lock.read_text().endswith("\n"), "the run has not begun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    assert (tmp_path / "host0.out").read_text() == "saved\n"


@pytest.mark.slow
def test_two_hosts_compute_what_one_device_does(tmp_path: Path, start):
    """Four ranks, two a host, with the memory of one host in the summary; ended by a signal, and submitted again."""
    process = start("steps=100000", "checkpoint.every=null")
    wait_for_step(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0, output(tmp_path)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["devices"]) == ("stopped", 4)
    hosts = [sum(summary[f"rank{rank}/memory/rss_gib"] for rank in ranks) for ranks in ((0, 1), (2, 3))]
    assert summary["memory/rss_gib"] <= max(hosts) * 1.01
    steps = summary["steps"] + 1
    again = start(f"steps={steps}")
    assert again.wait(300) == 0, output(tmp_path)
    run_here(tmp_path / "one", *RUN, "microbatches=4", f"steps={steps}", "eval.every=null", "checkpoint.every=null")
    one, several = (read_metrics(tmp_path / name) for name in ("one", "run"))
    assert [line["train/loss"] for line in several] == [line["train/loss"] for line in one]
    assert (tmp_path / "run" / f"checkpoints/step-{steps:08d}").exists()


@pytest.mark.slow
def test_two_hosts_that_share_homes_compute_what_one_device_does(tmp_path: Path, start):
    """Each host has one home, of which its two ranks update slices; some states are on the devices."""
    run = ("optimizer=host_adamw", "steps=3", "clip_norm=null", "checkpoint.every=3")
    shared = ("offload=layer_stream", "parallel.homes=shared", "optimizer.device_share=20KiB")
    assert start(*run, *shared).wait(300) == 0, output(tmp_path)
    run_here(tmp_path / "one", *RUN, "microbatches=4", "eval.every=null", *run)
    one, several = (tmp_path / name / "checkpoints/step-00000003" for name in ("one", "run"))
    assert content(several) == content(one)


@pytest.mark.slow
def test_a_lost_host_ends_the_run_saved(tmp_path: Path, start):
    process = start("steps=100000", "checkpoint.every=null")
    wait_for_step(tmp_path, 2)
    end(int((tmp_path / "host1.pid").read_text()))
    assert process.wait(300) != 0
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "rank" in summary["reason"]
    assert summary["reason"] in (tmp_path / "host0.out").read_text()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) >= 2

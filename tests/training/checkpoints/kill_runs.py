"""Kills runs at random moments: `python kill_runs.py RUN_DIR KILLS SEED OVERRIDE...`; the last goes on to its end.

Runs are forked from a process that has imported everything, so that most of a run's time is spent in steps and saves.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from training import launcher, schema
from training.build import build
from training.checkpoints.layout import CHECKPOINTS_FOLDER, checkpoints_in
from training.loop import train

CONF = Path(__file__).parents[3] / "conf"


def run(run_dir: Path, overrides: list[str]) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    with build(config, run_dir) as job:
        train(job)


def newest(run_dir: Path) -> Path | None:
    return next(iter(checkpoints_in(run_dir / CHECKPOINTS_FOLDER)), None)


def forked(run_dir: Path, overrides: list[str]) -> int:
    """Starts a run in a process of its own, which ends with status 0 if it did well."""
    process = os.fork()
    if process == 0:
        # Whatever is raised may not return into the code of the parent.
        status = 1
        try:
            run(run_dir, overrides)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return process


def main(run_dir: Path, kills: int, seed: int, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    schema.register()
    launcher.register()
    moments = random.Random(seed)
    run_dir.mkdir(parents=True)
    for _ in range(kills):
        before = newest(run_dir)
        process = forked(run_dir, overrides)
        # From its first checkpoint on, so that the moment is one of training and saving, and not of the start.
        deadline = time.monotonic() + 60
        while newest(run_dir) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if status != signal.SIGKILL:
            sys.exit("a run ended before it was killed")
    _, status = os.waitpid(forked(run_dir, overrides), 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])

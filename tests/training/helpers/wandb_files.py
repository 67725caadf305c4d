"""Reads offline wandb runs with wandb's own program."""

import json
import subprocess


def wandb_runs(run_dir):
    return sorted((run_dir / "wandb").glob("*run-*"))


def leet_inspect(wandb_run, *flags):
    """Returns what `wandb leet inspect --json` prints, by the program that it calls: Python would import wandb."""
    # Not at the top: it takes a second.
    from wandb.util import get_core_path

    (file,) = wandb_run.glob("run-*.wandb")
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", *flags]
    command += ["--run-file", str(file), str(wandb_run.parent)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def summary_of(wandb_run):
    return json.loads(leet_inspect(wandb_run, "--summary"))


def records_of(wandb_run, kind):
    lines = [json.loads(line) for line in leet_inspect(wandb_run).splitlines()]
    return [line[kind] for line in lines if line["type"] == kind]


def without_internals(values):
    return {key: value for key, value in values.items() if not key.startswith("_")}

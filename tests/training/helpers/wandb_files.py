"""Reads offline wandb runs with wandb's own program."""

import json
import subprocess
import sys


def wandb_runs(run_dir):
    return sorted((run_dir / "wandb").glob("*run-*"))


def leet_inspect(wandb_run, *flags):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(wandb_run)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def summary_of(wandb_run):
    return json.loads(leet_inspect(wandb_run, "--summary"))


def records_of(wandb_run, kind):
    lines = [json.loads(line) for line in leet_inspect(wandb_run).splitlines()]
    return [line[kind] for line in lines if line["type"] == kind]


def without_internals(values):
    return {key: value for key, value in values.items() if not key.startswith("_")}

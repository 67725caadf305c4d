"""The state of a run besides its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from training.checkpoints.state import RunState, random_states, read_state, restore_random_states
from training.runs.checkpoint_files import RANDOM_FILE, STATE_FILE
from training.runs.manifest import DamagedError

CPU = torch.device("cpu")


def test_a_state_is_read_back(tmp_path: Path):
    state = RunState(7, 2, "ab", "cd", "run-1", "ef", "01", 900)
    (tmp_path / STATE_FILE).write_bytes(state.to_json())
    assert read_state(tmp_path) == state


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"skipped_steps": 1.5}, "skipped_steps"),
        ({"batch_sha256": None}, "batch_sha256"),
        ({"data_sha256": 3}, "data_sha256"),
        ({"tracking_id": "../x"}, "tracking_id"),
        ({"eval_sha256": 3}, "eval_sha256"),
        ({"source_sha256": 3}, "source_sha256"),
        ({"units": -1}, "units"),
    ],
)
def test_what_no_run_writes_is_refused(tmp_path: Path, changed: dict, named: str):
    values = {"step": 1, "skipped_steps": 0, "batch_sha256": "ab"} | changed
    (tmp_path / STATE_FILE).write_bytes(RunState(**values).to_json())
    with pytest.raises(DamagedError, match=rf"state\.json has no valid {named}: "):
        read_state(tmp_path)


def test_random_numbers_continue(tmp_path: Path):
    save_file(random_states(CPU), tmp_path / RANDOM_FILE)
    expected = torch.rand(4)
    torch.rand(9)
    restore_random_states(tmp_path, CPU)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("states", [{}, {"cpu": torch.zeros(3, dtype=torch.uint8)}, {"cpu": torch.zeros(5000)}])
def test_other_states_are_refused(tmp_path: Path, states: dict[str, torch.Tensor]):
    save_file(states, tmp_path / RANDOM_FILE)
    with pytest.raises(DamagedError, match=r"random\.safetensors does not have the states"):
        restore_random_states(tmp_path, CPU)

"""The state of a run besides its tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from offload.optimizer.adamw import HostAdamW
from training.checkpoints.state import (
    COPY,
    RunState,
    load_tensors,
    optimizer_tensors,
    random_states,
    read_state,
    restore_random_states,
)
from training.errors import UserError
from training.runs.bounded_files import DamagedError
from training.runs.checkpoint_files import RANDOM_FILE, STATE_FILE

CPU = torch.device("cpu")


def test_a_state_is_read_back(tmp_path: Path):
    state = RunState(7, 2, "ab", "cd", "run-1", "ef", "01", "23", 900)
    (tmp_path / STATE_FILE).write_bytes(state.to_json())
    assert read_state(tmp_path) == state


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"skipped_steps": 1.5}, "skipped_steps"),
        ({"batch_sha256": None}, "batch_sha256"),
        ({"tracking_id": ""}, "tracking_id"),
        ({"data_sha256": 3}, "data_sha256"),
        ({"tracking_id": "../x"}, "tracking_id"),
        ({"eval_sha256": 3}, "eval_sha256"),
        ({"source_sha256": 3}, "source_sha256"),
        ({"task_sha256": 3}, "task_sha256"),
        ({"units": -1}, "units"),
    ],
)
def test_what_no_run_writes_is_refused(tmp_path: Path, changed: dict, named: str):
    values = {"step": 1, "skipped_steps": 0, "batch_sha256": "ab"} | changed
    (tmp_path / STATE_FILE).write_bytes(RunState(**values).to_json())
    with pytest.raises(DamagedError, match=rf"state\.json has no valid {named}: "):
        read_state(tmp_path)


def test_a_state_without_the_hash_of_the_task_is_refused(tmp_path: Path):
    values = json.loads(RunState(1, 0, "ab").to_json())
    del values["task_sha256"]
    (tmp_path / STATE_FILE).write_text(json.dumps(values))
    with pytest.raises(DamagedError, match=r"state\.json has no valid task_sha256: None"):
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


FILES = ("model.safetensors", "optimizer.safetensors")


def trained(dtype: torch.dtype) -> tuple[nn.Module, HostAdamW]:
    """A layer after one step."""
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = HostAdamW(model.parameters())
    optimizer.allocate()
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, model: nn.Module, optimizer: HostAdamW) -> None:
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, folder / FILES[0])
    save_file(optimizer_tensors(model, optimizer), folder / FILES[1])


@pytest.mark.parametrize(("dtype", "masters"), [(torch.bfloat16, True), (torch.float32, False)])
def test_states_are_named_by_their_parameter(dtype: torch.dtype, masters: bool):
    keys = ("exp_avg", "exp_avg_sq", *(("remainder",) if masters else ()), "step")
    assert list(optimizer_tensors(*trained(dtype))) == [f"{name}.{key}" for name in ("weight", "bias") for key in keys]


def test_copies_of_parameters_beside_their_states_are_renewed(tmp_path: Path):
    """States on a device have one, from which the update continues."""
    save(tmp_path, *trained(torch.float32))
    other, states = trained(torch.float32)
    for parameter in other.parameters():
        parameter.detach().zero_()
    copies = [states.state[p].setdefault(COPY, torch.full_like(p, 7.0)) for p in other.parameters()]
    load_tensors(tmp_path, FILES, other, states)
    assert all(map(torch.equal, copies, other.parameters()))
    assert all(copy.any() for copy in copies)


RUN = ("precision=bf16", "optimizer=host_adamw")


def keys_of(folder: Path) -> set[str]:
    with safe_open(next(folder.glob("optimizer*.safetensors")), framework="pt") as file:
        return {name.rpartition(".")[2] for name in file.keys()}  # noqa: SIM118, the file is not a dict


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory, run_here) -> Path:
    folder = tmp_path_factory.mktemp("compact")
    run_here(folder, *RUN)
    return folder


@pytest.mark.slow
def test_adamw_resumes_the_states_of_host_adamw_bit_for_bit(tmp_path: Path, compact: Path, run_here, at, curve):
    assert keys_of(at(compact, 3)) == {"step", "exp_avg", "exp_avg_sq", "remainder"}
    run_here(tmp_path / "from_adamw", "precision=bf16", "optimizer=adamw", f"resume={at(compact, 3)}")
    assert curve(tmp_path / "from_adamw") == curve(compact)[1:]


@pytest.mark.slow
def test_where_states_live_leaves_no_trace_in_bf16(tmp_path: Path, compact: Path, run_here, at, content):
    there = (*RUN, "offload=layer_stream", "optimizer.device_share=1GiB")
    run_here(tmp_path / "there", *there)
    assert content(at(tmp_path / "there", 3)) == content(at(compact, 3))
    run_here(tmp_path / "to", *there, f"resume={at(compact, 3)}")
    run_here(tmp_path / "from", *RUN, f"resume={at(tmp_path / 'there', 3)}")
    assert content(at(tmp_path / "to", 6)) == content(at(tmp_path / "from", 6)) == content(at(compact, 6))


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ("optimizer.state_dtype=bf16", "optimizer.state_dtype: was fp32, is bf16"),
        ("optimizer.master=stochastic", "optimizer.master: was compact, is stochastic"),
    ],
)
def test_another_format_of_states_is_refused(tmp_path: Path, compact: Path, run_here, now: str, message: str):
    with pytest.raises(UserError) as refusal:
        run_here(tmp_path / "new", *RUN, now, f"resume={compact}")
    assert message in str(refusal.value)


@pytest.mark.parametrize("offload", ["layer_stream", "shard_offload"])
@pytest.mark.slow
def test_a_resumed_run_with_noise_equals_the_uninterrupted_one_in_every_mode(
    tmp_path: Path, run_here, at, content, offload: str
):
    smallest = (*RUN, "optimizer.master=stochastic", "optimizer.state_dtype=int8", "clip_norm=null")
    run_here(tmp_path / "whole", *smallest)
    run_here(tmp_path / "rest", *smallest, f"offload={offload}", f"resume={at(tmp_path / 'whole', 3)}")
    assert content(at(tmp_path / "rest", 6)) == content(at(tmp_path / "whole", 6))

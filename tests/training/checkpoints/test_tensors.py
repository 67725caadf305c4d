"""The tensors of a run by name, and back into a model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offload.optimizer.adamw import HostAdamW
from training.checkpoints.tensors import COPY, load_tensors, optimizer_tensors
from training.runs.manifest import DamagedError

FILES = ("model.safetensors", "optimizer.safetensors")


def trained(dtype: torch.dtype) -> tuple[nn.Module, HostAdamW]:
    """A layer after one step."""
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = HostAdamW(model.parameters(), compile="off")
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_saved_is_loaded(tmp_path: Path, dtype: torch.dtype):
    model, optimizer = trained(dtype)
    save(tmp_path, model, optimizer)
    other, states = trained(dtype)
    load_tensors(tmp_path, FILES, other, states)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    wanted, found = optimizer_tensors(model, optimizer), optimizer_tensors(other, states)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


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


@pytest.mark.parametrize("listed", [FILES[:1], FILES[1:]])
def test_only_listed_files_are_read(tmp_path: Path, listed: tuple[str, ...]):
    model, optimizer = trained(torch.float32)
    save(tmp_path, model, optimizer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DamagedError, match=r"lacks tensor|lists no model\.safetensors"):
        load_tensors(tmp_path, listed, model, optimizer)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())

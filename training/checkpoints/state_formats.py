"""Reads optimizer states that a checkpoint holds in another format of masters and moments than the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from models.safetensors_files import DTYPES, StoredTensor, read_into
from offload import HostAdamW
from offload.planning import MASTER_DTYPES, STATE_DTYPES, StateFormat


def states_in_another_format(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, StoredTensor]
) -> dict[str, list[str]]:
    """Returns the parameters whose `stored` states are whole and in another format than the run's, with their keys."""
    if not isinstance(optimizer, HostAdamW):
        return {}
    found: dict[str, dict[str, tuple]] = {}
    for name, entry in stored.items():
        parameter, _, key = name.rpartition(".")
        found.setdefault(parameter, {})[key] = (DTYPES.get(entry.dtype), torch.Size(entry.shape))
    others = {}
    for name, parameter in model.named_parameters():
        if parameter not in optimizer.state or name not in found:
            continue
        here, there = optimizer.format.tensors(parameter.dtype, parameter.shape), found[name]
        if there != here and any(there == other.tensors(parameter.dtype, parameter.shape) for other in _formats()):
            others[name] = sorted(there)
    return others


def read_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, list[str]],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Brings the stored states of the parameters in `names`, which gives their keys, into the optimizer, one by one.

    The parameters have the checkpoint's values.
    """
    parameters = dict(model.named_parameters())
    for name, keys in names.items():
        targets = {
            full: torch.empty(stored[full].shape, dtype=DTYPES[stored[full].dtype])
            for full in (f"{name}.{key}" for key in keys)
        }
        read_into(targets, stored)
        optimizer.load_state(parameters[name], {full.rpartition(".")[2]: tensor for full, tensor in targets.items()})


def _formats() -> Iterator[StateFormat]:
    for master, state_dtype in itertools.product(MASTER_DTYPES, STATE_DTYPES):
        yield StateFormat(master, state_dtype)

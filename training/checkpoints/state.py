"""The state of a run besides its tensors: its step, and the random generators."""

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.safetensors_files import open_file
from training.runs.checkpoint_files import RANDOM_FILE, STATE_FILE
from training.runs.manifest import DamagedError, read_json


@dataclass(frozen=True)
class RunState:
    """The progress of a run; the defaults are those of a new run.

    The learning rate and the batches are functions of the step, so `step` is their state too.
    """

    step: int = 0
    """optimizer steps done"""
    skipped_steps: int = 0
    """those among them that were skipped because gradients were not finite"""
    batch_sha256: str | None = None
    """of the last step's batch, which a dataset that has changed does not give again"""
    data_sha256: str | None = None
    """of all tokens, if the dataset has them in memory: it shows every change of the text"""
    tracking_id: str | None = None
    """the id of the run in wandb"""
    eval_sha256: str | None = None
    """of the held-out batches, if the run evaluates"""
    source_sha256: str | None = None
    """of the config.json from which the model is made, if it is (`training.weights.source.source_digest`)"""
    units: int = 0
    """tokens, images or examples trained on, without padding"""

    def to_json(self) -> bytes:
        """Returns the content of a checkpoint's state.json."""
        return json.dumps(asdict(self), indent=2).encode()


def read_state(folder: Path) -> RunState:
    """Reads the state of the checkpoint in `folder`. Raises DamagedError if the file does not have a valid one."""
    path = folder / STATE_FILE
    values = read_json(path)
    checks = {
        "step": _is_count,
        "skipped_steps": _is_count,
        "units": _is_count,
        "batch_sha256": lambda value: isinstance(value, str),
        "data_sha256": lambda value: value is None or isinstance(value, str),
        "eval_sha256": lambda value: value is None or isinstance(value, str),
        "source_sha256": lambda value: value is None or isinstance(value, str),
        # It becomes part of a folder's name, so it may not lead elsewhere.
        "tracking_id": lambda value: value is None or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", str(value)),
    }
    for field in fields(RunState):
        if field.name not in values or not checks[field.name](values[field.name]):
            raise DamagedError(f"{path} has no valid {field.name}: {values.get(field.name)!r:.80}")
    return RunState(**{field.name: values[field.name] for field in fields(RunState)})


def digest_of_all(dataset) -> str | None:
    """Returns the SHA-256 of all data of `dataset`, None if it does not have them in memory."""
    return getattr(dataset, "data_sha256", None)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's generators of the host and of `device`: uint8 [bytes], by kind of device.

    Each microbatch seeds the generators by itself, so these states matter only to code that draws between steps.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(folder: Path, device: torch.device) -> None:
    """Restores torch's generators; that of a GPU only if the saved run had one and this run has one.

    Raises DamagedError if the file does not have their states.
    """
    path = folder / RANDOM_FILE
    try:
        with open_file(path) as handle:
            states = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118, the handle is no dict
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise DamagedError(f"{path} does not have the states of torch's random generators ({error})") from None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0

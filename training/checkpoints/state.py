"""What a run is besides its tensors: how far it came, and the random generators."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.safetensors_files import open_file
from training.checkpoints.layout import RANDOM_FILE, STATE_FILE
from training.checkpoints.manifest import DamagedError, read_json


@dataclass(frozen=True)
class RunState:
    """How far a run came; a new run's is the default.

    The learning rate and the batches are functions of the step, so that is their state too.
    """

    step: int = 0
    """optimizer steps done"""
    skipped_steps: int = 0
    """of these, left out because gradients were not finite"""
    batch_sha256: str | None = None
    """of the last step's batch: a dataset that has changed may not give it again"""
    tokens_sha256: str | None = None
    """of all tokens of a dataset that has them in memory: no change of its text goes unseen"""
    tracking_id: str | None = None
    """of the run in wandb"""

    def to_json(self) -> bytes:
        """The content of a checkpoint's state.json."""
        return json.dumps(asdict(self), indent=2).encode()


def read_state(folder: Path) -> RunState:
    """The state of the checkpoint in `folder`. Raises DamagedError where the file does not hold one."""
    path = folder / STATE_FILE
    values = read_json(path)
    checks = {
        "step": _is_count,
        "skipped_steps": _is_count,
        "batch_sha256": lambda value: isinstance(value, str),
        "tokens_sha256": lambda value: value is None or isinstance(value, str),
        # It becomes part of a folder's name.
        "tracking_id": lambda value: value is None or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", str(value)),
    }
    for field in fields(RunState):
        if field.name not in values or not checks[field.name](values[field.name]):
            raise DamagedError(f"{path} has no {field.name} that a run could have: {values.get(field.name)!r:.80}")
    return RunState(**{field.name: values[field.name] for field in fields(RunState)})


def digest_of(batch: Tensor) -> str:
    """The SHA-256 of a batch (int64, on any device)."""
    return hashlib.sha256(batch.cpu().contiguous().numpy()).hexdigest()


def digest_of_all(dataset) -> str | None:
    """The SHA-256 of all tokens of `dataset`, None where it does not have them in memory."""
    return getattr(dataset, "tokens_sha256", None)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators, of the host and of `device`: uint8 [bytes], by kind of device.

    Each microbatch sets them anew from seed and step, so they matter to what draws between steps alone.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(folder: Path, device: torch.device) -> None:
    """Sets torch's generators as they were; that of a GPU only where there was one and is one.

    Raises DamagedError where the file holds no states of them.
    """
    path = folder / RANDOM_FILE
    try:
        with open_file(path) as handle:
            states = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118, the handle is no dict
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise DamagedError(f"{path} does not hold the states of torch's random generators ({error})") from None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0

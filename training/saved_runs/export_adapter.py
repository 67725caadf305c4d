"""A run that trained an adapter, exported: the adapter alone, in the form of peft and of diffusers, or in its base."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from models.adapter_files import CONFIG_FILE, DIFFUSERS_FILE, WEIGHTS_FILE, diffusers_file, is_of_diffusers
from models.adapters import merge_adapter
from models.whole_folder import Fill, Write
from training.errors import UserError
from training.saved_runs.loading import load_model
from training.settle.components import Components, acquired, attached
from training.weights.filling import fill_buffers


def adapter_files(model: nn.Module, checkpoint: Path) -> dict[str, Fill]:
    """Returns what fills the files of the adapter of `model`, by name: a checkpoint has them in peft's form already.

    `model` may be on the meta device. One of diffusers has a file more, which pipelines of diffusers load.
    """
    files = {name: _copy_of(checkpoint / name) for name in (CONFIG_FILE, WEIGHTS_FILE)}
    if is_of_diffusers(model):
        files[DIFFUSERS_FILE] = diffusers_file(model, checkpoint / WEIGHTS_FILE)
    return files


def merged_model(components: Components, checkpoint: Path) -> tuple[nn.Module, Callable[[str], Tensor]]:
    """Returns the base with the adapter of `checkpoint` added to it, in host memory, and what reads its tensors.

    Raises UserError for a base that is quantised or another one.
    """
    config: DictConfig = components.config
    with acquired(components.device) as streams, attached(components, streams) as model:
        fill_buffers(model)
        load_model(model, checkpoint, config, torch.device("cpu"))
    try:
        merge_adapter(model)
    except ValueError as error:
        raise UserError(f"--merge: {error}") from error
    tensors = dict(model.named_parameters(remove_duplicate=False))
    return model, lambda name: tensors[name].detach()


def _copy_of(path: Path) -> Fill:
    def fill(write: Write) -> None:
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(shutil.COPY_BUFSIZE), b""):
                write(piece)

    return fill

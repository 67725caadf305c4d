"""Fills a model that was built on the meta device, once a mode has made its memory.

A model of ours has parameters alone. A model of a library (`models.hf`, `models.diffusion`) has methods of its own:
`fill_buffers()`, `initialise(seed, device)` and `load(path)`.
"""

from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from models.adapters import without_adapters
from models.initialise import initialise
from models.quantise import kept_memory, settled
from models.weights import has_own_names, load_weights
from offload import lies_in_file
from training.errors import as_user_error
from training.metrics.progress import phase
from training.weights.architecture import refuse_other_architecture
from training.weights.files import ModelWeights
from training.weights.quantising import quantised_from_cache


def fill_buffers(model: nn.Module) -> None:
    """Gives buffers the values of a model built on the CPU. Raises UserError for one whose value cannot be computed."""
    if hasattr(model, "fill_buffers"):
        with as_user_error("model: "), without_adapters(model):
            model.fill_buffers()


def fill_parameters(model: nn.Module, config: DictConfig, device: torch.device, weights: ModelWeights | None) -> None:
    """Fills the parameters where the mode has placed them: from `weights`, or as a function of the seed.

    Of a model with adapters it fills the base. Parameters that stay in their files (`offload.source=mapped`) have their
    values already. Raises UserError if the weights do not fit, or a parameter has no initial value.
    """
    if weights is None:
        refused = as_user_error("model: ", after=": give model.weights=PATH")
        with phase("initialising the weights"), kept_memory(model, device), refused, without_adapters(model):
            getattr(model, "initialise", partial(initialise, model))(config.seed, device)
        return
    path = weights.path()
    if weights.on_hub is not None:
        # Its config.json came with it.
        refuse_other_architecture(config, model)
    in_files = [parameter for parameter in model.parameters() if lies_in_file(parameter)]
    with (
        as_user_error(f"model.weights={config.model.weights}: ", (ValueError, FileNotFoundError)),
        settled(in_files),
        without_adapters(model),
        quantised_from_cache(model, config, path),
        kept_memory(model, device),
        phase("loading the weights"),
    ):
        load(model, path)


def load(model: nn.Module, path: Path) -> None:
    """Copies weights of a checkpoint, or of the model's library, into the model.

    Raises ValueError for files that do not fit, and FileNotFoundError.
    """
    by_library = None if has_own_names(model, path) else getattr(model, "load", None)
    if by_library is None:
        load_weights(model, path)
    else:
        by_library(path)

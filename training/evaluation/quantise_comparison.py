"""Compares the loss of the first batch with quantised weights and without.

The two models are on the machine one after the other, so there must be room for the larger one alone.
"""

from __future__ import annotations

import copy
import logging
import math

import torch
from omegaconf import OmegaConf
from torch import nn

from offload import Streams
from training.config.adapter import NoAdapter
from training.config.modes import weights_node
from training.config.schema import NoQuantize, quantises
from training.evaluation.held_out import held_out_scores
from training.metrics.progress import phase
from training.settle.components import Components, attached
from training.weights.files import ModelWeights
from training.weights.filling import fill_buffers, fill_parameters

logger = logging.getLogger(__name__)


def loss_of_base(components: Components, streams: Streams, dataset, weights: ModelWeights | None) -> float | None:
    """Returns the loss of the first batch with the weights that are not quantised, from `weights` or the seed.

    None where the run does not compare, and with a warning where there is no room for them. The model, under a mode of
    its own, is gone afterwards.
    """
    if not (quantises(components.config) and components.config.quantize.compare):
        return None
    config = copy.deepcopy(components.config)
    config.quantize = OmegaConf.structured(NoQuantize)
    # A new adapter changes nothing.
    config.adapter = OmegaConf.structured(NoAdapter)
    _, weights_mode = weights_node(config)
    if "source" in weights_mode:
        # Nothing of it is frozen.
        weights_mode.source = "memory"
    base = Components.of(config, components.invocation, components.device)
    try:
        with phase("computing the loss without quantising"), attached(base, streams) as model:
            fill_buffers(model)
            fill_parameters(model, config, base.device, weights)
            return loss_of_first(base, model, streams, dataset)
    except (MemoryError, torch.OutOfMemoryError) as error:
        logger.warning("quantize.compare=true: no room for the weights that are not quantised (%s)", error)
        return None


def loss_of_first(components: Components, model: nn.Module, streams: Streams, dataset) -> float:
    """Returns the loss of the dataset's first batch, computed as an evaluation computes it."""
    config, batch = components.config, dataset.batch(0)
    rows = -(-config.batch_size // config.microbatches)
    scores = held_out_scores(components.task, model, [batch], rows, config.seed, streams.device, lambda: False)
    # The loss of a batch without a label is no number; the first step refuses that batch.
    return scores.get("loss", math.nan)


def report(components: Components, quantised: float, base: float) -> None:
    """Logs both losses."""
    name = components.invocation.choices["quantize"]
    logger.info(
        "loss of the first batch: %.6f with quantize=%s, %.6f without (%+.6f)", quantised, name, base, quantised - base
    )

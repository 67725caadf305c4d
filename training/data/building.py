"""Makes the dataset of a configuration, and asks it for what a plan says of the data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig
from torch import nn

from training.errors import UserError
from training.runs.files import DATASETS_FOLDER


def build_dataset(config: DictConfig, model: nn.Module, run_dir: Path):
    """Makes the dataset of `config`; its cache goes under `run_dir`. Random tokens and conditions fit `model`."""
    made = get_class(config.dataset._target_)
    sizes = {"seed": config.seed, "batch_size": config.batch_size}
    if not hasattr(made, "meta_batch"):
        sizes["seq_len"] = config.seq_len
    if getattr(made, "reads_hub", False):
        sizes["cache_dir"] = run_dir / DATASETS_FOLDER
    if "vocab_size" in config.dataset and config.dataset.vocab_size is None:
        if not hasattr(model, "vocab_size"):
            raise UserError(
                f"dataset.vocab_size=null: {type(model).__name__} has no vocabulary: choose a dataset of images, and"
                " task=flow_matching or classification"
            )
        sizes["vocab_size"] = model.vocab_size
    return instantiate(config.dataset, **sizes)


def has_facts(config: DictConfig) -> bool:
    """Tells whether the dataset of `config` has something to say of its data, for which a plan reads them."""
    return hasattr(get_class(config.dataset._target_), "facts")


def facts_of(dataset: object) -> Mapping[str, str]:
    """Returns what a dataset has to say of its data, by label; nothing where it has no `facts`."""
    return dataset.facts() if hasattr(dataset, "facts") else {}

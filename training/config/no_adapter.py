"""Tells whether a run trains an adapter. Apart from the other types, because a sweep asks it, and imports no torch."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf


@dataclass
class NoAdapter:
    pass


def has_adapter(config: DictConfig) -> bool:
    """Tells whether the run of `config` trains an adapter beside a frozen model."""
    return OmegaConf.get_type(config, "adapter") not in (NoAdapter, dict, type(None))

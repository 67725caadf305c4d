"""Keys that the command line gives in vain, because the key that turns them on is off."""

from __future__ import annotations

import logging
from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

# By key, the one that turns it on, that one's value while it is off, and another value of it for the warning.
TURNED_ON_BY = {
    "sample.prompt": ("sample.every", None, "N"),
    "sample.tokens": ("sample.every", None, "N"),
    "sample.temperature": ("sample.every", None, "N"),
    "sample.top_p": ("sample.every", None, "N"),
    "trace_step": ("trace", False, "true"),
    "parallel.homes": ("devices", 1, "N"),
    "parallel.numa": ("devices", 1, "N"),
    "parallel.timeout_s": ("devices", 1, "N"),
}

logger = logging.getLogger(__name__)


def warn_of_keys_without_effect(config: DictConfig, given: Collection[str]) -> None:
    """Warns of each key of `given`, those of the command line, that does nothing in `config`.

    They are not refused: a sweep may turn off what they belong to.
    """
    for key, (switch, off, value) in TURNED_ON_BY.items():
        if key in given and OmegaConf.select(config, switch) == off:
            logger.warning("%s has no effect without %s=%s", key, switch, value)

"""Keys that the command line gives in vain, because the key that turns them on is off."""

from __future__ import annotations

import logging
from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

# By key, the one without which nothing reads it, and a value of that for the warning.
TURNED_ON_BY = {
    "sample.prompt": ("sample.every", "N"),
    "sample.tokens": ("sample.every", "N"),
    "sample.temperature": ("sample.every", "N"),
    "sample.top_p": ("sample.every", "N"),
    "trace_step": ("trace", "true"),
}

logger = logging.getLogger(__name__)


def warn_of_keys_without_effect(config: DictConfig, given: Collection[str]) -> None:
    """Warns of each key of `given`, those of the command line, that does nothing in `config`.

    They are not refused: the keys of a sweep or of another run may turn off what they belong to.
    """
    for key, (switch, value) in TURNED_ON_BY.items():
        if key in given and not OmegaConf.select(config, switch):
            logger.warning("%s has no effect without %s=%s", key, switch, value)

"""train.py within the process of a test, which has imported everything: a tenth of the time of one of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from training import launcher, schema
from training.build import build
from training.checks import check
from training.loop import train
from training.stopping import SIGNALS

# A model and a batch that take a fraction of a second a step.
SMALL_MODEL = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "batch_size=4",
    "device=cpu",
)
# A run of six steps, in a second or two.
TINY_RUN = (
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=2",
    "batch_size=4",
    "seq_len=32",
    "steps=6",
    "log_every=2",
    "warmup_steps=1",
    "device=cpu",
    "tracking=disabled",
)
CONF = Path(__file__).parents[2] / "conf"

schema.register()
launcher.register()


@contextmanager
def composed(*overrides: str) -> Iterator[DictConfig]:
    """The configuration, which Hydra takes for that of the running job for the length of the block."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(overrides), return_hydra_config=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HydraConfig.instance(), "cfg", None)
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        yield config


@contextmanager
def signals_as_before() -> Iterator[None]:
    """A run that is saved ignores signals until its process ends, which is not the one of the tests."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_here(folder: Path, *overrides: str) -> dict:
    """`python train.py` with its files in `folder`; returns the summary, and raises errors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    with composed(*overrides) as config, signals_as_before():
        check(config)
        with build(config, folder) as job:
            return train(job)

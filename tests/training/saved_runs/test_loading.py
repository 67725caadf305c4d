"""The model of a checkpoint without the rest of its run: whole, or an adapter on a base that is made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.helpers.in_process import TINY_RUN, components_of, composed, run_here, signals_as_before
from training.errors import UserError
from training.run.build import build
from training.run.loop import train
from training.saved_runs.loading import load_model
from training.settle.components import acquired, attached

RUN = (*TINY_RUN, "steps=2", "checkpoint.every=2", "offload=layer_stream")
IDS = torch.arange(8).view(1, 8)
CHECKPOINT = Path("checkpoints", "step-00000002")


@torch.no_grad()
def of_the_checkpoint(checkpoint: Path, *overrides: str) -> Tensor:
    """Returns what the model of a checkpoint computes under the run's mode."""
    components = components_of(*RUN, *overrides)
    with acquired(components.device) as streams, attached(components, streams) as model:
        load_model(model, checkpoint, components.config, components.device)
        return model(IDS).clone()


def of_the_run(folder: Path, *overrides: str) -> Tensor:
    """Returns what the model of a run computes after its last step."""
    config, invocation = composed(*RUN, *overrides, run_dir=folder)
    folder.mkdir()
    with signals_as_before(), build(config, invocation) as job:
        train(job)
        with torch.no_grad():
            return job.components.model(IDS).clone()


@pytest.mark.parametrize("overrides", [("optimizer=adamw",), ("adapter=lora", "adapter.rank=2")])
@pytest.mark.slow
def test_the_model_is_that_after_the_last_step(tmp_path: Path, overrides: tuple[str, ...]):
    trained = of_the_run(tmp_path / "run", *overrides)
    assert torch.equal(of_the_checkpoint(tmp_path / "run" / CHECKPOINT, *overrides), trained)


def test_an_adapter_on_another_base_is_refused(tmp_path: Path):
    run_here(tmp_path, *RUN, "adapter=lora")
    with pytest.raises(UserError, match=r"the frozen base was made from seed=0, and is seed=1"):
        of_the_checkpoint(tmp_path / CHECKPOINT, "adapter=lora", "seed=1")

"""The run and the checkpoint that a path names, and the model that a checkpoint has."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.helpers.in_process import TINY_RUN, components_of, composed, run_here, signals_as_before
from training.errors import UserError
from training.run.build import build
from training.run.loop import train
from training.runs.directory import RunDirectory
from training.saved_runs.finding import configuration, found, load_model, newest_checkpoint, refuse_damage
from training.settle.components import acquired, attached

RUN = (*TINY_RUN, "steps=2", "checkpoint.every=2", "offload=layer_stream")
CHECKPOINT = Path("checkpoints", "step-00000002")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_here(folder, *TINY_RUN, "steps=2", "checkpoint.every=1")
    RunDirectory(folder).write_config(*composed(*TINY_RUN, "seed=5", run_dir=folder))
    return folder


def test_a_path_names_a_run_or_one_of_its_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch):
    first = run / "checkpoints" / "step-00000001"
    assert found(str(run)) == (run, None)
    assert found(str(first)) == (run, first)
    monkeypatch.chdir(run.parent)
    assert found(run.name) == (run, None)
    assert newest_checkpoint(run).name == "step-00000002"


def test_the_configuration_is_that_of_the_run_but_for_what_is_given(run: Path):
    config, invocation = configuration(run, ["batch_size=2", "devices=2", "parallel.sequence=2"])
    # One process reads it, whose model computes whole rows.
    assert config.parallel.sequence == 1
    assert (config.seed, config.batch_size, config.steps) == (5, 2, 6)
    assert invocation.run_dir == run


def test_what_is_not_there_or_damaged_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"none: no such directory: give the directory of a run"):
        found(str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"the run has no checkpoint: train with checkpoint\.every=N"):
        newest_checkpoint(tmp_path)
    config, _ = configuration(run, [])
    refuse_damage(newest_checkpoint(run), config)
    (run / "checkpoints" / "step-00000001" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors has 0 bytes .*: give another checkpoint"):
        refuse_damage(run / "checkpoints" / "step-00000001", config)


@torch.no_grad()
def of_the_checkpoint(checkpoint: Path, *overrides: str) -> Tensor:
    """Returns what the model of a checkpoint computes under the run's mode."""
    components = components_of(*RUN, *overrides)
    with acquired(components.device) as streams, attached(components, streams) as found:
        model = found.model
        load_model(model, checkpoint, components.config, components.device)
        return model(torch.arange(8).view(1, 8)).clone()


def of_the_run(folder: Path, *overrides: str) -> Tensor:
    """Returns what the model of a run computes after its last step."""
    config, invocation = composed(*RUN, *overrides, run_dir=folder)
    folder.mkdir()
    with signals_as_before(), build(config, invocation) as job:
        train(job)
        with torch.no_grad():
            return job.components.model(torch.arange(8).view(1, 8)).clone()


@pytest.mark.parametrize("overrides", [("optimizer=adamw",), ("adapter=lora", "adapter.rank=2")])
@pytest.mark.slow
def test_the_model_is_that_after_the_last_step(tmp_path: Path, overrides: tuple[str, ...]):
    trained = of_the_run(tmp_path / "run", *overrides)
    assert torch.equal(of_the_checkpoint(tmp_path / "run" / CHECKPOINT, *overrides), trained)


def test_an_adapter_on_another_base_is_refused(tmp_path: Path):
    run_here(tmp_path, *RUN, "adapter=lora")
    with pytest.raises(UserError, match=r"the frozen base was made from seed=0, and is seed=1"):
        of_the_checkpoint(tmp_path / CHECKPOINT, "adapter=lora", "seed=1")

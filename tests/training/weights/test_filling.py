"""Models that were built on the meta device get their values: ours and those of libraries."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models.places import find_places
from tests.models.helpers.hf_models import tiny
from tests.models.helpers.saving import save_weights
from tests.models.helpers.small_diffusion import small
from tests.training.helpers.in_process import composed
from training.errors import UserError
from training.weights.filling import fill_buffers, fill_parameters, load

CPU = torch.device("cpu")


class Library(nn.Module):
    """A model with ways of its own, each of which notes its call."""

    def __init__(self, problem: str = ""):
        super().__init__()
        self.calls, self.problem = [], problem

    def fill_buffers(self) -> None:
        self._note("buffers")

    def initialise(self, seed: int, device: torch.device) -> None:
        self._note(f"initialise {seed} {device}")

    def load(self, path: Path) -> None:
        self._note(f"load {path}")

    def _note(self, call: str) -> None:
        if self.problem:
            raise ValueError(self.problem)
        self.calls.append(call)


def test_a_model_with_ways_of_its_own_is_filled_by_them():
    config, _ = composed("seed=3")
    model = Library()
    fill_buffers(model)
    fill_parameters(model, config, CPU, None)
    load(model, Path("there"))
    assert model.calls == ["buffers", "initialise 3 cpu", "load there"]


def test_what_has_no_value_is_one_line():
    config, _ = composed()
    model = Library("x.inv has no values")
    with pytest.raises(UserError, match=r"^model: x\.inv has no values$"):
        fill_buffers(model)
    with pytest.raises(UserError, match=r"^model: x\.inv has no values: give model\.weights=PATH$"):
        fill_parameters(model, config, CPU, None)


def test_a_model_of_ours_is_a_function_of_the_seed():
    models = [nn.Linear(3, 2) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        fill_buffers(model)
        fill_parameters(model, composed(f"seed={seed}")[0], CPU, None)
    assert torch.equal(models[0].weight, models[1].weight)
    assert not torch.equal(models[0].weight, models[2].weight)


@pytest.mark.parametrize(("build", "name"), [(tiny, "gpt2"), (tiny, "mixtral"), (small, "dit")])
def test_the_weights_of_a_runs_checkpoint_fill_a_model_of_a_library(tmp_path: Path, build, name):
    saved, model = build(name), build(name)
    save_weights(saved, tmp_path / "checkpoint", max_shard_bytes=10_000)
    for parameter in model.parameters():
        parameter.data.zero_()
    load(model, tmp_path / "checkpoint")
    for (name, value), now in zip(saved.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(now, value), name
    assert find_places(model, tmp_path / "checkpoint").reasons == {}

"""Users change weights between steps: swapped data, replaced parameters, values given to one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE, evaluate, same_as_resident, train_step

pytestmark = pytest.mark.usefixtures("device")


@EVERY_MODE
@pytest.mark.parametrize("backup_is_a_copy", [False, True])
def test_data_swapped_for_an_evaluation_and_back(make: Callable, backup_is_a_copy: bool):
    """As averaged weights (EMA) and PEFT's safe merge do."""

    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode)]
        backup = [p.data.clone() if backup_is_a_copy else p.data for p in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        seen.append(evaluate(model))
        for parameter, data in zip(model.parameters(), backup, strict=True):
            parameter.data = data
        return [*seen, evaluate(model), train_step(model, mode, 1), evaluate(model)]

    same_as_resident(make, scenario)


@EVERY_MODE
def test_data_swapped_and_trained_on(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode)]
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        return [*seen, train_step(model, mode, 1), train_step(model, mode, 2), evaluate(model)]

    same_as_resident(make, scenario)


def given(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}


@EVERY_MODE
def test_functional_call_computes_with_the_given_values(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        with torch.no_grad():
            seen = torch.func.functional_call(model, given(model), (stack_inputs(0, 0),))
        return [seen, evaluate(model), train_step(model, mode)]

    same_as_resident(make, scenario)


# Not under shard_offload: as under every activation checkpoint, the recompute finds the values gone.
@pytest.mark.parametrize("make", [lambda: BounceLinear(outside="stream", slots=8), LayerStream])
def test_functional_call_gives_its_values_gradients(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        other = given(model)
        with mode.step():
            loss = torch.func.functional_call(model, other, (stack_inputs(0, 0),)).square().mean()
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        return [loss.detach(), *(p.grad for p in other.values()), evaluate(model)]

    same_as_resident(make, scenario)


@EVERY_MODE
def test_a_state_dict_assigned(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode)]
        state = {name: tensor.clone() * 0.5 for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        return [*seen, evaluate(model), train_step(model, mode, 1), evaluate(model)]

    same_as_resident(make, scenario)


@EVERY_MODE
def test_a_parameter_replaced(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode)]
        model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach() * 0.5)
        model.stem.weight = nn.Parameter(model.stem.weight.detach() * 2)
        return [*seen, evaluate(model), train_step(model, mode, 1), evaluate(model)]

    same_as_resident(make, scenario)

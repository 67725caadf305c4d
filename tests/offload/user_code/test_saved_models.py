"""Models and parts of them in files and in copies, while a mode is attached and afterwards."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from offload.activations.checkpointing import recompute
from offload.modes.layer_stream import LayerStream
from offload.optimizer.adamw import HostAdamW
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE_OR_NONE, alike, evaluate, train_step, under

pytestmark = pytest.mark.usefixtures("device")


@EVERY_MODE_OR_NONE
def test_no_two_tensors_share_a_storage(make: Callable):
    """safetensors and transformers refuse, or leave out, what looks tied."""
    model, mode = Stack(), make()
    model.blocks[1].register_parameter("nothing", nn.Parameter(torch.empty(0)))

    def check() -> None:
        state = model.state_dict()
        storages = [tensor.untyped_storage() for tensor in state.values()]
        assert len({storage.data_ptr() for storage in storages if storage.nbytes()}) == len(state) - 1
        assert [storage.nbytes() for storage in storages] == [tensor.nbytes for tensor in state.values()]
        loaded = load(save(state))
        assert all(torch.equal(loaded[name].cpu(), tensor.cpu()) for name, tensor in state.items())

    with under(mode, model) as attached:
        train_step(model, attached)
        check()
    check()


def filed(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def layers() -> nn.Sequential:
    """A model that is of torch's own classes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8)) for _ in range(4)))


@pytest.mark.sampled
@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("copied", [copy.deepcopy, filed])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_copy_of_an_attached_model_is_a_plain_model(make: Callable, copied: Callable, recomputes: bool, device: str):
    model, mode = layers(), make()
    plain = copy.deepcopy(model)
    with under(mode, model) as attached:
        if recomputes:
            recompute(model)
        train_step(model, attached)
        other, expected = copied(model).to(device), evaluate(model)
        assert alike(evaluate(other), expected)
        for one, module in zip(other.modules(), plain.modules(), strict=True):
            assert vars(one).keys() == vars(module).keys()
            assert type(one._parameters) is type(one._buffers) is dict
            assert not any(value for name, value in vars(one).items() if name.endswith("hooks") and value)
        # It trains without a step, and by itself.
        other(stack_inputs(0, 0)).sum().backward()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert alike(evaluate(model), expected)
    # And it takes a mode.
    with under(make(), other):
        pass


@EVERY_MODE_OR_NONE
def test_a_file_of_an_attached_model_names_nothing_of_this_package(make: Callable):
    """So that it can be read where the package is not."""
    model, mode = layers(), make()
    file = io.BytesIO()
    with under(mode, model) as attached:
        train_step(model, attached)
        torch.save(model, file)
    assert b"offload" not in file.getvalue()


@pytest.mark.parametrize("copied", [copy.deepcopy, filed])
def test_a_copy_of_a_model_whose_updates_are_under_way(copied: Callable):
    model, mode = Stack(), LayerStream()
    with under(mode, model) as attached:
        optimizer = HostAdamW(model.parameters(), threads=1)
        attached.overlap(optimizer, early=False)
        with attached.step():
            attached.accumulate([lambda: model(stack_inputs(0, 0)).square().mean()])
        optimizer.step()
        optimizer.finish()
        other = copied(model)
        assert all(torch.equal(one, tensor) for one, tensor in zip(other.parameters(), model.parameters(), strict=True))
        other.state_dict()
        other.load_state_dict(model.state_dict())
    assert not any(module._state_dict_pre_hooks for module in other.modules())

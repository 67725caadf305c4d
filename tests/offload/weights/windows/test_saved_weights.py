"""Weights that autograd saves: by name, and brought back when backward asks for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.activations.checkpointing import recompute
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import Stack, stack_inputs, under


def test_a_slots_memory_is_not_passed_to_the_hooks_outside():
    """Then no graph keeps it, and other units may take the slot."""
    model, mode, kept = Stack(), LayerStream(slots=1), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with under(mode, model) as attached, attached.step():
        slots = {slot.bytes.data_ptr() for slot in attached._streamer._slots}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(stack_inputs(0, 0)).sum()
        assert kept
        assert not any(tensor.untyped_storage().data_ptr() in slots for tensor in kept)
        loss.backward()


def test_hooks_that_are_nested_in_themselves_do_nothing():
    model, mode = Stack(), LayerStream(slots=1)
    with under(mode, model) as attached:
        windows = attached._streamer._windows
        saved, running = windows._saved, windows.threads.running
        with saved.hooks(running):
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            with saved.hooks(running):
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) == hooks


def test_weights_changed_between_forward_and_backward_are_refused():
    model, mode = Stack(), BounceLinear(slots=1)
    with under(mode, model) as attached, attached.step():
        loss = model(stack_inputs(0, 0)).sum()
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
        with pytest.raises(
            RuntimeError, match=r"blocks.1.up.weight, needed for gradient computation, has been modified"
        ):
            loss.backward()


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_weights_may_change_when_backward_does_not_need_them(place: str):
    with torch.device(place):
        model, mode = Stack(), LayerStream(slots=1)
    with under(mode, model) as attached:
        for parameter in model.parameters():
            nn.init.uniform_(parameter)
        with attached.step():
            loss = model(stack_inputs(0, 0)).sum()
            with torch.no_grad():
                # Backward of a layer does not need its bias, although it lies beside its weight.
                model.blocks[1].up.bias.add_(1)
            loss.backward()


def test_an_in_place_edit_of_a_saved_activation_raises_as_autograd_does():
    model, mode = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), BounceLinear()
    with under(mode, model) as attached, attached.step():
        hidden = model[0](stack_inputs(0, 0))
        out = model[1](hidden)
        hidden.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("of_the_user", [False, True])
def test_a_recompute_of_frozen_blocks_is_made_for_a_checkpoint_of_the_user_alone(of_the_user: bool):
    """torch's begins where a weight is asked for; that of `recompute` need not, for weights come back by name."""
    model, mode, calls = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).requires_grad_(False), LayerStream(), []
    model[1].register_forward_pre_hook(lambda *_: calls.append(1))
    block = nn.Sequential(model[1])
    with under(mode, model) as attached, attached.step():
        undo = recompute([block])
        inputs = stack_inputs(0, 0).requires_grad_()
        hidden = checkpoint(model[1], inputs, use_reentrant=False) if of_the_user else block(inputs)
        model[2](hidden).sum().backward()
        undo()
    assert len(calls) == 1 + of_the_user
    assert torch.equal(inputs.grad, torch.ones(5, 8) @ model[2].weight @ model[1].weight)

"""The protocol of what makes an optimizer's updates beside the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.optimizer.deferral import Deferral
from offload.optimizer.overlap import Overlap
from tests.offload.helpers.models import Stack, attached
from tests.offload.helpers.updates import host_adamw, made, one_step
from tests.offload.weights.gradients.test_updates import methods


def test_overlap_has_every_method_of_the_protocol():
    assert methods(Deferral).items() <= methods(Overlap).items()


@pytest.mark.parametrize("early", [False, True])
def test_the_updates_of_an_optimizer_are_made_by_one_mode(early: bool):
    first, second = made(Stack, torch.float32), made(Stack, torch.float32)
    optimizer = host_adamw(nn.ModuleList([first, second]))
    mode, other = LayerStream(), LayerStream()
    with attached(mode, first):
        mode.overlap(optimizer, early)
        # Once more for the same mode.
        mode.overlap(optimizer, early)
        with attached(other, second):
            with pytest.raises(RuntimeError, match="a mode makes the updates of this optimizer already"):
                other.overlap(optimizer, early)
            one_step(first, mode)
            optimizer.step()
    assert optimizer.state
    with attached(other, second):
        other.overlap(optimizer, early)

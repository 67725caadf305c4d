"""Which steps have trials, and of which parameters; the tests beside this have the trials themselves."""

import dataclasses

import torch
from torch import nn

from offload.optimizer.adamw import HostAdamW
from offload.speculation.trials import Speculation, Trials
from offload.speculation.undo_log import undo_library
from tests.offload.helpers.kernels import needs_compiler
from tests.offload.helpers.updates import host_adamw

pytestmark = needs_compiler


def trials_of(optimizer: HostAdamW) -> Trials:
    return Trials(optimizer, undo_library(optimizer.format), Speculation(1.0, 1 << 20))


def test_auto_speculates_after_two_quiet_steps():
    model = nn.Linear(2, 2)
    trials = trials_of(host_adamw(model))
    goes_on = []
    for is_clipped in (False, True, False, False, False):
        trials.begin_step()
        goes_on.append(trials.goes_on)
        trials.end_step(is_clipped)
    assert goes_on == [True, True, False, False, True]
    trials.begin_step()
    trials.take_back()
    trials.end_step(is_clipped=False)
    trials.begin_step()
    assert not trials.goes_on


def test_what_lies_otherwise_in_memory_is_not_undone():
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = host_adamw(convolution)
    weight, bias = optimizer.claim(convolution.parameters(), {p: torch.ones_like(p) for p in convolution.parameters()})
    trials = trials_of(optimizer)
    assert not trials._can_undo(weight)
    assert trials._can_undo(bias)
    assert not trials._can_undo(dataclasses.replace(bias, gradient=bias.gradient.half()))
    optimizer.states.place([convolution.bias], torch.device("meta"))
    assert not trials._can_undo(bias)

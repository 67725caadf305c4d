"""The core's own destination takes nothing: gradients go home, and their norms are whole."""

from __future__ import annotations

import torch
from torch import nn

from offload.weights.gradients.destination import Destination


def test_it_leaves_all_gradients_to_their_homes():
    destination, norms = Destination(), {nn.Parameter(torch.ones(2)): torch.ones(())}
    assert not destination.takes_gradients
    assert not destination.take(None, None, torch.ones(2))
    assert destination.summed_parameters() == frozenset()
    assert destination.known_norms(norms) == norms

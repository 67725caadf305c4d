"""The states of the random generators are read and restored together."""

from __future__ import annotations

import random

import numpy
import torch

from offload.torch_private.random_state import RandomState


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_all_generators_repeat():
    state = RandomState.of(torch.device("cpu"))
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


def test_those_of_python_alone():
    state = RandomState.of_python()
    first = draw()
    state.restore()
    second = draw()
    assert first[:2] == second[:2]
    assert first[2] != second[2]

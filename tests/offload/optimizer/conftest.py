"""Fixtures for the tests of updates."""

from __future__ import annotations

import pytest

from offload.optimizer import kernel_choice, kernels
from tests.offload.helpers.updates import decides_in_time


@pytest.fixture
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so small that a parameter has several, and the measurement of kernels short."""
    monkeypatch.setattr(kernels, "HOST_TILE", 256)
    monkeypatch.setattr(kernel_choice, "SAMPLE", 1 << 12)


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the worker make the updates that it was offered before it knows whether they count, at any load."""
    decides_in_time(monkeypatch)

"""Fixtures for the tests of updates."""

from __future__ import annotations

import pytest

from offload.optimizer import kernel_choice, kernels


@pytest.fixture
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so small that a parameter has several, and the measurement of kernels short."""
    monkeypatch.setattr(kernels, "HOST_TILE", 256)
    monkeypatch.setattr(kernel_choice, "SAMPLE", 1 << 12)

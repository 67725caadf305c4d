"""Fixtures for the tests of updates."""

import pytest

from offload.optimizer import kernels


@pytest.fixture
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so small that a parameter has several."""
    monkeypatch.setattr(kernels, "HOST_TILE", 256)

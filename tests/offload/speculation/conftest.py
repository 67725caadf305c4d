"""Fixtures for the tests of updates that may be undone."""

import pytest

from tests.offload.helpers.updates import decides_in_time


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the worker make the updates that it was offered before it knows whether they count, at any load."""
    decides_in_time(monkeypatch)

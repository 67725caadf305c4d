"""Settings under which models of a few kilobytes do all that large ones do."""

import pytest

from offload.modes import shard_offload, tensor_swap


def swap_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small activations leave the device: they would stay, or be used again before their memory is freed."""
    monkeypatch.setattr(shard_offload, "MIN_BOUNDARY_BYTES", 1)
    monkeypatch.setattr(tensor_swap, "MIN_BYTES", 1)
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 0)
    monkeypatch.setattr(shard_offload, "IN_FLIGHT_BYTES", 1)

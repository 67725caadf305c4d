"""The free memory of a device: of a GPU the free bytes and the unused ones of torch's allocator, else unknown."""

from __future__ import annotations

import pytest
import torch

from offload.memory.device_memory import free_device_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_unknown_on_devices_that_are_no_gpu(device: str):
    assert free_device_bytes(torch.device(device)) is None


def test_memory_that_the_allocator_holds_for_nobody_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert free_device_bytes(torch.device("cuda")) == 1070

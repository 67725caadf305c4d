"""Version counters: which tensors share one, and handles that share it without memory."""

from __future__ import annotations

import torch

from offload.activations.versions import VersionHandles, share_version
from offload.torch_private.torch_internals import StorageWeakRef


def test_tensors_that_share_a_counter():
    tensor = torch.zeros(4, 4)
    first, second = tensor.unsafe_chunk(2)
    for other, shared in [(tensor[0], True), (tensor.detach(), True), (tensor.data, False), (first, False)]:
        before = (tensor._version, other._version)
        assert share_version(tensor, other) is shared
        assert (tensor._version, other._version) == before
    assert not share_version(first, second)


def test_a_handle_has_the_counter_and_not_the_memory():
    handles, tensor = VersionHandles(torch.device("cpu")), torch.zeros(8, dtype=torch.bfloat16)
    handle, storage = handles.of(tensor), StorageWeakRef(tensor.untyped_storage())
    assert (handle.numel(), handle.dtype) == (0, torch.bfloat16)
    before = handle._version
    tensor.add_(1)
    tensor[2:].mul_(2)
    assert handle._version == tensor._version == before + 2
    assert share_version(handle, tensor)
    del tensor
    assert storage.expired()


def test_handles_of_different_tensors_have_different_counters():
    handles, one, other = VersionHandles(torch.device("cpu")), torch.zeros(8), torch.zeros(8)
    first, second = handles.of(one), handles.of(other)
    one.add_(1)
    assert (first._version, second._version) == (1, 0)

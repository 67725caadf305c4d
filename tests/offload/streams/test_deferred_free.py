"""Memory that a copy still uses is freed once its stream has been made to wait, and no sooner than it must."""

import pytest
import torch

from offload.streams import registry
from offload.streams.deferred_free import DeferredFrees, PendingFree, StashedTensors
from offload.streams.stream_checker import StreamOrderError
from offload.streams.transfer import Telemetry, Transfer
from offload.torch_private.torch_internals import StorageWeakRef

NBYTES = 100


@pytest.fixture
def transfer(streams: registry.Streams) -> Transfer:
    return Transfer(streams, Telemetry(streams))


def copied_out(transfer: Transfer) -> tuple[PendingFree, StorageWeakRef]:
    """Queues the copy of a new tensor of NBYTES; returns the pending free and a weak reference to the memory."""
    streams, tensor = transfer.streams, torch.zeros(NBYTES, dtype=torch.uint8)
    pending = PendingFree(tensor, streams.event(), "tensor", streams.compute)
    streams.writes(streams.compute, pending, "forward")
    transfer.after_compute(streams.d2h)
    streams.reads(streams.d2h, pending, "copy out")
    transfer.copy_out(torch.zeros_like(tensor), tensor, done=pending.done, what="tensor")
    return pending, StorageWeakRef(tensor.untyped_storage())


def fill(queue: DeferredFrees | StashedTensors, transfer: Transfer, count: int) -> list[StorageWeakRef]:
    memory = []
    for _ in range(count):
        pending, reference = copied_out(transfer)
        queue.add(pending)
        del pending
        memory.append(reference)
    return memory


def freed(memory: list[StorageWeakRef]) -> list[bool]:
    return [reference.expired() for reference in memory]


def test_the_oldest_memory_is_freed_beyond_the_limit(transfer: Transfer):
    frees = DeferredFrees(transfer, 2 * NBYTES)
    memory = fill(frees, transfer, 4)
    assert freed(memory) == [True, True, False, False]
    frees.release()
    assert freed(memory) == [True] * 4


@pytest.mark.parametrize("limit", [0, NBYTES - 1])
def test_the_newest_memory_stays_though_it_is_larger_than_the_limit(transfer: Transfer, limit: int):
    frees = DeferredFrees(transfer, limit)
    memory = fill(frees, transfer, 2)
    assert freed(memory) == [True, False]


def test_memory_is_reused_after_its_copy(transfer: Transfer):
    pending, _ = copied_out(transfer)
    with pytest.raises(StreamOrderError, match="tensor: 'reuse' on compute may run before 'copy out' on d2h is done"):
        transfer.streams.writes(pending.owner, pending, "reuse")
    frees = DeferredFrees(transfer, 10 * NBYTES)
    frees.add(pending)
    frees.release()
    transfer.streams.writes(pending.owner, pending, "reuse")


def test_only_the_stream_that_the_memory_was_allocated_on_waits(transfer: Transfer):
    streams = transfer.streams
    pending, _ = copied_out(transfer)
    frees = DeferredFrees(transfer, 10 * NBYTES)
    frees.add(pending)
    with streams.on(streams.h2d):
        frees.release()
    streams.writes(pending.owner, pending, "reuse")
    with pytest.raises(StreamOrderError, match="on h2d may run before"):
        streams.writes(streams.h2d, pending, "reuse by another stream")


def test_stashed_memory_stays_while_there_is_room(transfer: Transfer):
    stashed = StashedTensors(DeferredFrees(transfer, 0))
    memory = fill(stashed, transfer, 4)
    stashed.fit_into(4 * NBYTES)
    assert stashed.nbytes == 4 * NBYTES
    assert freed(memory) == [False] * 4
    stashed.fit_into(2 * NBYTES - 1)
    # The three oldest have left; of these, the deferred frees keep the newest.
    assert stashed.nbytes == NBYTES
    assert freed(memory) == [True, True, False, False]
    stashed.release()
    assert stashed.nbytes == 0
    assert freed(memory) == [True] * 4

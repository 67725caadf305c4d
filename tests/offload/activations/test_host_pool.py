"""Host blocks are reused from step to step where they fit, and returned to the host when no step needs them."""

import random

import pytest
import torch

from offload.activations.host_pool import IDLE_STEPS, PAGE_BYTES, SLACK, HostPool
from offload.memory.host_memory import HostArena
from offload.streams import registry


@pytest.fixture
def pool(streams: registry.Streams) -> HostPool:
    return HostPool(HostArena(torch.device("cpu")), streams)


def pages_of(pool: HostPool) -> int:
    """Returns the pages of all blocks, idle and taken."""
    return pool._arena.pageable_bytes // PAGE_BYTES


def step(pool: HostPool, *pages: int) -> list[int]:
    """Takes blocks of so many pages and releases them. Returns the lengths of the blocks that it got, in pages."""
    blocks = [pool.take(count * PAGE_BYTES, "test") for count in pages]
    assert [block.bytes.numel() for block in blocks] == [count * PAGE_BYTES for count in pages]
    got = [block.block.bytes.numel() // PAGE_BYTES for block in blocks]
    for block in blocks:
        pool.release(block)
    return got


def test_equal_steps_take_the_same_blocks(pool: HostPool):
    assert step(pool, 8, 10, 8, 9) == [8, 10, 8, 9]
    pool.end_step()
    assert step(pool, 8, 10, 8, 9) == [8, 10, 8, 9]
    assert not pool.grew
    assert pages_of(pool) == 35


def test_a_step_of_many_sizes_takes_each_its_own(pool: HostPool):
    """A block of another size is idle meanwhile, and is not taken for them."""
    first = [pool.take(count * PAGE_BYTES, "test") for count in (8, 8)]
    pool.release(pool.take(12 * PAGE_BYTES, "test"))
    second = [pool.take(count * PAGE_BYTES, "test") for count in (8, 12)]
    assert [block.block.bytes.numel() // PAGE_BYTES for block in (*first, *second)] == [8, 8, 8, 12]
    assert pages_of(pool) == 36


def test_a_block_is_taken_for_half_its_size_or_more(pool: HostPool):
    step(pool, 100, 120)
    pool.end_step()
    assert step(pool, 97) == [100]
    assert step(pool, 101) == [120]
    assert not pool.grew
    assert step(pool, 100 // SLACK - 1) == [100 // SLACK - 1]
    assert pool.grew


def test_lengths_that_vary_from_step_to_step_share_blocks(pool: HostPool):
    lengths, grew = random.Random(0), 0
    for _ in range(100):
        length = lengths.randint(60, 100)
        step(pool, *[length] * 4)
        grew += pool.grew
        pool.end_step()
        assert pages_of(pool) <= 4 * 400
    assert grew <= 15


def test_blocks_that_no_step_needs_are_returned(pool: HostPool):
    step(pool, 100)
    for _ in range(IDLE_STEPS + 2):
        pool.end_step()
        step(pool, 10)
    assert pages_of(pool) == 10

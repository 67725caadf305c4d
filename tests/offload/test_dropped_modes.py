"""A mode that is dropped in mid-step without detach leaves no memory locked, and none locked that is unmapped."""

from __future__ import annotations

import itertools

import pytest

from offload.runtime.registry import Streams
from tests.offload.helpers.dropped import LOCKING, MODES, check_attempts
from tests.offload.helpers.page_locks import FakeRuntime
from tests.offload.helpers.updates import make_small


@pytest.mark.parametrize(("name", "where"), list(zip(MODES, itertools.cycle(["forward", "backward"]), strict=False)))
@pytest.mark.slow
def test_a_dropped_mode_unlocks_its_memory_first(
    name: str, where: str, streams: Streams, monkeypatch: pytest.MonkeyPatch
):
    make_small(monkeypatch)
    runtime = FakeRuntime()
    runtime.install_for_the_cpu(monkeypatch)
    for locked in check_attempts(name, where, streams, attempts=1):
        assert sum(runtime.ranges.values()) == locked
        assert runtime.unmapped == []
    assert ("register" in runtime.calls) == (name in LOCKING)

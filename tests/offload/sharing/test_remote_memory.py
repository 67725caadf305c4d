"""Sharers read each other's device memory, and wait for each other; one that is lost keeps no stream waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from offload.sharing.cuda_peers import CudaPeers
from offload.sharing.remote_memory import HostPeers, Part, Peers, has_come
from offload.sharing.sharers import SharerLostError
from tests.offload.helpers.cuda_driver import FakeDriver
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

ON_CPU = SimpleNamespace(device=torch.device("cpu", 0))


def nobody_objects(problem: str | None) -> None:
    assert problem is None


def of_gpus(sharers: ThreadSharers) -> CudaPeers:
    return CudaPeers(sharers, ON_CPU, nobody_objects)


@pytest.fixture(params=["cpu", "gpu"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[ThreadSharers], Peers]:
    if request.param == "cpu":
        return HostPeers
    FakeDriver().install(monkeypatch)
    return of_gpus


@pytest.mark.parametrize("count", [2, 3])
def test_between_meetings_each_reads_what_others_had_and_has_what_they_wrote(
    make: Callable[[ThreadSharers], Peers], count: int
):
    def work(sharers: ThreadSharers) -> list[tuple[list[int], list[int]]]:
        found, own = [], make(sharers)
        regions = [own.allocate(nbytes) for nbytes in (64, 0, 10_000, 16 * count + 8)]
        assert [region.numel() for region in regions] == [64, 0, 10_000, 16 * count + 8]
        read, written = regions[2:]
        for turn in range(20):
            number = 10 * turn + sharers.rank
            read.fill_(number)
            written.fill_(255)
            if turn % count == sharers.rank:
                time.sleep(0.005)
            own.meet()
            target, values = torch.empty(2 * count, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
            own.read([Part(target[2 * rank : 2 * rank + 2], rank, 2, 8) for rank in range(count)])
            values.view(torch.uint8).fill_(number)
            own.write([Part(values, rank, 3, 8 + 16 * sharers.rank) for rank in range(count)])
            own.meet()
            assert written[:8].eq(255).all()
            seen = target.view(torch.uint8).view(count, -1), written[8:].view(count, -1)
            found.append(tuple(each.unique(dim=1).flatten().tolist() for each in seen))
        own.close()
        return found

    for found in as_sharers(count, work):
        for turn, seen in enumerate(found):
            assert seen == ([(10 * turn + rank) % 256 for rank in range(count)],) * 2


def test_a_number_goes_round():
    assert has_come(5, 5)
    assert has_come(6, 5)
    assert not has_come(4, 5)
    assert has_come(3, 2**32 - 3)
    assert not has_come(2**32 - 3, 3)


def test_meetings_go_on_where_the_number_goes_round(make: Callable[[ThreadSharers], Peers]):
    def work(sharers: ThreadSharers) -> int:
        own = make(sharers)
        own._number = 2**32 - 2
        for place in range(own._numbers.nbytes // 64):
            own._numbers[64 * place] = own._number
        sharers.laid_down(None)
        for _ in range(4):
            own.meet()
        own.close()
        return own._numbers[own._numbers.theirs(1 - sharers.rank)]

    assert as_sharers(2, work) == [2, 2]


def test_on_the_cpu_a_sharer_that_does_not_come_is_named():
    def work(sharers: ThreadSharers) -> None:
        sharers.limit_s = 0.2
        own = HostPeers(sharers)
        if sharers.rank == 0:
            with pytest.raises(SharerLostError, match=r"^rank 1 did not come within 0\.2 seconds$"):
                own.meet()
        sharers.laid_down(None)

    as_sharers(2, work)

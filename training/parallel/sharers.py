"""The ranks of a host as the engine's `Sharers`, which share the homes of what streams, over torch.distributed.

Numbers are exchanged through shared memory within a host, and over gloo between hosts. Slices of weights are gathered
within a host. Gradients are summed within each host first, and then slice by slice over the hosts.
"""

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from offload.sharing import ExchangeBoard, SharerLostError, Sharers
from training.errors import UserError
from training.parallel.messages import PATIENCE, Messages
from training.parallel.reduce import gather_into, ordered_sum, ordered_sum_of_hosts


def of_first(sharers: Sharers, number: float, what: str) -> float:
    """Returns the `number` of the first sharer of all hosts, on each of them. `what` names it."""
    (bits,) = struct.unpack("q", struct.pack("d", number))
    (first, *_), *_ = sharers.exchange((bits,), what, everywhere=True)
    return struct.unpack("d", struct.pack("q", first))[0]


@dataclass(frozen=True)
class HostGroups:
    """The ranks of this rank's host, and the groups that connect them. All hosts have the same number of ranks.

    Attributes:
        host: the number of this host.
        hosts: the number of hosts.
        ranks: the ranks on this host.
        data: the group of these ranks for tensors on devices.
        patient: the group of these ranks for exchanges between steps, without a time limit.
        across: for tensors on devices, the group of the ranks that have this rank's place on their hosts; None on one
            host.
    """

    host: int
    hosts: int
    ranks: tuple[int, ...]
    data: dist.ProcessGroup
    patient: dist.ProcessGroup
    across: dist.ProcessGroup | None

    @classmethod
    def of(
        cls, rank: int, hosts: Sequence[int], make_data: Callable[..., Any], make_patient: Callable[..., Any]
    ) -> Self:
        """Makes the groups of all ranks by `make_data` and `make_patient`; `hosts` has the host of each rank.

        Raises UserError unless all hosts have the same number of ranks, and the ranks of a host follow each other.
        """
        counts = Counter(hosts)
        count = counts[hosts[0]]
        names = list(counts)
        if [*hosts] != [host for host in names for _ in range(count)]:
            raise UserError(
                f"parallel.homes=shared: the hosts of the ranks are {', '.join(map(str, hosts))}: start as many on each"
                " host, one host after the other, or give parallel.homes=own"
            )
        members = [tuple(range(start, start + count)) for start in range(0, len(hosts), count)]
        here = rank // count
        # Every rank makes the groups of all, as torch.distributed asks.
        data = [make_data(ranks) for ranks in members]
        patient = [make_patient(ranks) for ranks in members]
        across = [make_data(ranks) for ranks in zip(*members, strict=True)] if len(names) > 1 else [None] * count
        return cls(here, len(names), members[here], data[here], patient[here], across[rank % count])


class GroupSharers(Sharers):
    """`offload.sharing.Sharers` of the ranks of one host, with the group of everyone for exchanges inside a step."""

    def __init__(self, groups: HostGroups, everyone: dist.ProcessGroup, messages: Messages):
        self.rank, self.count = groups.data.rank(), groups.data.size()
        self.first, self.hosts = groups.ranks[0], groups.hosts
        self._groups, self._everyone = groups, everyone
        self.limit_s = messages.exchange_s
        self._messages = messages
        self._board = ExchangeBoard(self)

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        if not patient and (self.hosts == 1 or not everywhere):
            return self._messages.attempt(lambda: self._board.exchange(numbers, self.limit_s), what)
        own = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        group = self._everyone if everywhere else self._groups.patient
        everyone = torch.empty(group.size() * len(own), dtype=torch.int64, device="cpu")
        if patient:
            wait = self._messages.wait
            self._messages.attempt(lambda: wait(gather_into(everyone, own, group, later=True), PATIENCE), what)
        else:
            self._messages.attempt(lambda: gather_into(everyone, own, group), what)
        return everyone.view(group.size(), -1).tolist()

    def attempt(self, call: Callable[[], None], what: str) -> None:
        # Its other errors are this rank's own, while those of torch.distributed mean that another is lost.
        try:
            call()
        except SharerLostError as error:
            self._messages.attempt(partial(_fail, error), what)

    def gather(self, whole: Tensor, what: str) -> None:
        own = whole.chunk(self.count)[self.rank]
        self._messages.attempt(lambda: gather_into(whole, own, self._groups.data), what)

    def sum(self, flat: Tensor, what: str) -> None:
        groups = self._groups
        if groups.across is None:
            self._messages.attempt(lambda: ordered_sum(flat, groups.data), what)
        else:
            self._messages.attempt(lambda: ordered_sum_of_hosts(flat, groups.data, groups.across), what)


def _fail(error: Exception) -> None:
    raise error

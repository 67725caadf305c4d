"""The processes that share the homes of one model, each with a device of its own. `NO_SHARERS` shares nothing.

Processes of one host share memory. Where several hosts train one model, each has its own homes, and gradients are
summed over all (hybrid sharding, as in PyTorch FSDP, Zhao et al. 2023).

The engine asks its sharers for an exchange of a few numbers and for a collective on the device. It imports no
torch.distributed: `training.parallel.sharers` implements the protocol with it.

Every sharer makes the same calls in the same order: each of them waits for the same call of all others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

OWN_HOMES = "give each process a home of its own"
"""ends the message of an error that sharing alone brings about; who configures it adds how"""


class SharerLostError(RuntimeError):
    """A sharer, number `rank` of its host, has ended or `hangs`: what all were to do together cannot be done."""

    def __init__(self, rank: int, problem: str, hangs: bool):
        super().__init__(problem)
        self.rank = rank
        self.hangs = hangs


class Sharers(Protocol):
    """The processes that share homes. This one is number `rank` of the `count` of its host.

    `first` is the number of its host's first among those of all `hosts`, each of which has `count`. A sharer that does
    not come for `limit_s` seconds counts as one that hangs. Every method raises an error, SharerLostError where it is
    known which, for a sharer that has ended or hangs.
    """

    rank: int
    count: int
    first: int
    hosts: int
    limit_s: float

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        """Blocks the host until every sharer has given as many numbers; returns those of each, in the order of ranks.

        `what` names what they are exchanged for, in the error that is raised where a sharer does not come. `patient`: a
        sharer may come much later, because it loads weights, say. `everywhere`: with the sharers of all hosts.
        """
        ...

    def attempt(self, call: Callable[[], None], what: str) -> None:
        """Makes a call for the purpose named; its SharerLostError becomes the error that other methods raise then."""
        ...

    def gather(self, whole: torch.Tensor, what: str) -> None:
        """Completes `whole` (uint8 on the device) on the current stream; sharer k gives the k-th of `count` slices.

        Only the sharers of one host take part. The host does not wait where the device has streams.
        """
        ...

    def sum(self, flat: torch.Tensor, what: str) -> None:
        """Makes `flat` (1-D on the device, its length a multiple of `count`) the sum over the sharers of all hosts.

        It is summed in its dtype and in the order of ranks, on the current stream. The host does not wait where the
        device has streams.
        """
        ...


class NoSharers:
    """A process that shares nothing: its homes are its own memory, and it waits for nobody."""

    rank = first = 0
    count = hosts = 1
    limit_s = float("inf")

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        return [list(numbers)]

    def attempt(self, call: Callable[[], None], what: str) -> None:
        call()

    def gather(self, whole: torch.Tensor, what: str) -> None:
        pass

    def sum(self, flat: torch.Tensor, what: str) -> None:
        pass


NO_SHARERS = NoSharers()


def meet(sharers: Sharers, what: str) -> None:
    """Blocks the host until every sharer of this host is here. `what` names the place."""
    sharers.exchange((0,), what, patient=True)


def exchange_bytes(sharers: Sharers, data: bytes, what: str) -> list[bytes]:
    """Blocks until every sharer of this host has given some bytes; returns those of each. `what` names them."""
    lengths = [length for (length,) in sharers.exchange((len(data),), what, patient=True)]
    words = -(-max(lengths) // 8)
    numbers = array("q", data.ljust(8 * words, b"\0"))
    found = sharers.exchange(numbers, what, patient=True) if words else [()] * sharers.count
    return [array("q", given).tobytes()[:length] for given, length in zip(found, lengths, strict=True)]

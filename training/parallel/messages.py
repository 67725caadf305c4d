"""Messages between rank 0 and the other ranks: orders go out, reports come back. And what a failed exchange means.

Before any collective of a step, every rank has reported that its gradients are on their way. So a rank that failed,
ended or hangs is found, and named, while the others are not yet stuck in a collective that it will never join. Ranks
that share homes have collectives inside a step (`training.parallel.sharers`): one that fails there ends, which the
others notice.
"""

import io
import pickle
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.sharing import SharerLostError
from training.config.schema import SCHEMAS
from training.errors import UserError
from training.parallel.ranks import RankLostError
from training.runs.failures import is_device_memory, is_host_memory

# Rank 0 may evaluate, sample or save for as long as it takes while the others wait for orders. If its process ends,
# they notice at once.
PATIENCE = timedelta(days=30)
# The factor by which another rank waits longer than rank 0 inside a step: so rank 0 is the first to name a third
# rank that hangs.
LONGER = 2
# The number of times, of a second each, that rank 0 looks for the process that has broken an exchange.
ATTEMPTS = 10
# Seconds after which a wait looks for signals: one that comes as the wait begins, or on another thread, ends no wait.
LOOKS_AT_SIGNALS_S = 0.2
# The dataclasses of options are made at import, so pickle does not find them: they go as (group, option).
NAMES = {schema: (group, option) for group, options in SCHEMAS.items() for option, schema in options.items()}


class FirstLostError(Exception):
    """Raised on another rank when rank 0 has ended."""


class FirstHungError(UserError):
    """Raised on another rank when rank 0 hangs in a step."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        return NAMES.get(obj) if isinstance(obj, type) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> type:
        group, option = pid
        return SCHEMAS[group][option]


def encoded(message: Any) -> tuple[Tensor, Tensor]:
    """Returns the length of a pickled message, int64 [1], and its bytes, uint8 [length].

    Clone a tensor that is a view before: pickle writes the whole storage under a view.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return torch.tensor([len(data)]), data


def decoded(data: Tensor) -> Any:
    """Returns the message whose bytes are `data`. Both are of processes of one run of one user."""
    return _Unpickler(io.BytesIO(data.numpy().tobytes())).load()


class Waiter:
    """Makes calls that block, one at a time, on a thread of its own: inside torch's waits Python handles no signal."""

    def __init__(self):
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        # The end of the process does not wait for it.
        threading.Thread(target=self._work, daemon=True).start()

    def wait(self, call: Callable[[], object]) -> None:
        """Waits for `call`, and raises what it raises. If a signal's handler raises, `call` runs on: call no other."""
        self._calls.put(call)
        while True:
            try:
                error = self._outcomes.get(timeout=LOOKS_AT_SIGNALS_S)
                break
            except Empty:
                continue
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread, once its call has returned."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            error = None
            try:
                call()
            except BaseException as raised:
                error = raised
            # Before the waiter goes on: where the process ends meanwhile, it aborts as this thread frees torch's work.
            del call
            self._outcomes.put(error)


class Messages:
    """The messages of this rank, between `torch.distributed.init_process_group` and `leave`. All ranks make it at once.

    A rank that does not answer for `timeout_s` seconds counts as hung. `cause` tells rank 0 why the process of another
    rank has ended; it returns None for a process that runs. `is_exchanging` is True once this rank has failed in a
    collective: the other ranks wait in it and take no report. `first_sharer` is the first of the ranks that share homes
    with this one.
    """

    def __init__(self, timeout_s: float, host: int = 0, cause: Callable[[int], str | None] | None = None):
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        hosts: list[int] = [host] * self.count
        dist.all_gather_object(hosts, host)
        self.hosts = tuple(hosts)
        self.timeout_s = timeout_s
        self.is_exchanging = False
        self.first_sharer = 0
        self._cause = cause or (lambda rank: None)
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._nccl_groups: list[dist.ProcessGroup] = []
        self._waiter = Waiter()

    @property
    def exchange_s(self) -> float:
        """The seconds that an exchange of all may take. Rank 0 names a rank that hangs, before the others give up."""
        return self.timeout_s * (LONGER if self.rank else 1)

    def new_group(self, device: torch.device, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Returns a group of these ranks, or all, for tensors on `device`; every rank makes it."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=self.exchange_s))
        if backend == "nccl" and group != dist.GroupMember.NON_GROUP_MEMBER:
            self._nccl_groups.append(group)
        return group

    def tell(self, order: str, *values: Any) -> None:
        """Gives all other ranks an order; for rank 0."""
        for rank in range(1, self.count):
            self.send(rank, (order, *values))

    def order(self) -> tuple[Any, ...]:
        """Waits for the next order; for other ranks than 0. Raises FirstLostError when rank 0 has ended."""
        return self._receive(0, PATIENCE)

    def report(self, value: Any = None) -> None:
        """Sends `value` from another rank to rank 0, for which rank 0 waits in `reports`."""
        self.send(0, ("done", value))

    def report_failure(self, reason: str) -> None:
        """Tells rank 0 why this rank cannot go on, and takes orders until rank 0 has ended.

        Without that both could wait for ever, each to send to the other.
        """
        with suppress(FirstLostError):
            sending = self._report_later(("failed", reason))
            self.await_end()
            del sending

    def await_end(self) -> None:
        """Waits until rank 0, which may be saving, has ended: if this rank ended first, torchrun would kill rank 0."""
        with suppress(FirstLostError, FirstHungError):
            while self.order() != ("end",):
                pass

    def reports(self, own: Any = None, patient: bool = False) -> list[Any]:
        """On rank 0, waits for the reports of all other ranks; returns the values of all ranks, `own` first.

        Raises RankLostError for a rank that failed, ended or, unless `patient`, takes longer than `timeout_s`.
        """
        values = [own]
        for rank in range(1, self.count):
            kind, value = self._receive(rank, PATIENCE if patient else timedelta(seconds=self.timeout_s))
            if kind == "failed":
                raise RankLostError(f"{self._name(rank)}: {value}")
            values.append(value)
        return values

    def meet(self) -> None:
        """Waits until every rank is here, so that the collectives that follow take no longer than their copies."""
        if self.rank == 0:
            self.reports()
            self.tell("go")
            return
        sending = self._report_later(("done", None))
        (word, *_) = self._receive(0, timedelta(seconds=self.exchange_s))
        del sending
        if word != "go":
            raise FirstLostError(f"expected go, got {word}")

    def attempt(self, exchange: Callable[[], Any], what: str = "an exchange") -> Any:
        """Makes an exchange of all, and turns an error into that of a rank that is lost, unless it is this rank's."""
        try:
            return exchange()
        except SharerLostError as error:
            raise self._lost(self.first_sharer + error.rank, error, what) from error
        except RuntimeError as error:
            if is_device_memory(error) or is_host_memory(error):
                self.is_exchanging = True
                raise
            raise self._lost(None, error, what) from error

    def wait(self, work: dist.Work, limit: timedelta) -> None:
        """Waits for `work`, and handles signals meanwhile."""
        self._waiter.wait(partial(work.wait, limit))

    def send(self, rank: int, message: Any) -> None:
        """Sends a message, for which `rank` waits in `order` or `reports`."""
        # A rank receives orders as soon as it has carried out the last one. Rank 0 may be busy for long.
        limit = PATIENCE if self.rank else timedelta(seconds=self.timeout_s)
        try:
            for part in encoded(message):
                self.wait(dist.isend(part, rank, group=self._group), limit)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def leave(self) -> None:
        """Ends this rank's connections. Others that wait for it find out."""
        self._waiter.close()
        dist.destroy_process_group()

    def _report_later(self, message: Any) -> list[Any]:
        """Begins to send a message to rank 0. Keep what is returned, its memory, until rank 0 has answered."""
        parts = encoded(message)
        try:
            return [*parts, *(dist.isend(part, 0, group=self._group) for part in parts)]
        except RuntimeError as error:
            raise self._lost(0, error) from error

    def _receive(self, rank: int, limit: timedelta) -> Any:
        length = torch.empty(1, dtype=torch.int64)
        try:
            self.wait(dist.irecv(length, rank, group=self._group), limit)
            data = torch.empty(int(length), dtype=torch.uint8)
            self.wait(dist.irecv(data, rank, group=self._group), limit)
        except RuntimeError as error:
            raise self._lost(rank, error) from error
        return decoded(data)

    def _lost(self, rank: int | None, error: RuntimeError, what: str = "an exchange") -> Exception:
        """Returns what a failed exchange with `rank`, or with all, means; `what` was to be done."""
        end_collectives(self._nccl_groups)
        hung = error.hangs if isinstance(error, SharerLostError) else "Timed out" in str(error)
        limit = f"parallel.timeout_s={self.timeout_s:g}"
        if self.rank:
            if hung and not rank:
                return FirstHungError(f"rank 0 hangs: it did not answer within {LONGER} times {limit}")
            return FirstLostError(str(error))
        # A process that has closed its connections takes a moment to end.
        for other in (*range(1, self.count),) * (1 if hung else ATTEMPTS) if rank is None else (rank,):
            if cause := self._cause(other):
                return RankLostError(f"rank {other}: {cause}")
        who = "a rank" if rank is None else self._name(rank)
        if not hung:
            return RankLostError(f"{who} has ended: its messages have more ({first_sentence(str(error))})")
        if rank is None:
            who = self._name(1) if self.count == 2 else who
            return RankLostError(f"{who} hangs in {what}, which took longer than {limit}: give more if it may")
        return RankLostError(f"{who} hangs: it did not report within {limit}: give more if a step may take so long")

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self.hosts[rank]}" if len({*self.hosts}) > 1 else f"rank {rank}"


def from_first(value: Any = None) -> Any:
    """Returns on every rank the `value` that rank 0 gives."""
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def end_collectives(groups: Sequence[dist.ProcessGroup]) -> None:
    """Ends what NCCL `groups` have queued, because a rank is lost: else the device would wait for it for ever, and the
    end of the run for the device. What is computed from then on is wrong."""
    for group in groups:
        # The group may have ended by itself.
        with suppress(RuntimeError):
            group.abort()


def first_sentence(text: str) -> str:
    """Returns the first sentence of an error of torch's, without the place in its source; gloo adds much advice."""
    sentence = re.sub(r"^\[[^]]*\]", "", " ".join(text.split())).strip()
    return re.split(r"\.\s", sentence)[0][:120].rstrip(".")

"""The ranks of a run on several devices, over torch.distributed: NCCL between GPUs, gloo between CPUs and for messages.

Only rank 0 and one other rank ever exchange a message: orders go out, reports come back. Before any collective of a
step, every rank has reported that its gradients are on their way. So a rank that failed, ended or hangs is found, and
named, while the others are not yet stuck in a collective that it will never join. Ranks that share homes have
collectives inside a step (`training.parallel.sharers`): one that fails there ends, which the others notice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn

from offload import NO_SHARERS, HostAdamW, SharerLostError, Sharers, Speculation, meet
from training.batches import Batch
from training.errors import UserError
from training.parallel.collectives import end_collectives, first_sentence
from training.parallel.copies import Copies, fingerprint, refuse_statistics
from training.parallel.messages import encoded, from_bytes
from training.parallel.ranks import RankLostError, Ranks, Share
from training.parallel.reduce import reduce_gradients
from training.parallel.setup import Setup
from training.parallel.sharers import GroupSharers, HostGroups, of_first
from training.parallel.waiting import Waiter
from training.runs.failures import is_device_memory, is_host_memory
from training.runs.invocation import Invocation

# Rank 0 may evaluate, sample or save for as long as it takes while the others wait for orders. If its process ends,
# they notice at once.
PATIENCE = timedelta(days=30)
# The factor by which another rank waits longer than rank 0 inside a step: so rank 0 is the first to name a third
# rank that hangs.
LONGER = 2
# The number of times, of a second each, that rank 0 looks for the process that has broken an exchange.
ATTEMPTS = 10


class FirstLostError(Exception):
    """Raised on another rank when rank 0 has ended."""


class FirstHungError(UserError):
    """Raised on another rank when rank 0 hangs in a step."""


class Group(Ranks):
    """The ranks of one run, between `torch.distributed.init_process_group` and `close`.

    Args:
        device: where this rank computes.
        cause: on rank 0, of ranks whose processes it started: returns why the process of a rank ended; None if it runs.
        host: the number of this rank's host.
        end_others: on rank 0, of ranks whose processes it started: ends them at once.
        cores: how many of the host's cores are this rank's; None: all.
    """

    def __init__(
        self,
        device: torch.device,
        setup: Setup,
        cause: Callable[[int], str | None] | None = None,
        host: int = 0,
        end_others: Callable[[], None] = lambda: None,
        cores: int | None = None,
    ):
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        hosts: list[int] = [host] * self.count
        dist.all_gather_object(hosts, host)
        self.hosts = tuple(hosts)
        self.device, self.cores = device, cores
        self.timeout_s = setup.timeout_s
        self.is_exchanging = False
        """True once this rank has failed in a collective, in which the others wait for it: they take no report."""
        self._copies: Copies | None = None
        self._sharers: Sharers = NO_SHARERS
        # The group of the ranks that are the first on their hosts, which have copies of the homes.
        self._firsts: dist.ProcessGroup | None = None
        self._cause = cause or (lambda rank: None)
        self._end_others = end_others
        self._messages = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._exchange_s))
        self._nccl_groups: list[dist.ProcessGroup] = []
        self._data = self._new_data_group()
        self._waiter = Waiter()
        self._parts = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def _exchange_s(self) -> float:
        """How long an exchange of all may take. Rank 0 names a rank that hangs, before the others give up."""
        return self.timeout_s * (1 if self.is_first else LONGER)

    # Orders, from rank 0 to the others.

    def tell(self, order: str, *values: Any) -> None:
        """Gives all other ranks an order; for rank 0."""
        for rank in self._others():
            self._send(rank, (order, *values))

    def order(self) -> tuple[Any, ...]:
        """Waits for the next order; for other ranks than 0. Raises FirstLostError when rank 0 has ended."""
        return self._receive(0, PATIENCE)

    # Reports, from the others to rank 0.

    def report(self, value: Any = None) -> None:
        """Sends `value` from another rank to rank 0, for which rank 0 waits in `reports`."""
        self._send(0, ("done", value))

    def report_failure(self, reason: str) -> None:
        """Sends from another rank to rank 0 why it cannot continue, in one line, in place of its next report.

        Until rank 0 has ended, orders that arrive meanwhile are taken and not carried out: else neither could send.
        """
        with suppress(FirstLostError):
            sending = self._report_later(("failed", reason))
            self.await_end()
            del sending

    def await_end(self) -> None:
        """Waits on another rank until rank 0 has ended, and carries out no more orders.

        A rank that has lost a third one does that, because torchrun ends rank 0, which may be saving, with any other.
        """
        with suppress(FirstLostError, FirstHungError):
            while self.order() != ("end",):
                pass

    def reports(self, own: Any = None, patient: bool = False) -> list[Any]:
        """Waits on rank 0 for the report of each other rank; returns the values of all ranks, `own` first.

        Raises RankLostError naming a rank that failed, ended or, unless `patient`, takes longer than the time limit.
        """
        values = [own]
        for rank in self._others():
            kind, value = self._receive(rank, PATIENCE if patient else timedelta(seconds=self.timeout_s))
            if kind == "failed":
                raise RankLostError(f"{self._name(rank)}: {value}")
            values.append(value)
        return values

    def meet(self) -> None:
        """Waits until every rank is here, so that the collectives that follow take no longer than their copies."""
        if self.is_first:
            self.reports()
            self.tell("go")
        else:
            sending = self._report_later(("done", None))
            (word, *_) = self._receive(0, timedelta(seconds=self.timeout_s * LONGER))
            del sending
            if word != "go":
                raise FirstLostError(f"expected go, got {word}")

    # What a run asks for.

    def sharers(self, shared: bool) -> Sharers:
        self.shares_homes = shared
        if not shared:
            return NO_SHARERS
        new_patient_group = partial(dist.new_group, backend="gloo", timeout=PATIENCE)
        groups = HostGroups.of(self.rank, self.hosts, self._data_group_of, new_patient_group)
        attempt, wait = self._collective, self._wait
        self._sharers = GroupSharers(groups, self._host, self._exchange_s, PATIENCE, attempt, wait)
        if self.rank == groups.ranks[0]:
            self._firsts = groups.across
        return self._sharers

    def _data_group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        # All ranks have one group: its exchanges run in one order, whatever streams they are queued on.
        return self._data if len(ranks) == self.count else self._new_data_group(ranks)

    def _new_data_group(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Returns a group of these ranks, or all, for tensors on the devices; every rank makes it."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=self._exchange_s))
        if backend == "nccl" and group != dist.GroupMember.NON_GROUP_MEMBER:
            self._nccl_groups.append(group)
        return group

    def check_model(self, model: nn.Module) -> None:
        refuse_statistics(model)

    def begin(self, config: DictConfig, invocation: Invocation, speculation: Speculation | None) -> None:
        self.tell("build", config, invocation, speculation)

    def equalise(
        self, model: nn.Module, optimizer: HostAdamW, step: int, shared: Collection, reference: nn.Module | None
    ) -> None:
        self._copies = Copies(model, optimizer, shared, reference)
        if self.is_first:
            self.reports(patient=True)
            self.tell("start", step)
        for tensor in self._copies.tensors().values():
            self._copy_from_first(tensor, self._data)
        if self._firsts is not None:
            for tensor in self._copies.shared_tensors().values():
                self._copy_from_first(tensor, self._firsts)
        self._copies.renew_copies()
        if self.shares_homes:
            # Nobody reads the homes of a host before they have their values.
            meet(self._sharers, "copying the weights to all hosts")

    def hand_out(self, step: int, shares: Sequence[Share]) -> Share:
        for rank in self._others():
            self._send(rank, ("step", step, _own_memory(shares[rank])))
        return shares[0]

    def hand_out_evaluation(self, parts: Sequence[Batch], order: str = "evaluate") -> Sequence[Batch]:
        self._parts = len(parts)
        for rank in self._others():
            self._send(rank, (order, [_copied(part) for part in parts[rank :: self.count]]))
        return parts[:: self.count]

    def collect_evaluation(self, results: list[Any] | None) -> list[Any] | None:
        # Waits for the others even after a stop, so that their reports are not taken for those of a step. Else this
        # rank has done its own part, the largest.
        everyone = self.reports(results, patient=results is None)
        if results is None:
            return None
        return [everyone[part % self.count][part // self.count] for part in range(self._parts)]

    def total(self, losses: Tensor) -> Tensor:
        self.meet()
        gathered = [torch.empty_like(losses) for _ in range(self.count)]
        self._collective(lambda: dist.all_gather(gathered, losses.contiguous(), group=self._data))
        return torch.cat(gathered).sum(0)

    def reduce(
        self,
        model: nn.Module,
        norms: Mapping[nn.Parameter, Tensor],
        summed: Collection[nn.Parameter] = (),
    ) -> Mapping[nn.Parameter, Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad and p not in summed]
        given = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        everyone = [torch.empty_like(given) for _ in range(self.count)]
        self.meet()
        self._collective(lambda: dist.all_gather(everyone, given, group=self._host))
        some = torch.stack(everyone).any(dim=0).tolist()
        return dict(norms) | self._collective(lambda: reduce_gradients(parameters, some, self.device, self._data))

    def agreed(self, norm: float) -> float:
        return of_first(self._sharers, norm, "the norm of the gradients")

    def finish_updates(self, optimizer: HostAdamW) -> None:
        optimizer.finish()
        if self.shares_homes:
            self.tell("finish")
            self.reports(patient=True)

    def measured(self, values: dict[str, float]) -> list[dict[str, float]]:
        self.tell("measure")
        return self.reports(values)

    def check_equal(self) -> None:
        self.tell("fingerprints")
        own, *others = self.reports(self.fingerprints())
        for rank, theirs in enumerate(others, start=1):
            if different := next((name for name, value in theirs.items() if own.get(name) != value), None):
                raise UserError(
                    f"{different} differs between rank 0 and rank {rank}: the ranks have not computed the same updates,"
                    " so nothing was saved; resume from the last checkpoint with devices=1"
                )

    def fingerprints(self) -> dict[str, int]:
        """Returns the fingerprints of this rank's weights, buffers and optimizer states, once its updates are done.

        Where there are several hosts, the first rank of each has those of all that the ranks of its host share.
        """
        found = self._copies.tensors()
        if self.shares_homes and self._sharers.hosts > 1:
            meet(self._sharers, "comparing the hosts")
        if self._firsts is not None:
            found |= self._copies.shared_tensors()
        return {name: fingerprint(tensor) for name, tensor in found.items()}

    def _copy_from_first(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        if not tensor.numel():
            return
        moved = tensor.detach().to(self.device).contiguous()
        flat = moved.reshape(-1).view(torch.uint8)
        self._collective(lambda: dist.broadcast(flat, 0, group=group))
        if not self.is_first:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def abandon(self) -> None:
        self._end_others()

    def close(self) -> None:
        """Tells the other ranks, on rank 0 between steps, that the run is over, and ends the connections."""
        self.tell("end")
        self.leave()

    def leave(self) -> None:
        """Ends this rank's connections. Others that wait for it find out."""
        self._waiter.close()
        dist.destroy_process_group()

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self.hosts[rank]}" if len({*self.hosts}) > 1 else f"rank {rank}"

    def _others(self) -> range:
        return range(1, self.count)

    def _collective(self, exchange: Callable[[], Any], what: str = "an exchange") -> Any:
        try:
            return exchange()
        except SharerLostError as error:
            raise self._lost(self._sharers.first + error.rank, error, what) from error
        except RuntimeError as error:
            if is_device_memory(error) or is_host_memory(error):
                # This rank's own failure, and not that of another.
                self.is_exchanging = True
                raise
            raise self._lost(None, error, what) from error

    def _send(self, rank: int, message: Any) -> None:
        # A rank receives orders as soon as it has carried out the last one. Rank 0 may be busy for long.
        limit = timedelta(seconds=self.timeout_s) if self.is_first else PATIENCE
        try:
            for part in encoded(message):
                self._wait(dist.isend(part, rank, group=self._messages), limit)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _wait(self, work: dist.Work, limit: timedelta) -> None:
        self._waiter.wait(partial(work.wait, limit))

    def _report_later(self, message: Any) -> list[Any]:
        """Begins to send a message to rank 0. Keep what is returned, its memory, until rank 0 has answered."""
        parts = encoded(message)
        try:
            return [*parts, *(dist.isend(part, 0, group=self._messages) for part in parts)]
        except RuntimeError as error:
            raise self._lost(0, error) from error

    def _receive(self, rank: int, limit: timedelta) -> Any:
        length = torch.empty(1, dtype=torch.int64)
        try:
            self._wait(dist.irecv(length, rank, group=self._messages), limit)
            data = torch.empty(int(length), dtype=torch.uint8)
            self._wait(dist.irecv(data, rank, group=self._messages), limit)
        except RuntimeError as error:
            raise self._lost(rank, error) from error
        return from_bytes(data.numpy().tobytes())

    def _lost(self, rank: int | None, error: RuntimeError, what: str = "an exchange") -> Exception:
        """Returns what a failed exchange with `rank`, or with all, means; `what` was to be done."""
        end_collectives(self._nccl_groups)
        hung = error.hangs if isinstance(error, SharerLostError) else "Timed out" in str(error)
        if not self.is_first:
            if hung and not rank:
                return FirstHungError(
                    f"rank 0 hangs: it did not answer within {LONGER} times parallel.timeout_s={self.timeout_s:g}"
                )
            return FirstLostError(str(error))
        # A process that has closed its connections takes a moment to end.
        for other in (*self._others(),) * (1 if hung else ATTEMPTS) if rank is None else (rank,):
            if cause := self._cause(other):
                return RankLostError(f"rank {other}: {cause}")
        if not hung:
            who = "a rank" if rank is None else self._name(rank)
            return RankLostError(f"{who} has ended: its messages have more ({first_sentence(str(error))})")
        if rank is None:
            who = self._name(1) if self.count == 2 else "a rank"
            limit = f"parallel.timeout_s={self.timeout_s:g}"
            return RankLostError(f"{who} hangs in {what}, which took longer than {limit}: give more if it may")
        return RankLostError(
            f"{self._name(rank)} hangs: it did not report within parallel.timeout_s={self.timeout_s:g}: give more if a"
            " step may take so long"
        )


def _own_memory(share: Share) -> Share:
    return replace(share, parts=tuple(_copied(part) for part in share.parts))


def _copied(batch: Batch) -> Batch:
    """Returns a batch that is not part of a larger one, whose memory would go along in a message."""
    return batch.clone() if isinstance(batch, Tensor) else {name: tensor.clone() for name, tensor in batch.items()}

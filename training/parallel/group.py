"""The ranks of a run on several devices, over torch.distributed: NCCL between GPUs, else gloo, as for messages.

Every rank has a copy of weights, buffers and optimizer states (but for those of shared homes, of which a host has one).
They are equal on all ranks between steps.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn

from models.built_again import with_statistics
from models.quantise import stored_tensors
from offload import HostAdamW, Speculation
from offload.sharing import NO_SHARERS, Sharers, meet
from training.batches import Batch
from training.checkpoints.state import optimizer_tensors, renew_copies
from training.errors import UserError
from training.parallel.messages import PATIENCE, Messages
from training.parallel.ranks import Ranks, Share
from training.parallel.reduce import reduce_gradients
from training.parallel.sharers import GroupSharers, HostGroups, of_first
from training.runs.invocation import Invocation


def refuse_statistics(model: nn.Module) -> None:
    """Raises UserError for a model with running statistics, which would differ from rank to rank."""
    for name, module in with_statistics(model):
        raise UserError(
            f"devices: {name} ({type(module).__name__}) keeps statistics of the examples that it sees, which would"
            " differ between devices: give devices=1"
        )


class Copies:
    """This rank's copy of the tensors of a run, and of those of a frozen `reference` model.

    The ranks of a host have the parameters `shared` only once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HostAdamW,
        shared: Collection[nn.Parameter] = (),
        reference: nn.Module | None = None,
    ):
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self._shared = {name for name, tensor in self._named() if tensor in shared}

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that each rank has itself, by name, in the same order on every rank, after updates."""
        self._optimizer.finish()
        return self._all(shared=False)

    def bring_home(self) -> None:
        """Copies this rank's part of shared states from its device to the memory that all ranks of its host read."""
        self._optimizer.states.bring_home()

    def shared_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that a host has once, by name, in the same order on every rank.

        Each rank must have waited for updates and called `bring_home` before, which bring them up to date.
        """
        return self._all(shared=True)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, model in ("", self._model), ("reference", self._reference):
            if model is not None:
                yield from model.named_parameters(prefix)
                yield from model.named_buffers(prefix)

    def _all(self, shared: bool) -> dict[str, Tensor]:
        found = {}
        for name, tensor in self._named():
            if (name in self._shared) == shared:
                found |= stored_tensors(name, tensor)
        for name, tensor in optimizer_tensors(self._model, self._optimizer).items():
            parameter, _, key = name.rpartition(".")
            # Each rank has its own counts of updates, also of shared parameters.
            if (parameter in self._shared and key != "step") == shared:
                found[name] = tensor
        return found


def fingerprint(tensor: Tensor) -> int:
    """Returns the sum of a tensor's bytes, read as integers of 8 bytes, so that any changed element changes it."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    # Integers of two bytes are summed at a fiftieth of the rate.
    whole = flat.numel() // 8 * 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum(dtype=torch.int64))


class Group(Ranks):
    """The ranks of one run, which exchange `messages`. `end_others` kills the processes that rank 0 has started."""

    def __init__(
        self,
        device: torch.device,
        messages: Messages,
        end_others: Callable[[], None] | None = None,
        cores: int | None = None,
    ):
        self.messages = messages
        self.rank, self.count, self.hosts = messages.rank, messages.count, messages.hosts
        self.device, self.cores = device, cores
        self._end_others = end_others
        self._copies: Copies | None = None
        self._sharers: Sharers = NO_SHARERS
        self._divides_sequence = False
        # The group of the ranks that are the first on their hosts, which have copies of the homes.
        self._firsts: dist.ProcessGroup | None = None
        self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=messages.exchange_s))
        self._data = messages.new_group(device)

    def sharers(self, shared: bool) -> Sharers:
        if not shared:
            return NO_SHARERS
        self._await_all()
        self.shares_homes = True

        def data_group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
            # All ranks have one group: its exchanges run in one order, whatever streams they are queued on.
            return self._data if len(ranks) == self.count else self.messages.new_group(self.device, ranks)

        new_patient_group = partial(dist.new_group, backend="gloo", timeout=PATIENCE)
        groups = HostGroups.of(self.rank, self.hosts, data_group_of, new_patient_group)
        self._sharers = GroupSharers(groups, self._host, self.messages)
        self.messages.first_sharer = groups.ranks[0]
        if self.rank == groups.ranks[0]:
            self._firsts = groups.across
        return self._sharers

    @property
    def exchange_in_steps(self) -> bool:
        return self.shares_homes or self._divides_sequence

    def join_sequence(self, model: nn.Module) -> None:
        divided = getattr(model, "divided", None)
        if divided is None:
            return
        self._await_all()
        self._divides_sequence = True
        # Not that of the slices of weights, behind whose copies from the host NCCL would queue these.
        group = self.messages.new_group(self.device)

        def exchange(received: Tensor, sent: Tensor) -> None:
            what = "the attention heads of a divided sequence"
            self.messages.attempt(lambda: dist.all_to_all_single(received, sent, group=group), what)

        divided.connect(self.rank, exchange)

    def _await_all(self) -> None:
        """Waits on rank 0 until all can make a group, for which it would wait for ever once another has failed."""
        if self.rank == 0:
            self.messages.reports(patient=True)
        else:
            self.messages.report()

    def check_model(self, model: nn.Module) -> None:
        refuse_statistics(model)

    def begin(
        self, config: DictConfig, invocation: Invocation, releases: bool, speculation: Speculation | None
    ) -> None:
        self.messages.tell("build", config, invocation, releases, speculation)

    def equalise(
        self, model: nn.Module, optimizer: HostAdamW, step: int, shared: Collection, reference: nn.Module | None
    ) -> None:
        self._copies = Copies(model, optimizer, shared, reference)
        if self.rank == 0:
            self.messages.reports(patient=True)
            self.messages.tell("start", step)
        for tensor in self._copies.tensors().values():
            self._copy_from_first(tensor, self._data)
        self._copies.bring_home()
        if self._firsts is not None:
            for tensor in self._copies.shared_tensors().values():
                self._copy_from_first(tensor, self._firsts)
        # Beside states on a device are copies of their weights, which are not among the tensors.
        renew_copies(model, optimizer)
        if self.shares_homes:
            # Nobody reads the homes of a host before they have their values.
            meet(self._sharers, "copying the weights to all hosts")

    def hand_out(self, step: int, shares: Sequence[Share]) -> Share:
        for rank in range(1, self.count):
            self.messages.send(rank, ("step", step, _own_memory(shares[rank])))
        return shares[0]

    def evaluate(self, parts: Sequence[Batch], compute: Callable[..., list | None], order: str) -> list | None:
        for rank in range(1, self.count):
            self.messages.send(rank, (order, [_copied(part) for part in parts[rank :: self.count]]))
        own = compute(parts[:: self.count])
        # Waits for the others even after a stop, so that their reports are not taken for those of a step. Else this
        # rank has done its own part, the largest.
        everyone = self.messages.reports(own, patient=own is None)
        if own is None:
            return None
        return [everyone[part % self.count][part // self.count] for part in range(len(parts))]

    def total(self, losses: Tensor) -> Tensor:
        self.messages.meet()
        gathered = [torch.empty_like(losses) for _ in range(self.count)]
        self.messages.attempt(lambda: dist.all_gather(gathered, losses.contiguous(), group=self._data))
        return torch.cat(gathered).sum(0)

    def reduce(
        self, model: nn.Module, norms: Mapping[nn.Parameter, Tensor], summed: Collection[nn.Parameter] = ()
    ) -> Mapping[nn.Parameter, Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad and p not in summed]
        given = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        everyone = [torch.empty_like(given) for _ in range(self.count)]
        self.messages.meet()
        self.messages.attempt(lambda: dist.all_gather(everyone, given, group=self._host))
        some = torch.stack(everyone).any(dim=0).tolist()
        return dict(norms) | self.messages.attempt(lambda: reduce_gradients(parameters, some, self.device, self._data))

    def agreed(self, norm: float) -> float:
        return of_first(self._sharers, norm, "the norm of the gradients")

    def finish_updates(self, optimizer: HostAdamW) -> None:
        optimizer.finish()
        if self.shares_homes:
            self.messages.tell("finish")
            self.messages.reports(patient=True)

    def measured(self, values: dict, order: str = "measure") -> list[dict]:
        self.messages.tell(order)
        return self.messages.reports(values)

    def check_equal(self, saves: bool) -> None:
        self.messages.tell("fingerprints", saves)
        own, *others = self.messages.reports(self.fingerprints(saves))
        for rank, theirs in enumerate(others, start=1):
            if different := next((name for name, value in theirs.items() if own.get(name) != value), None):
                raise UserError(
                    f"{different} differs between rank 0 and rank {rank}: the ranks have not computed the same updates,"
                    " so nothing was saved; resume from the last checkpoint with devices=1"
                )

    def fingerprints(self, saves: bool) -> dict[str, int]:
        """Returns the fingerprints of this rank's weights, buffers and states by name, once updates are done.

        With several hosts, the first rank of each host adds those of the shared tensors.
        """
        found = self._copies.tensors()
        compares_hosts = self.shares_homes and self._sharers.hosts > 1
        if saves or compares_hosts:
            self._copies.bring_home()
        if compares_hosts:
            meet(self._sharers, "comparing the hosts")
        if self._firsts is not None:
            found |= self._copies.shared_tensors()
        return {name: fingerprint(tensor) for name, tensor in found.items()}

    def _copy_from_first(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        if not tensor.numel():
            return
        moved = tensor.detach().to(self.device).contiguous()
        flat = moved.reshape(-1).view(torch.uint8)
        self.messages.attempt(lambda: dist.broadcast(flat, 0, group=group))
        if self.rank:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def abandon(self) -> None:
        if self._end_others is not None:
            self._end_others()

    def close(self) -> None:
        """Tells the other ranks, on rank 0 between steps, that the run is over, and ends the connections."""
        self.messages.tell("end")
        self.messages.leave()


def _own_memory(share: Share) -> Share:
    return replace(share, parts=tuple(map(_copied, share.parts)))


def _copied(batch: Batch) -> Batch:
    """Returns a batch that is not part of a larger one, whose memory would go along in a message."""
    return batch.clone() if isinstance(batch, Tensor) else {name: tensor.clone() for name, tensor in batch.items()}

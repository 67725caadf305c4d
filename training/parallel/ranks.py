"""The requests of a run to its ranks, with the answers of a run on one device.

A run on N devices is N processes. Rank 0 is the run: it composes, plans, reads data, records, samples and saves. The
others obey its orders one at a time: compute gradients of their share of a step and update their copy of the model, or
evaluate some of the batches. All copies stay equal, because all are updated with the same gradients. What streams may
be in memory that they share, of which each updates a part. `training.parallel.group` is for several devices.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig
from torch import Tensor, nn

from offload import HostAdamW, Mode, Speculation, WeightMode
from offload.sharing import NO_SHARERS, Sharers
from training.batches import Batch, split_into
from training.config.schema import Homes
from training.errors import UserError
from training.parallel.world import ranks_of_host
from training.runs.invocation import Invocation


class RankLostError(UserError):
    """A rank failed, ended or hangs: no step can be computed any more. Rank 0 is as its last step has left it."""


@dataclass(frozen=True)
class Share:
    """The microbatches of a step that one rank computes; the first of them has the number `first` among all ranks'.

    Each loss counts as its weight over `total`, the weight of the whole batch.
    """

    parts: tuple[Batch, ...]
    weights: tuple[int, ...]
    total: int
    first: int = 0


def shares_of(batch: Batch, ranks: int, microbatches: int, weight: Callable[[Batch], int]) -> list[Share]:
    """Splits the batch of a step, on the CPU, into a share of `microbatches` of nearly the same size for each rank.

    The loss of a microbatch with weight 0 may be 0/0, and it cannot be left out, because the ranks exchange gradients
    in each microbatch. So another microbatch of the same shape is computed in its place, with weight 0.
    """
    parts = [part for share in split_into(batch, ranks) for part in split_into(share, microbatches)]
    weights = [weight(part) for part in parts]
    stand_in = next((part for part, weighs in zip(parts, weights, strict=True) if weighs), None)
    parts = [part if weighs else stand_in for part, weighs in zip(parts, weights, strict=True)]
    places = [slice(first, first + microbatches) for first in range(0, len(parts), microbatches)]
    return [Share(tuple(parts[place]), tuple(weights[place]), sum(weights), place.start) for place in places]


class Ranks:
    """The ranks of a run on one device, which has no other rank. Loss and gradients are final as they are."""

    rank = 0
    count = 1
    hosts: Sequence[int] = (0,)
    """the number of each rank's host"""
    cores: int | None = None
    """how many of the host's cores are this rank's; None: all"""
    shares_homes = False
    """True if the ranks share the homes of what streams. A rank that is lost may then leave them half updated."""

    @property
    def exchange_in_steps(self) -> bool:
        """True if a rank that fails in a step leaves the others in an exchange, until its process ends."""
        return self.shares_homes

    @property
    def home_sharers(self) -> int:
        """The processes of this host that share homes; 1 where each has its own."""
        return self.hosts.count(self.hosts[self.rank]) if self.shares_homes else 1

    def sharers(self, shared: bool) -> Sharers:
        """Returns those with whom the mode shares the homes of what streams: the other ranks, if `shared`."""
        return NO_SHARERS

    def check_model(self, model: nn.Module) -> None:
        """Raises UserError for a model that the ranks cannot train together."""

    def join_sequence(self, model: nn.Module) -> None:
        """Connects the ranks for the exchanges inside the forwards of `model`, if they divide its rows."""

    def begin(
        self, config: DictConfig, invocation: Invocation, releases: bool, speculation: Speculation | None
    ) -> None:
        """Makes the other ranks build the same model and optimizer, with `speculation`. `config` has no value auto.

        `releases`: gradients are released (`AttachOptions.release_gradients`), which a plan may have chosen.
        """

    def equalise(
        self,
        model: nn.Module,
        optimizer: HostAdamW,
        step: int,
        shared: Collection[nn.Parameter] = (),
        reference: nn.Module | None = None,
    ) -> None:
        """Gives all ranks the weights, the states and the `reference` model that rank 0 has after `step`.

        The ranks of a host have the parameters `shared` only once.
        """

    def hand_out(self, step: int, shares: Sequence[Share]) -> Share:
        """Makes the other ranks compute their `shares`, of `step`, one for each rank; returns this rank's share."""
        return shares[self.rank]

    def evaluate(self, parts: Sequence[Batch], compute: Callable[..., list | None], order: str) -> list | None:
        """Returns the results of all parts in order; None once the run is to stop.

        `compute` computes the parts of this rank, `order` is the order to the other ranks to compute theirs.
        """
        return compute(parts)

    def total(self, losses: Tensor) -> Tensor:
        """Adds up the losses, float32 [microbatches] or [microbatches, columns], of all ranks in their order."""
        return losses.sum(0)

    def reduce(
        self, model: nn.Module, norms: Mapping[nn.Parameter, Tensor], summed: Collection[nn.Parameter] = ()
    ) -> Mapping[nn.Parameter, Tensor]:
        """Replaces each gradient by its sum over all ranks, unless it is in `summed`: the mode has summed it already.

        Returns `norms`, the known norms by parameter, and with them those of the new sums.
        """
        return norms

    def agreed(self, norm: float) -> float:
        """Returns rank 0's norm of the gradients, by which all ranks that share weights decide: others may round it."""
        return norm

    def finish_updates(self, optimizer: HostAdamW) -> None:
        """Waits for the updates that are under way of all weights that this rank will read."""
        optimizer.finish()

    def measured(self, values: dict, order: str = "measure") -> list[dict]:
        """Returns the measured `values` of all ranks, in their order. The others measure theirs at `order`."""
        return [values]

    def abandon(self) -> None:
        """Ends the other ranks once one is lost: they would end this process while it saves, and does not answer."""

    def check_equal(self, saves: bool) -> None:
        """Raises UserError if the ranks' copies of the model or of the optimizer's states differ.

        With `saves` rank 0 has the states of all in its memory afterwards, for a checkpoint.
        """


ALONE = Ranks()


def shares_homes(config: DictConfig, mode: Mode) -> bool:
    """Tells whether the ranks of a host have one copy of what `mode` streams; hosts have as many ranks then."""
    if not isinstance(getattr(mode, "weights", mode), WeightMode) or ranks_of_host(config) == 1:
        return False
    is_even = config.devices % config.parallel.hosts == 0
    return config.parallel.homes == Homes.shared or (config.parallel.homes == Homes.auto and is_even)

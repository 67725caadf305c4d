"""shard_offload: runs of blocks stream, and all microbatches of a step pass through one before it leaves.

The model is cut into shards of about equal bytes, as in fairscale's OffloadModel (after L2L, Pudipeddi et al. 2020).
Weight traffic does not grow with the number of microbatches. The input of each block waits on the host, and backward
computes the block again from it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from offload.activations.checkpointing import recompute
from offload.activations.swapper import ActivationSwapper
from offload.blocks import find_blocks, outside_blocks
from offload.knobs import KnobError, knob, nbytes, parse_bytes
from offload.microbatches.layer_major import LayerMajor, compute_alike
from offload.modes.mode import NO_OPTIONS, AttachOptions
from offload.modes.weight_mode import AttachedWeights, WeightMode
from offload.streams.registry import Streams
from offload.streams.transfer import Counters
from offload.torch_private.buffer_states import Place, own_copies
from offload.torch_private.module_contexts import SideBySideError, WrappedForward, running_microbatch
from offload.torch_private.recomputed_blocks import buffers_here
from offload.torch_private.tensor_parts import true_bytes
from offload.torch_private.torch_internals import check_no_transform, has_gradient_hooks
from offload.weights.footprint import Footprint
from offload.weights.units.partition import CutPoint
from offload.weights.windows.stand_ins import ResidentShares


def cut_evenly(sizes: Sequence[int], count: int, limit: float = math.inf) -> list[range]:
    """Cuts blocks of `sizes` bytes into `count` contiguous runs of about equal bytes, none of them empty.

    The sum of the squares of the runs' bytes is the smallest possible; where several cuts reach it, later runs are the
    longer. A run of several blocks has at most `limit` bytes. Returns the indices of each run. Raises ValueError where
    no cut does this.
    """
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)

    def cost(start: int, stop: int) -> float:
        nbytes = total[stop] - total[start]
        return nbytes**2 if nbytes <= limit or stop - start == 1 else math.inf

    # best[stop]: the cheapest way to cut sizes[:stop] into as many runs as there were rounds: its cost and its cuts.
    best: dict[int, tuple[float, list[int]]] = {0: (0, [0])}
    for _ in range(count):
        longer: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, cuts) in sorted(best.items()):
            for stop in range(start + 1, len(sizes) + 1):
                price = so_far + cost(start, stop)
                if price < longer.get(stop, (math.inf,))[0]:
                    longer[stop] = price, [*cuts, stop]
        best = longer
    if len(sizes) not in best:
        raise ValueError(f"{len(sizes)} blocks cannot be cut into {count} runs of at most {limit} bytes")
    cuts = best[len(sizes)][1]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def shards_needed(sizes: Sequence[int], limit: int) -> int:
    """Counts the fewest contiguous runs of at most `limit` bytes; a larger block is a run of its own."""
    count, room = 0, -1
    for size in sizes:
        if size > room:
            count, room = count + 1, limit
        room -= size
    return count


# Below this, starting a copy costs more than the copy saves.
MIN_BOUNDARY_BYTES = 2**20
# Block inputs on their way, each way, that may be on the device.
IN_FLIGHT_BYTES = 256 * 2**20
SHARD_BYTES = "512MiB"


@dataclass(kw_only=True, eq=False)
class ShardOffload(WeightMode):
    """Streams shards of blocks. A unit is one shard.

    Args:
        layers: dotted path of the list of blocks, such as model.layers; null finds all lists of blocks.
        outside: the modules outside the blocks (embedding, head, final norm) are resident, or stream in the runs of
            blocks between which they stand in the model. Their forward is not computed again.
        shards: number of shards that the blocks are cut into, of about equal bytes; null is as many as shard_bytes asks
            for.
        shard_bytes: bytes of a shard, at most (512MiB, 2GiB); a larger block is a shard of its own. Not beside shards.
        checkpoint: true keeps only the input of each block and computes the block again in backward; false keeps its
            activations, and its weights stream all the same.
        boundary: the inputs of recomputed blocks wait for backward on the host, or on the device.
        slots: shards that fit on the device at a time, each in a buffer as large as the largest.
        prefetch: shards fetched ahead of the one that computes: below slots; null is as many as the slots allow.
        resident: stays on the device after all, the first shards and others spread evenly: a number of shards (8), a
            share of the bytes (25%), or bytes (2GiB).
        include, exclude: patterns over the names of the blocks, such as model.layers.1*. What matches an
            include pattern streams, everything where none is given, but not what matches an exclude pattern.
        trained: parameters that train stream with the rest, or stay on the device, as small ones beside frozen weights
            may; then nothing that streams has gradients.
        pin: auto page-locks the host memory, which copies five times as fast; "off" (quoted) takes pageable memory.
        source: weights that stream wait in host memory; or shards that are frozen as a whole stay in their safetensors
            files (mapped), from which threads read them ahead of use, through the host memory of four shards.
    """

    layers: str | None = knob(None)
    outside: Literal["resident", "stream"] = knob("resident")
    shards: int | None = knob(None, at_least=1)
    shard_bytes: str | int = nbytes(SHARD_BYTES)
    checkpoint: bool = knob(True)
    boundary: Literal["host", "device"] = knob("host")
    slots: int = knob(2, at_least=1)

    @property
    def recomputes(self) -> bool:
        return self.checkpoint

    def check(self) -> None:
        super().check()
        if self.shards is not None and self.shard_bytes != parse_bytes("shard_bytes", SHARD_BYTES):
            raise KnobError("shards", self.shards, "is given beside shard_bytes: give one of them")

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        points = {block: CutPoint(name, block) for name, block in find_blocks(model, self.layers, key="layers")}
        if self.outside == "stream":
            points |= {module: CutPoint(name, module, deep=False) for name, module in outside_blocks(model, points)}
            # A model is called in the order of its modules, as a rule, and a run holds neighbours.
            yield from (points[module] for module in model.modules() if module in points)
        else:
            yield from points.values()

    def grouped(self, cut_points: Sequence[CutPoint]) -> Sequence[CutPoint]:
        if not cut_points:
            return cut_points
        sizes = [sum(true_bytes(tensor) for tensor in point.tensors() if self._streams(tensor)) for point in cut_points]
        if self.shards is not None and self.shards > len(cut_points):
            kinds = "blocks" if self.outside == "resident" else "blocks and of modules outside them"
            problem = f"must be between 1 and the number of {kinds}, {len(cut_points)}"
            raise KnobError("shards", self.shards, problem)
        if self.shards is not None:
            runs = cut_evenly(sizes, self.shards)
        else:
            runs = cut_evenly(sizes, shards_needed(sizes, self.shard_bytes), self.shard_bytes)
        named = []
        for number, run in enumerate(runs):
            first, last = cut_points[run[0]].name, cut_points[run[-1]].name
            name = f"shard {number} ({first})" if first == last else f"shard {number} ({first} to {last})"
            named += [replace(cut_points[index], name=name) for index in run]
        return named

    def _streams(self, tensor: Tensor) -> bool:
        return self.trained == "stream" or not tensor.requires_grad

    def footprint(self, model: nn.Module, recompute: bool = False, options: AttachOptions = NO_OPTIONS) -> Footprint:
        # A block is recomputed while its shard is on the device for backward.
        return replace(super().footprint(model, recompute=False, options=options), layer_major=True)

    def attach(self, model: nn.Module, streams: Streams, options: AttachOptions = NO_OPTIONS) -> AttachedShards:
        return AttachedShards(self, model, streams, options)


class AttachedShards(AttachedWeights):
    """A model whose shards stream, each for all microbatches of a step."""

    def _take(self, mode: ShardOffload, streams: Streams, options: AttachOptions) -> Collection[Tensor]:
        fixed = super()._take(mode, streams, options)
        self._layer_major = LayerMajor(streams, self._around_turn)
        self._resident_buffers: list[Place] = []
        self._boundary_swapper: ActivationSwapper | None = None
        self._undo: list[Callable[[], None]] = []
        # Whether microbatches run side by side; None: not tried yet.
        self._side_by_side: bool | None = None
        try:
            self._resident_shares = ResidentShares(self._streamer.cut.resident)
            self._wrap_blocks(mode)
        except BaseException:
            self._give_back()
            raise
        return fixed

    @contextmanager
    def _around_step(self, norms: bool) -> Iterator[None]:
        boundaries = nullcontext() if self._boundary_swapper is None else self._boundary_swapper.step()
        with super()._around_step(norms), boundaries:
            yield

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Computes every loss, a scalar, and the gradients of all, inside a step. Returns the losses, detached.

        Layer-major, but one microbatch after another where the gradients of each matter by themselves: where a
        parameter has hooks on its gradient, which run for each, or a gradient already, to which each is added. The
        first time, each loss is called twice more to find out whether that changes a number (`compute_alike`): if it
        does, they run one after another for good, with a warning. Raises RuntimeError where a loss or a forward changes
        weights.
        """
        if running_microbatch() is not None:
            raise RuntimeError("accumulate inside a loss of several microbatches: call loss.backward() there")
        if len(losses) < 2 or any(map(_takes_each_gradient, self.model.parameters())):
            return super().accumulate(losses)
        if self._side_by_side is None:
            self._try(losses)
        if self._side_by_side is False:
            return super().accumulate(losses)
        try:
            with self._shares(), self._streamer.gradients.accumulating(side_by_side=True):
                return self._layer_major.accumulate(losses, self._streamer.gradients.last_microbatch)
        except SideBySideError:
            self._side_by_side = False
            raise

    @contextmanager
    def _shares(self) -> Iterator[None]:
        """Surrounds microbatches side by side, which have their own of what stays on the device: `_around_turn`."""
        self._resident_buffers = buffers_here(self.model)
        self._resident_shares.begin()
        try:
            yield
        finally:
            self._resident_shares.drop()
            self._resident_buffers = []

    def _try(self, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Finds out whether `losses` may run side by side. All sharers do, and decide alike."""
        exchange, device = self._sharers.exchange, self._streamer.transfer.streams.device
        counts = exchange((len(losses),), "the number of microbatches", everywhere=True)
        if device.type == "meta" or len({count for (count,) in counts}) > 1:
            # Without values, or with other fetches than other sharers.
            return
        with self._shares(), self._streamer.gradients.accumulating(side_by_side=True):
            alike = compute_alike(losses, self._layer_major.forwards, self.model, device, self._streamer.weights_now)
        # The forwards of the trial are no part of the order in which a step uses units.
        self._streamer.prefetcher.access_order.begin()
        self._side_by_side = all(flag for (flag,) in exchange((alike,), "microbatches side by side", everywhere=True))
        if not self._side_by_side:
            warnings.warn(
                "several microbatches compute other numbers side by side than one after another (a value that a forward"
                " leaves in a module, say, or random numbers without a seed in each loss): they run one after another,"
                " and weights are copied in for each",
                RuntimeWarning,
                stacklevel=3,
            )

    def _counters(self) -> Counters:
        counters, swapper = super()._counters(), self._boundary_swapper
        if swapper is None:
            return counters
        # The weights' transfer makes these copies, and has counted their bytes already.
        return counters + Counters(
            activation_h2d_bytes=swapper.fetched_bytes, activation_d2h_bytes=swapper.swapped_bytes
        )

    def _give_back(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self._boundary_swapper is not None:
            self._boundary_swapper.close()
        self._layer_major.close()
        # Some of these refer back to this object: without them memory goes with its last reference.
        self._boundary_swapper = self._layer_major = self._resident_shares = None
        super()._give_back()

    @contextmanager
    def _around_turn(self, microbatch: int) -> Iterator[None]:
        """Gives a microbatch its own share of what stays on the device, as windows do for what streams.

        So the gradients of its uses are summed by themselves, and what autograd saves of a buffer does not change in
        the turns of other microbatches.
        """
        with own_copies(self._resident_buffers), self._resident_shares.turn(microbatch):
            yield

    def _wrap_blocks(self, mode: ShardOffload) -> None:
        if mode.boundary == "host" and mode.checkpoint:
            self._boundary_swapper = ActivationSwapper(
                self._streamer.transfer,
                self._streamer.arena,
                min_bytes=MIN_BOUNDARY_BYTES,
                in_flight_bytes=IN_FLIGHT_BYTES,
                prefetch_bytes=IN_FLIGHT_BYTES,
            )
        if mode.recomputes:
            blocks = find_blocks(self.model, mode.layers, key="layers")
            self._undo.append(recompute(block for _, block in blocks))
        cut_points = mode.chosen(self.model)
        places = {name: place for place, name in enumerate(dict.fromkeys(point.name for point in cut_points))}
        for point in cut_points:
            entrance = WrappedForward(point.module, functools.partial(self._entered, places[point.name], point))
            self._undo.append(entrance.remove)

    def _entered(self, place: int, point: CutPoint, forward: Callable, arguments: tuple, keywords: dict) -> object:
        is_block = point.deep
        if is_block:
            # Before the checkpoint of the block, which not every version of torch leaves well under a transform.
            check_no_transform()
        self._layer_major.enter(place)
        # Outside the blocks nothing is computed again, so more than an input would be swapped.
        swaps = is_block and self._boundary_swapper is not None
        with self._boundary_swapper.hooks() if swaps else nullcontext():
            return forward(*arguments, **keywords)


def _takes_each_gradient(parameter: nn.Parameter) -> bool:
    if not parameter.requires_grad:
        return False
    return parameter.grad is not None or has_gradient_hooks(parameter)

"""shard_offload: runs of blocks visit the device in turn, and every microbatch passes while one is there.

The model is cut into shards of about equal bytes, as in fairscale's OffloadModel (after L2L, Pudipeddi et al. 2020).
All microbatches of a step go through a shard before it leaves, so that weight traffic does not grow with them; what
enters a block waits on the host, and backward computes the block again from there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise

from torch import Tensor, nn

from offload.activations.checkpointing import recompute
from offload.activations.swapper import ActivationSwapper
from offload.microbatches.layer_major import LayerMajor
from offload.modes.weight_mode import WeightMode, one_of
from offload.runtime.blocks import find_blocks
from offload.runtime.byte_sizes import parse_bytes
from offload.runtime.module_contexts import WrappedForward
from offload.runtime.registry import Streams
from offload.weights.footprint import Footprint
from offload.weights.partition import CutPoint


def pack(sizes: Sequence[int], count: int, limit: float = math.inf) -> list[range]:
    """Cuts blocks of `sizes` bytes into `count` contiguous runs of about equal bytes, none of them empty.

    The sum of the squares of the runs' bytes is the least there is; of equals, later runs are the longer. A run of
    several blocks has at most `limit` bytes. Returns the indices of each run. Raises ValueError where it cannot be.
    """
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)

    def cost(start: int, stop: int) -> float:
        nbytes = total[stop] - total[start]
        return nbytes**2 if nbytes <= limit or stop - start == 1 else math.inf

    # best[stop]: of the ways to cut sizes[:stop] into as many runs as rounds so far, the cheapest, and its cuts.
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
    """The fewest contiguous runs of at most `limit` bytes; a block that is larger is a run of its own."""
    count, room = 0, -1
    for size in sizes:
        if size > room:
            count, room = count + 1, limit
        room -= size
    return count


# Below this, what a copy costs to start is more than what it saves.
MIN_BOUNDARY_BYTES = 2**20
# Boundary activations on their way, each way, that may be on the device.
IN_FLIGHT_BYTES = 256 * 2**20


class ShardOffload(WeightMode):
    """Streams shards of blocks, by default two slots of them; the other knobs are those of `WeightMode`.

    `layers` is the dotted path of the list of blocks (None: found by itself). The blocks make `shards` shards, or if
    that is None as many as `shard_bytes` (an int, or "512MiB") asks for, at least one block each. With `checkpoint` a
    block keeps only what enters it, and that waits on the `boundary`: "host" or "device"; without, a block keeps its
    activations and streams its weights all the same.
    Raises ValueError naming the key for a value out of range.
    """

    def __init__(
        self,
        layers: str | None = None,
        shards: int | None = None,
        shard_bytes: str | int = "512MiB",
        checkpoint: bool = True,
        boundary: str = "host",
        slots: int = 2,
        prefetch: int | None = None,
        resident: str | int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        pin: str = "auto",
    ):
        super().__init__(slots, prefetch, resident, include, exclude, pin)
        if shards is not None and shards < 1:
            raise ValueError(f"offload.shards={shards}: must be at least 1")
        self._layers, self._shards = layers, shards
        self._shard_bytes = parse_bytes("offload.shard_bytes", shard_bytes)
        self.recomputes = checkpoint
        self._boundary_leaves = one_of("boundary", boundary, "host", "device") == "host" and checkpoint
        self._boundary: ActivationSwapper | None = None
        self._undo: list[Callable[[], None]] = []

    def cut_points(self, model: nn.Module) -> Iterable[CutPoint]:
        yield from (CutPoint(name, block) for name, block in find_blocks(model, self._layers, key="offload.layers"))

    def grouped(self, cut_points: Sequence[CutPoint]) -> Sequence[CutPoint]:
        sizes = [sum(tensor.nbytes for tensor in root.tensors()) for root in cut_points]
        if self._shards is not None and self._shards > len(cut_points):
            raise ValueError(
                f"offload.shards={self._shards}: must be between 1 and the number of blocks, {len(cut_points)}"
            )
        if self._shards is not None:
            runs = pack(sizes, self._shards)
        else:
            runs = pack(sizes, shards_needed(sizes, self._shard_bytes), self._shard_bytes)
        named = []
        for number, run in enumerate(runs):
            first, last = cut_points[run[0]].name, cut_points[run[-1]].name
            name = f"shard {number} ({first})" if first == last else f"shard {number} ({first} to {last})"
            named += [CutPoint(name, cut_points[index].module) for index in run]
        return named

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        """What `attach` will hold and a step will move, in bytes; touches nothing."""
        # Whoever recomputes a block does so while its shard is there for backward.
        return dataclasses.replace(super().footprint(model, recompute=False), layer_major=True)

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """As for every mode that streams weights."""
        super().attach(model, streams)
        self._layer_major = LayerMajor(streams)
        if self._boundary_leaves:
            self._boundary = ActivationSwapper(
                self._streamer.transfer,
                self._streamer.arena,
                min_bytes=MIN_BOUNDARY_BYTES,
                in_flight_bytes=IN_FLIGHT_BYTES,
                prefetch_bytes=IN_FLIGHT_BYTES,
            )
        if self.recomputes:
            blocks = find_blocks(model, self._layers, key="offload.layers")
            self._undo.append(recompute(block for _, block in blocks))
        cut_points = self.chosen(model)
        places = {name: place for place, name in enumerate(dict.fromkeys(root.name for root in cut_points))}
        for root in cut_points:
            entrance = WrappedForward(root.module, functools.partial(self._entered, places[root.name]))
            self._undo.append(entrance.remove)

    @contextmanager
    def step(self, norms: bool = False) -> Iterator[None]:
        """As for every mode that streams weights."""
        with ExitStack() as stack:
            stack.enter_context(super().step(norms))
            if self._boundary is not None:
                stack.enter_context(self._boundary.step())
            yield

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Computes every loss and the gradients of all, layer-major. Returns the losses, detached."""
        return self._layer_major.accumulate(losses, self._streamer.last_microbatch)

    def counters(self) -> dict[str, float]:
        """As for every mode that streams weights, and the bytes of activations that are among those copied."""
        boundary = self._boundary
        moved = (boundary.fetched_bytes, boundary.swapped_bytes) if boundary is not None else (0, 0)
        return super().counters() | dict(zip(("activation_h2d_bytes", "activation_d2h_bytes"), moved, strict=True))

    def detach(self) -> None:
        """Gives the model back as it was found."""
        while self._undo:
            self._undo.pop()()
        if self._boundary is not None:
            self._boundary.close()
        self._boundary = None
        self._layer_major.close()
        super().detach()

    def _entered(self, place: int) -> AbstractContextManager:
        self._layer_major.enter(place)
        return self._boundary.hooks() if self._boundary is not None else nullcontext()

"""Saves weights for backward by name, not by bytes.

By the time backward runs, a slot has other weights. So a view of a slot that autograd would save is replaced by its
origin (unit, offset, shape, strides). When backward asks for it, the unit is brought back into any slot, and the view
is made there. All other tensors are passed to the hooks that were active before. Activation checkpointing is built on
the same hooks, and so sees in its recompute exactly the tensors that it saw in forward. A checkpoint of the user's own
sees the weights, too: it counts the tensors that are saved, and backward that asks for one of them runs its recompute,
in which forward changes buffers again, to the last of them.

Code also writes `ctx.weight = weight` in a function of its own, where hooks do not see it, and the products of
bitsandbytes keep the packed weight and its quantisation state so. At the end of a forward in a window, the contexts
that it made are searched for views of slots, which are noted by name (`name_kept_weights`). Before backward runs such a
function, it gets views of the slot where the unit is then. Not found: what a function keeps in a closure, or in a place
of its own outside of its context.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from offload.memory.device_slots import PLAIN, DeviceSlot, DeviceSlots
from offload.torch_private.saved_tensor_hooks import (
    Hooks,
    Kept,
    PackHook,
    Passed,
    active_hooks,
    check_what_is_kept,
    counting_checkpoint,
)
from offload.torch_private.tensor_parts import Wrapping, parts, replaced_in, tensors_in, wraps
from offload.torch_private.torch_internals import (
    NO_CONTEXT,
    compiles_frames,
    is_in_backward,
    is_traced,
    left_out_of_graphs,
    negated_view,
)
from offload.weights.gradients.final import FinalGradients
from offload.weights.prefetching.prefetcher import Prefetcher
from offload.weights.units.unit import OffloadUnit
from offload.weights.windows.held_tensors import RunningForwards
from offload.weights.windows.stand_in import StandIn, StandIns
from offload.weights.windows.stand_ins import copy_of_frozen, frozen_stand_in


class _SavedWeight(NamedTuple):
    """A view of a unit's flat buffer: `offset` counts elements of `dtype` from its start.

    `stand_in` is that of the weight in which the view starts, `version` the weight's version counter when it was saved,
    and `place` the address and the strides of its data at home. `conjugated` and `negated` tell of views that stand for
    other numbers than their bytes, such as `weight.conj()`.
    """

    unit: OffloadUnit
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    stand_in: StandIn
    version: int
    place: object
    conjugated: bool
    negated: bool


class _SavedStandIn(NamedTuple):
    """The stand-in of a frozen weight that wraps tensors, as its module holds it: see `_SavedWeight`."""

    unit: OffloadUnit
    stand_in: StandIn
    version: int
    place: object


class _Counted(NamedTuple):
    """A weight by name, and what a checkpoint of the user's own keeps of it: nothing, but it is asked for it."""

    name: object
    by_checkpoint: Passed


class SavedWeights:
    """The pack and unpack hooks of one attached model. `final` is told of every weight that backward asks for."""

    def __init__(self, slots: DeviceSlots, stand_ins: StandIns, prefetcher: Prefetcher, final: FinalGradients):
        self.slot_of = slots.slot_of
        self._stand_ins = stand_ins
        self._prefetcher = prefetcher
        self._final = final
        check_what_is_kept(self)

    def hooks(self, running: RunningForwards) -> AbstractContextManager:
        """Returns a context in which weights are saved by name; nested in itself it does nothing."""
        outer = active_hooks()
        if outer is not None and outer[0] is running.pack:
            return NO_CONTEXT
        return self._opened(running, outer)

    @contextmanager
    def _opened(self, running: RunningForwards, outer: Hooks | None) -> Iterator[None]:
        before, running.pack = running.pack, _PackWeights(self, outer)
        try:
            with saved_tensors_hooks(running.pack, self.unpack):
                yield
        finally:
            running.pack = before

    def check_kept(self, operation: str, result: torch.Tensor) -> None:
        """Raises RuntimeError for a view of a slot that a selective checkpoint keeps.

        It would use it in the recompute, when the slot has other weights.
        """
        slot = self.slot_of(result)
        if slot is None:
            return
        name = "a weight"
        if slot.content is not None and not is_in_backward():
            first = next(part for part in parts(result) if self.slot_of(part) is not None)
            name = self._stand_ins.at(slot.content, first.storage_offset() * first.itemsize).tensor.name
        raise RuntimeError(
            f"a selective checkpoint saves the result of {operation}, which is a view of {name} and not on the device"
            " for backward: its policy must return PREFER_RECOMPUTE for this operation"
        )

    def named(self, tensor: torch.Tensor, units: Collection[OffloadUnit]) -> object | None:
        """Returns the name of a tensor that lies in the slot of one of `units`, for `unpack`; else None."""
        slot = self.slot_of(tensor)
        return None if slot is None or slot.content not in units else self.name_of(tensor, slot)

    def name_of(self, tensor: torch.Tensor, slot: DeviceSlot) -> object:
        """Returns the name of a tensor that lies in `slot`, for `unpack`."""
        if type(tensor) not in PLAIN and wraps(tensor):
            return self._saved_stand_in(tensor, slot) or Wrapping.of(tensor, self._saved_part)
        unit, offset = slot.content, tensor.storage_offset()
        # `StandIns.at`, without the calls.
        whole = self._stand_ins[unit][bisect_right(unit.starts, offset * tensor.itemsize) - 1]
        flags = tensor.is_conj(), tensor.is_neg()
        return _SavedWeight(unit, tensor.dtype, offset, tensor.shape, tensor.stride(), whole, *whole.state, *flags)

    def _saved_stand_in(self, tensor: torch.Tensor, slot: DeviceSlot) -> _SavedStandIn | None:
        first = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        if wraps(first) or self.slot_of(first) is not slot:
            return None
        whole = self._stand_ins.at(slot.content, first.storage_offset() * first.itemsize)
        if whole.tensor.is_buffer or whole.device is not tensor or whole.kept_for(slot) is not tensor:
            return None
        return _SavedStandIn(slot.content, whole, *whole.state)

    def _saved_part(self, part: torch.Tensor) -> object:
        slot = self.slot_of(part)
        return Kept.of(part) if slot is None else self.name_of(part, slot)

    def unpack(self, saved: object) -> torch.Tensor:
        """Returns the tensor that was packed as `saved`; a weight in the slot where its unit is now."""
        # What `left_out_of_graphs` does, without its call.
        if is_traced() or compiles_frames() is not None:
            return self._unpacked(saved)
        kind = type(saved)
        if kind is Kept and saved.tensor._version == saved.version:
            return saved.tensor
        if kind is not _SavedWeight:
            return self._unpacked(saved)
        unit, dtype, offset, shape, strides, stand_in, version, place, conjugated, negated = saved
        view = self._slot_for(unit, stand_in, (version, place)).typed[dtype].as_strided(shape, strides, offset)
        if conjugated:
            view = view.conj()
        if negated:
            view = negated_view(view)
        # With create_graph, the unpacked tensor is saved again, outside any window: that copy must not live in a slot.
        return view.clone() if torch.is_grad_enabled() else view

    @left_out_of_graphs
    def _unpacked(self, saved: object) -> torch.Tensor:
        if isinstance(saved, Kept):
            return saved.checked()
        if isinstance(saved, _SavedWeight):
            return self.unpack(saved)
        if isinstance(saved, _SavedStandIn):
            unit, stand_in, *state = saved
            slot = self._slot_for(unit, stand_in, tuple(state))
            # With create_graph as in `unpack`.
            return copy_of_frozen(stand_in, slot) if torch.is_grad_enabled() else frozen_stand_in(stand_in, slot)
        if isinstance(saved, Wrapping):
            return saved.around(self._unpacked)
        if isinstance(saved, _Counted):
            self.unpack(saved.by_checkpoint)
            return self.unpack(saved.name)
        # Unpacking may recompute a block, and a weight unpacked just before belongs to the same operation.
        with self._prefetcher.retain_recent():
            return saved.unpack(saved.packed)

    def _slot_for(self, unit: OffloadUnit, stand_in: StandIn, state: tuple[int, object]) -> DeviceSlot:
        """Returns the slot of a weight that backward asks for. Raises RuntimeError if it is not as it was saved."""
        if self._final.has_landed:
            self._final.use(unit, stand_in.tensor)
        if stand_in.state != state:
            raise RuntimeError(
                f"{stand_in.tensor.name}, needed for gradient computation, has been modified since forward:"
                " run backward before the optimizer's step"
            )
        return self._prefetcher.fetch(unit)


class _PackWeights(PackHook):
    """The pack function of `saved`, inside of the hooks `outer`."""

    def __init__(self, saved: SavedWeights, outer: Hooks | None):
        self.owner, self.outer = saved, outer
        self._name_of, self._slot_of = saved.name_of, saved.slot_of
        self._checkpoint = counting_checkpoint(outer)

    def __call__(self, tensor: torch.Tensor) -> object:
        if is_traced() or compiles_frames() is not None:
            return super().__call__(tensor)
        slot = self._slot_of(tensor)
        if slot is None:
            outer = self.outer
            return Kept(tensor.detach(), tensor._version) if outer is None else Passed(outer[0](tensor), outer[1])
        name, checkpoint = self._name_of(tensor, slot), self._checkpoint
        return name if checkpoint is None else _Counted(name, Passed.to(checkpoint, tensor.detach()))

    @property
    def pack(self) -> PackHook:
        """The function that torch.compile leaves out of its graphs: this one."""
        return self

    def claims(self, tensor: torch.Tensor) -> bool:
        """Tells whether the tensor is a weight: it is saved by name whatever hooks stand inside."""
        return self._slot_of(tensor) is not None


# A value of a context, and its tensors: by name (`SavedWeights.named`), or themselves.
KeptByFunction = tuple[object, list[object]]
# The key in a node's metadata.
NAMED = "offload.kept_weights"


def name_kept_weights(
    contexts: Iterable[weakref.ref[BackwardCFunction]], units: Collection[OffloadUnit], saved: SavedWeights
) -> None:
    """Makes the functions of these contexts bring back the weights that they keep, before backward runs them.

    `units` are those whose windows have been open since before the first context was made.
    """
    if not units or not torch.is_grad_enabled():
        return
    for context in contexts:
        node = context()
        # Without inputs that need gradients it is no node of a graph.
        if node is None or not node.next_functions or NAMED in node.metadata:
            continue
        kept = {name: _kept(value, units, saved) for name, value in vars(node).items()}
        kept = {name: each for name, each in kept.items() if each is not None}
        if kept:
            node.metadata[NAMED] = True
            # The node has the hook: it would keep itself alive.
            node.register_prehook(functools.partial(_bring_back, context, kept, saved))


def _kept(value: object, units: Collection[OffloadUnit], saved: SavedWeights) -> KeptByFunction | None:
    tensors = list(tensors_in(value))
    names = [saved.named(tensor, units) for tensor in tensors]
    if not any(name is not None for name in names):
        return None
    return value, [tensor if name is None else name for tensor, name in zip(tensors, names, strict=True)]


@left_out_of_graphs
def _bring_back(node: weakref.ref, kept: dict[str, KeptByFunction], saved: SavedWeights, gradients: tuple) -> None:
    for name, (value, named) in kept.items():
        tensors = [each if isinstance(each, torch.Tensor) else saved.unpack(each) for each in named]
        setattr(node(), name, replaced_in(value, tensors))

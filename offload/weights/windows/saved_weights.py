"""Saves weights for backward by name, not by bytes.

By the time backward runs, a slot has other weights. So a view of a slot that autograd would save is replaced by its
origin (unit, offset, shape, strides). When backward asks for it, the unit is brought back into any slot, and the view
is made there. All other tensors are passed to the hooks that were active before. Activation checkpointing is built on
the same hooks, and so sees in its recompute exactly the tensors that it saw in forward. A checkpoint of the user's own
sees the weights, too: it counts the tensors that are saved, and backward that asks for one of them runs its recompute,
in which forward changes buffers again, to the last of them.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload.memory.device_slots import DeviceSlot, DeviceSlots
from offload.torch_private.saved_tensor_hooks import (
    Kept,
    PackHook,
    Passed,
    active_hooks,
    counting_checkpoint,
)
from offload.torch_private.tensor_parts import Wrapping, parts, wraps
from offload.torch_private.torch_internals import (
    AS_IT_IS,
    compiles_frames,
    innermost_saved_tensor_hooks,
    is_in_backward,
    is_in_selective_checkpoint,
    is_traced,
    left_out_of_graphs,
    negated_view,
    selectively_saved,
)
from offload.weights.gradients.final import FinalGradients
from offload.weights.prefetching.prefetcher import Prefetcher
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor
from offload.weights.windows.stand_ins import copy_of_frozen, frozen_stand_in


class _SavedWeight(NamedTuple):
    """A view of a unit's flat buffer: `offset` counts elements of `dtype` from its start.

    `tensor` is the weight in which the view starts, `version` its version counter when it was saved, and `place` the
    address and the strides of its data at home. `conjugated` and `negated` tell of views that stand for other numbers
    than their bytes, such as `weight.conj()`.
    """

    unit: OffloadUnit
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    tensor: UnitTensor
    version: int
    place: object
    conjugated: bool
    negated: bool


class _SavedWhole(NamedTuple):
    """A weight that wraps tensors, all of them as they lie in its slot: see `_SavedWeight` and `Wrapping`."""

    unit: OffloadUnit
    tensor: UnitTensor
    version: int
    place: object
    kind: type
    names: list[str]
    context: object
    shape: torch.Size
    strides: tuple[int, ...]


class _SavedStandIn(NamedTuple):
    """The stand-in of a frozen weight that wraps tensors, as its module holds it: see `_SavedWeight`."""

    unit: OffloadUnit
    tensor: UnitTensor
    version: int
    place: object


class _Counted(NamedTuple):
    """A weight by name, and what a checkpoint of the user's own keeps of it: nothing, but it is asked for it."""

    name: object
    by_checkpoint: Passed


class SavedWeights:
    """The pack and unpack hooks of one attached model. `final` is told of every weight that backward asks for."""

    def __init__(self, slots: DeviceSlots, prefetcher: Prefetcher, final: FinalGradients):
        self._slots = slots
        self._prefetcher = prefetcher
        self._final = final

    @property
    def are_innermost(self) -> bool:
        """True if the hooks are open in this thread, and no others inside them."""
        active = innermost_saved_tensor_hooks(True)
        return active is not None and getattr(active[0], "owner", None) is self

    def hooks(self) -> AbstractContextManager:
        """Returns a context in which weights are saved by name; nested in itself it does nothing."""
        if self.are_innermost:
            return AS_IT_IS
        outer = active_hooks()
        checkpoint = counting_checkpoint(outer)
        slot_of = self._slots.slot_of

        def pack(tensor: torch.Tensor) -> object:
            slot = slot_of(tensor)
            if slot is not None:
                name = self._saved(tensor, slot)
                return name if checkpoint is None else _Counted(name, Passed.to(checkpoint, tensor.detach()))
            return Kept(tensor) if outer is None else Passed.to(outer, tensor)

        def claims(tensor: torch.Tensor) -> bool:
            return slot_of(tensor) is not None

        return saved_tensors_hooks(PackHook(pack, self, outer, claims), self._unpack)

    def check_selective_checkpoints(self) -> None:
        """Raises RuntimeError if a selective activation checkpoint around this call keeps a weight's view of a slot.

        It would use it in the recompute, when the slot has other weights.
        """
        if not is_in_selective_checkpoint():
            return
        for operation, kept in selectively_saved():
            slot = self._slots.slot_of(kept)
            if slot is not None:
                name = "a weight"
                if slot.content is not None and not is_in_backward():
                    first = next(part for part in parts(kept) if self._slots.slot_of(part) is not None)
                    name = slot.content.tensor_at(first.storage_offset() * first.itemsize).name
                raise RuntimeError(
                    f"a selective checkpoint saves the result of {operation}, which is a view of {name} and not on the"
                    " device for backward: its policy must return PREFER_RECOMPUTE for this operation"
                )

    def named(self, tensor: torch.Tensor, units: Collection[OffloadUnit]) -> object | None:
        """Returns the name of a tensor that lies in the slot of one of `units`, for `brought_back`; else None."""
        slot = self._slots.slot_of(tensor)
        return None if slot is None or slot.content not in units else self._saved(tensor, slot)

    def brought_back(self, name: object) -> torch.Tensor:
        """Returns the tensor of that name, in the slot where its unit is now."""
        return self._unpack(name)

    def _saved(self, tensor: torch.Tensor, slot: DeviceSlot) -> object:
        if wraps(tensor):
            return (
                self._saved_stand_in(tensor, slot)
                or self._saved_whole(tensor, slot)
                or Wrapping.of(tensor, self._saved_part)
            )
        unit = slot.content
        offset = tensor.storage_offset()
        whole = unit.tensor_at(offset * tensor.itemsize)
        flags = tensor.is_conj(), tensor.is_neg()
        return _SavedWeight(unit, tensor.dtype, offset, tensor.shape, tensor.stride(), whole, *whole.state, *flags)

    def _saved_stand_in(self, tensor: torch.Tensor, slot: DeviceSlot) -> _SavedStandIn | None:
        first = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        if wraps(first) or self._slots.slot_of(first) is not slot:
            return None
        whole = slot.content.tensor_at(first.storage_offset() * first.itemsize)
        if whole.is_buffer or whole.device is not tensor or whole.kept_stand_in(slot) is not tensor:
            return None
        return _SavedStandIn(slot.content, whole, *whole.state)

    def _saved_whole(self, tensor: torch.Tensor, slot: DeviceSlot) -> _SavedWhole | None:
        names, context = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        if any(map(wraps, inner)):
            return None
        whole = slot.content.tensor_at(inner[0].storage_offset() * inner[0].itemsize)
        if not whole.are_views_in(slot, inner):
            return None
        described = names, context, tensor.shape, tensor.stride()
        return _SavedWhole(slot.content, whole, *whole.state, type(tensor), *described)

    def _saved_part(self, part: torch.Tensor) -> object:
        slot = self._slots.slot_of(part)
        return Kept(part) if slot is None else self._saved(part, slot)

    def _unpack(self, saved: object) -> torch.Tensor:
        # What `left_out_of_graphs` does, without its call.
        if is_traced() or compiles_frames() is not None:
            return self._unpacked(saved)
        if type(saved) is Kept and saved.tensor._version == saved.version:
            return saved.tensor
        if type(saved) is _SavedStandIn:
            return self._bring_back_stand_in(saved)
        return self._bring_back(saved) if type(saved) is _SavedWeight else self._unpacked(saved)

    @left_out_of_graphs
    def _unpacked(self, saved: object) -> torch.Tensor:
        if isinstance(saved, Kept):
            return saved.checked()
        if isinstance(saved, _SavedWeight):
            return self._bring_back(saved)
        if isinstance(saved, _SavedStandIn):
            return self._bring_back_stand_in(saved)
        if isinstance(saved, _SavedWhole):
            return self._bring_back_whole(saved)
        if isinstance(saved, Wrapping):
            return saved.around(self._unpacked)
        if isinstance(saved, _Counted):
            self._unpack(saved.by_checkpoint)
            return self._unpack(saved.name)
        # Unpacking may recompute a block, and a weight unpacked just before belongs to the same operation.
        with self._prefetcher.retain_recent():
            return saved.unpack(saved.packed)

    def _bring_back(self, saved: _SavedWeight) -> torch.Tensor:
        unit, dtype, offset, shape, strides, tensor, version, place, conjugated, negated = saved
        view = self._slot_for(unit, tensor, (version, place)).viewed_as(dtype).as_strided(shape, strides, offset)
        if conjugated:
            view = view.conj()
        if negated:
            view = negated_view(view)
        # With create_graph, the unpacked tensor is saved again, outside any window: that copy must not live in a slot.
        return view.clone() if torch.is_grad_enabled() else view

    def _bring_back_stand_in(self, saved: _SavedStandIn) -> torch.Tensor:
        unit, tensor, version, place = saved
        slot = self._slot_for(unit, tensor, (version, place))
        # With create_graph as in `_bring_back`.
        return copy_of_frozen(tensor, slot) if torch.is_grad_enabled() else frozen_stand_in(tensor, slot)

    def _bring_back_whole(self, saved: _SavedWhole) -> torch.Tensor:
        unit, tensor, version, place, kind, names, context, shape, strides = saved
        views = tensor.views_in(self._slot_for(unit, tensor, (version, place)))
        if torch.is_grad_enabled():
            views = [view.clone() for view in views]
        return kind.__tensor_unflatten__(dict(zip(names, views, strict=True)), context, shape, strides)

    def _slot_for(self, unit: OffloadUnit, tensor: UnitTensor, state: tuple[int, object]) -> DeviceSlot:
        """Returns the slot of a weight that backward asks for. Raises RuntimeError if it is not as it was saved."""
        if self._final.counting:
            self._final.use(unit, tensor)
        if tensor.state != state:
            raise RuntimeError(
                f"{tensor.name}, needed for gradient computation, has been modified since forward:"
                " run backward before the optimizer's step"
            )
        return self._prefetcher.fetch(unit)

"""Weights saved for backward are saved by name, not by bytes.

A slot holds other weights by the time backward runs. So what autograd would keep of a slot is replaced by where it
came from (unit, offset, shape, strides), and brought back into whatever slot the unit has when backward asks.
Everything else passes through to the hooks that were there before, so that activation checkpointing, which is built
on the same hooks, sees in its recompute exactly the tensors that it saw in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload.runtime.device_slots import DeviceSlots
from offload.runtime.saved_tensor_hooks import Kept, Passed, active_hooks
from offload.weights.prefetcher import Prefetcher
from offload.weights.units import OffloadUnit, UnitTensor


@dataclass(frozen=True)
class _Weight:
    """A piece of a unit: the offset is in elements of `dtype` from the start of its flat buffer."""

    unit: OffloadUnit
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    tensor: UnitTensor
    version: int


class SavedWeights:
    """The pack and unpack hooks of one attached model."""

    def __init__(self, slots: DeviceSlots, prefetcher: Prefetcher, note: Callable[[OffloadUnit, UnitTensor], None]):
        """`note` is told of every weight that backward asks for."""
        self._slots = slots
        self._prefetcher = prefetcher
        self._note = note

    def hooks(self) -> AbstractContextManager:
        """A context in which weights are saved by name; nested in itself it does nothing."""
        outer = active_hooks()
        if outer is not None and getattr(outer[0], "owner", None) is self:
            return nullcontext()

        def pack(tensor: torch.Tensor) -> object:
            slot = self._slots.slot_of(tensor)
            if slot is not None:
                return self._name(tensor, slot.content)
            if outer is not None:
                return Passed.to(outer, tensor)
            return Kept.of(tensor)

        pack.owner, pack.outer = self, outer
        pack.claims = lambda tensor: self._slots.slot_of(tensor) is not None
        return saved_tensors_hooks(pack, self._unpack)

    def _name(self, tensor: torch.Tensor, unit: OffloadUnit) -> _Weight:
        offset = tensor.storage_offset()
        whole = unit.tensor_at(offset * tensor.itemsize)
        return _Weight(unit, tensor.dtype, offset, tensor.shape, tensor.stride(), whole, whole.version)

    def _unpack(self, saved: object) -> torch.Tensor:
        if isinstance(saved, _Weight):
            return self._fetch(saved)
        if isinstance(saved, Passed):
            # Unpacking may recompute a block, and a weight unpacked just before belongs to the same operation.
            with self._prefetcher.holding():
                return saved.unpack(saved.packed)
        return saved.checked()

    def _fetch(self, saved: _Weight) -> torch.Tensor:
        self._note(saved.unit, saved.tensor)
        if saved.version != saved.tensor.version:
            raise RuntimeError(
                f"{saved.tensor.name}, needed for gradient computation, has been modified since forward:"
                " run backward before the optimizer's step"
            )
        slot = self._prefetcher.visit(saved.unit)
        flat = slot.bytes.view(saved.dtype)
        view = flat.as_strided(saved.shape, saved.strides, saved.offset)
        # With create_graph, what is unpacked is saved again, outside any window: that copy must not live in a slot.
        return view.clone() if torch.is_grad_enabled() else view

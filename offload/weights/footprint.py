"""Computes the bytes that a mode will hold and move, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from offload.weights.gradients.offloader import gradient_ring_bytes
from offload.weights.units.partition import CutModel


@dataclass(frozen=True)
class Footprint:
    """Bytes by place for one model under one mode, and the traffic of a step of one microbatch.

    A dry run (`offload.planning.dry_run`) tells the bytes that depend on the order of use and on activations.

    Args:
        units, largest_unit_bytes: the number of units that stream, and the bytes of the largest.
        resident_bytes, slot_bytes: of what stays on the device, and of the slots there.
        host_weight_bytes, host_gradient_bytes: of the weights that stream, and of the homes of their gradients.
        h2d_bytes, d2h_bytes: that cross the bus each way in a step, h2d an upper bound.
        file_bytes: of the weights that stream from files.
        ring_bytes: of the page-locked memory through which they are read.
        layer_major: all microbatches of a step share its traffic.
        activation_budget_bytes: of swapped activations that stay on the device; None: as many as copies would not hide.
        resident: the tensors that stay on the device.
        trained: the parameters of each unit that train.
        why_gradients_stay: in words, why gradients cannot be released (`AttachOptions`); None if they can.
        slices: where processes share the homes, for each of them and for each unit the elements of the ranges that it
            updates.
    """

    units: int
    largest_unit_bytes: int
    resident_bytes: int
    slot_bytes: int
    host_weight_bytes: int
    host_gradient_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    file_bytes: int = 0
    ring_bytes: int = 0
    layer_major: bool = False
    activation_budget_bytes: int | None = 0
    why_gradients_stay: str | None = "no weights stream, so no gradients go to the host"
    resident: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    trained: tuple[tuple[Tensor, ...], ...] = field(default=(), compare=False, repr=False)
    slices: tuple[tuple[tuple[int, ...], ...], ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(
        cls,
        model: CutModel,
        slots: int,
        recompute: bool,
        ring_bytes: int = 0,
        gradient_rings: int = 0,
    ) -> Footprint:
        """Returns the footprint of a cut model that streams through `slots` device slots, and `ring_bytes` from files.

        `gradient_rings`: the processes that share the weights, each with a ring for gradients; 0: gradients have homes.
        Weights come in for forward and backward, with recompute once more: an upper bound, as some stay in slots at the
        turn.
        """
        rings = gradient_rings * gradient_ring_bytes(model.units, gradient_rings or 1)
        return cls(
            units=len(model.units),
            largest_unit_bytes=model.largest_unit_bytes,
            resident_bytes=model.resident_bytes,
            slot_bytes=slots * model.largest_unit_bytes,
            host_weight_bytes=model.unit_bytes,
            host_gradient_bytes=rings if gradient_rings else model.gradient_bytes,
            h2d_bytes=model.unit_bytes * (3 if recompute else 2),
            d2h_bytes=model.gradient_bytes,
            file_bytes=model.fixed_bytes,
            ring_bytes=ring_bytes,
            resident=tuple(tensor for tensor, _ in model.resident),
            trained=tuple(tuple(tensor.host for tensor in unit.trained) for unit in model.units),
        )

    @property
    def host_home_bytes(self) -> int:
        """Bytes of the weights that stream and are in host memory."""
        return self.host_weight_bytes - self.file_bytes

    @property
    def resident_gradient_bytes(self) -> int:
        """Bytes of the gradients of what stays on the device."""
        return sum(tensor.nbytes for tensor in self.resident if tensor.requires_grad)

    def for_microbatches(self, count: int) -> Footprint:
        """Returns the footprint with the traffic of a step of `count` microbatches.

        Each moves all, and fetches the gradients of the one before to add to, unless the mode is layer-major.
        """
        if self.layer_major:
            return self
        h2d_bytes = self.h2d_bytes * count + self.d2h_bytes * (count - 1)
        return replace(self, h2d_bytes=h2d_bytes, d2h_bytes=self.d2h_bytes * count)

"""UnitTensor: a parameter or buffer of a unit, at home. `unit.py` has the note on its life."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload.torch_private.tensor_parts import Places, TakenApart, places_of
from offload.weights.units.gradient_slot import GradientSlot
from offload.weights.units.layouts import Layout
from offload.weights.units.placement import ModuleAttribute, move_into, put_over


@dataclass(eq=False)
class UnitTensor:
    """A parameter or buffer of a unit: the modules that hold it, and its bytes in the unit's flat buffer.

    `layout` says how it lies there. `host` is the tensor that modules hold outside of windows; once the unit is at
    home, its data lies in the host block, or where an extension has put it, at the addresses `home` of its parts.
    `origin` is the device on which it was found, and `found` is the tensor itself if that was the meta device.
    `gradient` is where its gradient goes at home. Its stand-in on the device is with `windows.stand_in`.
    """

    name: str
    host: torch.Tensor
    attributes: list[ModuleAttribute]
    offset: int
    home: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found, self.origin = (self.host if self.host.is_meta else None), self.host.device
        self.shape, self.dtype = self.host.shape, self.host.dtype
        self.layout = Layout(self.host)
        # Those of its first part.
        self.strides = self.layout.pieces[0].strides
        self.is_buffer = self.attributes[0].is_buffer
        self.gradient = GradientSlot(self.name, self.layout.pieces[0])
        self._home_places: Places | None = None
        self._taken_apart: TakenApart | None = None

    @property
    def trains(self) -> bool:
        return self.host.requires_grad

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of each plain tensor in `flat` (uint8, laid out as the unit), in the order of `parts`."""
        start = self.offset
        return self.layout.views(lambda offset, nbytes: flat[start + offset : start + offset + nbytes])

    @property
    def parts(self) -> list[torch.Tensor]:
        """The plain tensors of which `host` consists."""
        return self.taken_apart.parts if self.layout.is_compound else [self.host]

    @property
    def taken_apart(self) -> TakenApart:
        """The parts of a `host` that consists of several.

        To take a tensor apart runs much code of its class. So the parts are kept until `forget_parts`, or until `host`
        gets others.
        """
        taken = self._taken_apart
        if taken is None or taken.tensor is not self.host or not taken.is_current:
            taken = self._taken_apart = TakenApart(self.host)
        return taken

    def forget_parts(self) -> None:
        """Takes `host` apart anew from now on, where its user may have given it other parts that nothing shows."""
        if self._taken_apart is not None and not self._taken_apart.shows_parts:
            self._taken_apart = None

    @property
    def is_home(self) -> bool:
        """True if the data of the host tensor is at home: its user has not given it other data.

        The same memory in another order, as `weight.data.t()` is, is other data.
        """
        if not self.layout.is_compound:
            host, nothing = self.host, not self.home or not self.nbytes
            return nothing or (host.data_ptr() == self.home[0] and host.stride() == self.strides)
        return not self.home or self.taken_apart.places == self._home_places

    def move_into(self, memory: list[torch.Tensor]) -> None:
        """Makes `memory`, a tensor for each part, the home of the tensor, with its values."""
        self.host = move_into(memory, self.host, self.attributes)
        self._lies_in(memory)

    def lie_in(self, views: list[torch.Tensor]) -> None:
        """Makes `views`, uint8, one for each part, the home of the tensor, with the values that are there."""
        memory = [piece.over(view) for piece, view in zip(self.layout.pieces, views, strict=True)]
        self.host = put_over(memory, self.host, self.attributes)
        self._lies_in(memory)

    def _lies_in(self, memory: list[torch.Tensor]) -> None:
        self.home = [piece.data_ptr() for piece in memory]
        self._home_places = places_of(memory)

    def check_data(self, host: torch.Tensor, home: torch.device) -> None:
        """Raises RuntimeError in one line if `host` is a tensor that cannot be streamed in this one's place.

        `home` is the device of the unit's block: the host, and in a dry run the meta device.
        """
        if (host.shape, host.dtype, host.device) != (self.shape, self.dtype, home) or not self.layout.fits(host):
            raise RuntimeError(
                f"{self.name} is {host.dtype} of shape {tuple(host.shape)} on {host.device} now and was {self.dtype} of"
                f" shape {tuple(self.shape)} in host memory when the mode was attached: it was moved or replaced;"
                " detach the mode before model.to(), .cuda() or .half(), and attach it again"
            )

"""The contract of an offload mode, with the behaviour of a resident model as the default of every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.microbatches.layer_major import one_after_another
from offload.optimizer.adamw import HostAdamW
from offload.runtime.attachment import Attachment, attaching
from offload.runtime.counters import Counters
from offload.runtime.knobs import check_knobs
from offload.runtime.registry import Streams
from offload.weights.footprint import Footprint
from offload.weights.partition import cut
from offload.weights.placement import DevicePlacement
from offload.weights.unfilled import UnfilledTensors


@dataclass(kw_only=True, eq=False)
class Mode:
    """Decides where weights and activations live and when they move. One object serves one model at a time.

    A mode is a dataclass whose fields are its knobs (see `offload.runtime.knobs`). It overrides what it does
    differently from a resident model, whose parameters, gradients and buffers stay on the device and whose steps move
    nothing. Modes that stream weights derive from `WeightMode`, those that move activations from `ActivationMode`.
    """

    def __post_init__(self) -> None:
        check_knobs(self)
        self.check()
        self._placement: DevicePlacement | None = None
        self._attachment: Attachment | None = None
        self._unfilled = UnfilledTensors()

    @property
    def recomputes(self) -> bool:
        """True for a mode that computes blocks again in backward by itself."""
        return False

    def check(self) -> None:
        """Raises KnobError for knobs that contradict each other. Each by itself has been checked before."""

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        """Returns the bytes that `attach` will take and a step will move; touches nothing.

        `recompute`: each block's activations are computed again in backward. Raises KnobError for a knob that does not
        fit the model.
        """
        return Footprint.of(cut(model, []), slots=0, recompute=recompute)

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Takes `model` over and moves it to where it belongs, here to the device of `streams`.

        Meta parameters and buffers become memory for the caller to fill: until then, steps and forwards raise
        RuntimeError. Raises KnobError as `footprint` does, RuntimeError when this mode has a model already, or a module
        of this model has a mode. After an exception the model is as it was found.
        """
        if self._placement is not None:
            raise RuntimeError("this mode has a model already: detach it, or make a second mode")
        with attaching(model, self) as self._attachment:
            self._placement = DevicePlacement(cut(model, []).resident, streams.device)
            self._unfilled.watch(model)

    def detach(self) -> None:
        """Gives the model back as it was found. Raises RuntimeError inside a step."""
        self._unfilled.close()
        self._placement.restore()
        self._placement = None
        self._attachment.release()

    def step(self, norms: bool = False) -> AbstractContextManager:
        """Surrounds forward and backward of one step; afterwards gradients can be read.

        `norms`: the norms of the gradients will be asked for (`gradient_norms`). Raises RuntimeError when a step is
        open already, and while a tensor that was on the meta device has not been filled.
        """
        self._unfilled.check_step()
        return nullcontext()

    def inference(self) -> AbstractContextManager:
        """Surrounds forwards without gradients, as for samples and evaluations: gradients are off inside.

        The caller changes no weight meanwhile. A mode that streams weights then keeps what is on the device from one
        forward to the next, and fetches what the next uses first while this one ends. It may be opened inside a step;
        no step begins inside it. Raises RuntimeError while a tensor that was on the meta device has not been filled,
        and, in a mode that streams weights, for a parameter whose version counter shows a change.
        """
        self._unfilled.check_step()
        return torch.no_grad()

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Inside a step: computes every loss and the gradients of all. Returns the losses, detached."""
        return one_after_another(losses)

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        """Returns the L2 norms that the step took of gradients on their way off the device: float32 scalars there."""
        return {}

    def overlap(self, optimizer: HostAdamW, early: bool, device_share: int = 0) -> None:
        """Hides the updates of `optimizer` behind the step, where the mode has weights on the host.

        `early`: updates may begin inside backward. `device_share`: bytes of optimizer states that live on the device.
        """

    def place_states(self, nbytes: int) -> None:
        """Between steps: optimizer states of `nbytes` live on the device from now on, where the mode chooses them."""

    def counters(self) -> Counters:
        """Returns the totals since `attach`."""
        return Counters()

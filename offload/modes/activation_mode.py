"""What modes that move activations have in common: they stand on a mode that says where the weights live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from offload.modes.mode import Mode
from offload.optimizer.adamw import HostAdamW
from offload.runtime.module_contexts import ModuleContexts, Opener
from offload.runtime.registry import Streams
from offload.weights.footprint import Footprint


class ActivationMode(ABC):
    """A mode over the mode `weights`: everything about weights is that one's, and the two are one to their user.

    Raises ValueError where `weights` moves activations, too.
    """

    def __init__(self, weights: Mode):
        if isinstance(weights, ActivationMode):
            name = type(weights).__module__.rpartition(".")[2]
            raise ValueError(f"offload.weights={name}: moves activations itself; choose none, or a mode of weights")
        self._weights = weights
        self._contexts_of_modules: ModuleContexts | None = None
        self._in_step = False

    @property
    def recomputes(self) -> bool:
        """Whether the mode itself computes blocks again in backward."""
        return self._weights.recomputes

    @abstractmethod
    def openers(self, model: nn.Module) -> Iterable[tuple[nn.Module, Opener]]:
        """The modules around whose calls in a step something is to happen, and what.

        Raises ValueError where the mode's knobs do not fit the model.
        """

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        """What `attach` will hold and a step will move, in bytes; touches nothing."""
        list(self.openers(model))
        return self._weights.footprint(model, recompute)

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Takes `model` over. Raises RuntimeError when a model is attached already, and what `weights` raises."""
        if self._contexts_of_modules is not None:
            raise RuntimeError("this mode holds a model already: detach it, or make a second mode")
        openers = [(module, self._in_steps_only(opener)) for module, opener in self.openers(model)]
        self._weights.attach(model, streams)
        self._contexts_of_modules = ModuleContexts(openers)

    @contextmanager
    def step(self, norms: bool = False) -> Iterator[None]:
        """Around forward and backward of one step; afterwards gradients are readable where `weights` has them.

        What of the activations is in flight still, the device's next computation is queued behind.
        `norms`: those of the gradients are wanted (`gradient_norms`).
        Raises RuntimeError when a step is open already.
        """
        if self._in_step:
            raise RuntimeError("a step is open already: close it before the next")
        with self._weights.step(norms), self.around_step():
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = False
                self._contexts_of_modules.close_open()

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        """L2 norms of the step's gradients that were taken on the device: float32 scalars there."""
        return self._weights.gradient_norms()

    def overlap(self, optimizer: HostAdamW, early: bool, device_share: int = 0) -> None:
        """Hides the updates of `optimizer` behind the step, as `weights` does."""
        self._weights.overlap(optimizer, early, device_share)

    def place_states(self, nbytes: int) -> None:
        """Between steps: optimizer states of `nbytes` live on the device from now on, as `weights` chooses them."""
        self._weights.place_states(nbytes)

    def around_step(self) -> AbstractContextManager:
        """What the mode does around a step, inside of the step of the weights."""
        return nullcontext()

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Inside a step: computes every loss and the gradients of all. Returns the losses, detached."""
        return self._weights.accumulate(losses)

    def detach(self) -> None:
        """Gives the model back as it was found."""
        if self._in_step:
            raise RuntimeError("detach inside a step: close the step first")
        self._contexts_of_modules.remove()
        self._contexts_of_modules = None
        self._weights.detach()

    def counters(self) -> dict[str, float]:
        """Bytes and ms since `attach`, and the host bytes held now, of weights and activations together."""
        return self._weights.counters()

    def _in_steps_only(self, opener: Opener) -> Opener:
        def opened(arguments: tuple, keywords: dict) -> AbstractContextManager:
            active = self._in_step and torch.is_grad_enabled()
            return opener(arguments, keywords) if active else nullcontext()

        return opened

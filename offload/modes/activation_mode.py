"""The base of the modes that move activations. They stand on another mode, which decides where the weights live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.errors import NOT_ATTACHED, OUTSIDE_STEP, KnobError, knobs_under
from offload.modes.mode import Mode
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.speculation import Speculation
from offload.sharing.sharers import NO_SHARERS, Sharers
from offload.streams.counters import Counters
from offload.streams.registry import Streams
from offload.torch_private.module_contexts import ModuleContexts, Opener
from offload.torch_private.torch_internals import is_in_backward, is_transformed, tree_leaves
from offload.weights.footprint import Footprint
from offload.weights.gradients.updates import Updates
from offload.weights.prefetching.file_homes import Spans


@dataclass(kw_only=True, eq=False)
class ActivationMode(Mode, ABC):
    """A mode over the mode `weights`, to which it leaves everything about weights. To their user the two are one.

    A KnobError about a knob of `weights` names it `weights.KNOB`. Raises KnobError where `weights` moves activations
    itself, or is another system.
    """

    weights: Mode = field(kw_only=False)

    def __post_init__(self) -> None:
        if isinstance(self.weights, ActivationMode):
            name = type(self.weights).__module__.rpartition(".")[2]
            raise KnobError("weights", name, "moves activations itself; choose none, or a mode of weights")
        if self.weights.foreign:
            name = type(self.weights).__module__.rpartition(".")[2]
            raise KnobError("weights", name, "is another system, which runs alone; choose none, or a mode of weights")
        super().__post_init__()
        self._contexts_of_modules: ModuleContexts | None = None
        self._in_step = False

    @property
    def recomputes(self) -> bool:
        return self.weights.recomputes

    @abstractmethod
    def openers(self, model: nn.Module) -> Iterable[tuple[nn.Module, Opener]]:
        """Yields modules, and for each the function that makes the context around its calls in a step.

        Raises KnobError where the mode's knobs do not fit the model.
        """

    def around_step(self) -> AbstractContextManager:
        """Returns a context around each step, inside the step of the weights."""
        return nullcontext()

    def prepare(self, model: nn.Module, streams: Streams) -> None:
        """Makes what the contexts need; called by `attach` when `weights` has the model."""

    def put_away(self) -> None:
        """Gives back what `prepare` has made; called by `detach` when `weights` has given the model back."""

    def activation_counters(self) -> Counters:
        """Returns the counters of the activations, without those of the weights."""
        return Counters()

    def map_weights(self, spans: Spans) -> None:
        self.weights.map_weights(spans)

    def why_gradients_stay(self, model: nn.Module) -> str | None:
        return self.weights.why_gradients_stay(model)

    def release_gradients(self, released: bool = True) -> None:
        self.weights.release_gradients(released)

    @property
    def releases_gradients(self) -> bool:
        return self.weights.releases_gradients

    def use_updates(self, updates: Updates) -> None:
        self.weights.use_updates(updates)

    def expect_sharers(self, count: int) -> None:
        self.weights.expect_sharers(count)

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        list(self.openers(model))
        with knobs_under("weights"):
            return self.weights.footprint(model, recompute)

    def attach(self, model: nn.Module, streams: Streams, sharers: Sharers = NO_SHARERS) -> None:
        """Takes `model` over, as `weights` does, with the same errors."""
        if self._contexts_of_modules is not None:
            raise RuntimeError("this mode has a model already: detach it, or make a second mode")
        openers = [(module, self._in_steps_only(module, opener)) for module, opener in self.openers(model)]
        with knobs_under("weights"):
            self.weights.attach(model, streams, sharers)
        try:
            self.prepare(model, streams)
            self._contexts_of_modules = ModuleContexts(openers)
        except BaseException:
            self.weights.detach()
            raise

    def detach(self) -> None:
        self._check_attached()
        if self._in_step:
            raise RuntimeError("detach inside a step: close the step first")
        self._contexts_of_modules.remove()
        self._contexts_of_modules = None
        try:
            self.weights.detach()
        finally:
            self.put_away()

    @contextmanager
    def step(self, norms: bool = False) -> Iterator[None]:
        """Surrounds forward and backward of one step; afterwards gradients can be read where `weights` has them.

        Outside of it a forward with gradients, of which nothing would move, raises RuntimeError.
        Activations may still be on their way then; the device's next computation is queued behind them.
        """
        self._check_attached()
        if self._in_step:
            raise RuntimeError("a step is open already: close it before the next")
        with self.weights.step(norms), self.around_step():
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = False
                self._contexts_of_modules.close_open()

    def inference(self) -> AbstractContextManager:
        return self.weights.inference()

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        return self.weights.accumulate(losses)

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        return self.weights.gradient_norms()

    def overlap(
        self, optimizer: HostAdamW, early: bool, device_share: int = 0, speculation: Speculation | None = None
    ) -> None:
        self.weights.overlap(optimizer, early, device_share, speculation)

    def divide(self, optimizer: HostAdamW) -> None:
        self.weights.divide(optimizer)

    def shared_parameters(self) -> frozenset[nn.Parameter]:
        return self.weights.shared_parameters()

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        return self.weights.summed_parameters()

    def place_states(self, nbytes: int) -> None:
        self.weights.place_states(nbytes)

    def counters(self) -> Counters:
        """Returns the counters of weights and activations together."""
        self._check_attached()
        return self.weights.counters() + self.activation_counters()

    def _check_attached(self) -> None:
        if self._contexts_of_modules is None:
            raise RuntimeError(NOT_ATTACHED)

    def _in_steps_only(self, module: nn.Module, opener: Opener) -> Opener:
        def opened(arguments: tuple, keywords: dict) -> AbstractContextManager:
            # The transforms of torch.func save tensors without memory of their own, and know no hooks.
            if not torch.is_grad_enabled() or is_transformed():
                return nullcontext()
            if self._in_step:
                return opener(arguments, keywords)
            # A recompute may come after the step: what it saves is used at once.
            if not is_in_backward() and _saves_for_backward(module, (arguments, keywords)):
                raise RuntimeError(OUTSIDE_STEP)
            return nullcontext()

        return opened


def _saves_for_backward(module: nn.Module, arguments: object) -> bool:
    given = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
    return any(tensor.requires_grad for tensor in (*module.parameters(), *given))

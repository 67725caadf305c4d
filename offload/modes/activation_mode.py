"""The base of the modes that move activations. They stand on another mode, which decides where the weights live."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.errors import NOT_ATTACHED, OUTSIDE_STEP, KnobError, knobs_under
from offload.modes.mode import Mode
from offload.sharing.sharers import NO_SHARERS, Sharers
from offload.streams.counters import Counters
from offload.streams.registry import Streams
from offload.torch_private.module_contexts import ModuleContexts
from offload.torch_private.torch_internals import is_in_backward, is_transformed, tree_leaves
from offload.weights.footprint import Footprint


def _left_to_weights(method: Callable) -> Callable:
    """Returns `method` of `Mode` as one that calls that of the mode of the weights."""

    @functools.wraps(method)
    def called(self: ActivationMode, *arguments: object, **keywords: object) -> object:
        return getattr(self.weights, method.__name__)(*arguments, **keywords)

    return called


@dataclass(kw_only=True, eq=False)
class ActivationMode(Mode, ABC):
    """A mode over the mode `weights`, to which it leaves everything about weights. To their user the two are one.

    A KnobError about a knob of `weights` names it `weights.KNOB`. Raises KnobError where `weights` moves activations
    itself, or is another system.
    """

    weights: Mode = field(kw_only=False)

    def __post_init__(self) -> None:
        problem = None
        if isinstance(self.weights, ActivationMode):
            problem = "moves activations itself"
        elif self.weights.foreign:
            problem = "is another system, which runs alone"
        if problem:
            name = type(self.weights).__module__.rpartition(".")[2]
            raise KnobError("weights", name, f"{problem}; choose none, or a mode of weights")
        super().__post_init__()
        self._contexts: ModuleContexts | None = None
        self._in_step = False

    @abstractmethod
    def around_forward(self, arguments: tuple, keywords: Mapping) -> AbstractContextManager:
        """Returns the context around a forward of the model with these arguments, in a step and with gradients."""

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

    @property
    def recomputes(self) -> bool:
        return self.weights.recomputes

    @property
    def releases_gradients(self) -> bool:
        return self.weights.releases_gradients

    map_weights = _left_to_weights(Mode.map_weights)
    why_gradients_stay = _left_to_weights(Mode.why_gradients_stay)
    release_gradients = _left_to_weights(Mode.release_gradients)
    use_updates = _left_to_weights(Mode.use_updates)
    expect_sharers = _left_to_weights(Mode.expect_sharers)
    inference = _left_to_weights(Mode.inference)
    accumulate = _left_to_weights(Mode.accumulate)
    gradient_norms = _left_to_weights(Mode.gradient_norms)
    overlap = _left_to_weights(Mode.overlap)
    divide = _left_to_weights(Mode.divide)
    shared_parameters = _left_to_weights(Mode.shared_parameters)
    summed_parameters = _left_to_weights(Mode.summed_parameters)
    place_states = _left_to_weights(Mode.place_states)

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        with knobs_under("weights"):
            return self.weights.footprint(model, recompute)

    def attach(self, model: nn.Module, streams: Streams, sharers: Sharers = NO_SHARERS) -> None:
        """Takes `model` over, as `weights` does, with the same errors."""
        if self._contexts is not None:
            raise RuntimeError("this mode has a model already: detach it, or make a second mode")
        with knobs_under("weights"):
            self.weights.attach(model, streams, sharers)
        try:
            self.prepare(model, streams)
            self._contexts = ModuleContexts([(model, functools.partial(self._around_call, model))])
        except BaseException:
            self.weights.detach()
            raise

    def detach(self) -> None:
        self._check_attached()
        if self._in_step:
            raise RuntimeError("detach inside a step: close the step first")
        self._contexts.remove()
        self._contexts = None
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
                self._contexts.close_open()

    def counters(self) -> Counters:
        """Returns the counters of weights and activations together."""
        self._check_attached()
        return self.weights.counters() + self.activation_counters()

    def _check_attached(self) -> None:
        if self._contexts is None:
            raise RuntimeError(NOT_ATTACHED)

    def _around_call(self, model: nn.Module, arguments: tuple, keywords: Mapping) -> AbstractContextManager:
        # The transforms of torch.func save tensors without memory of their own, and know no hooks.
        if not torch.is_grad_enabled() or is_transformed():
            return nullcontext()
        if self._in_step:
            return self.around_forward(arguments, keywords)
        # A recompute may come after the step: what it saves is used at once.
        if not is_in_backward():
            given = (leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor))
            if any(tensor.requires_grad for tensor in (*model.parameters(), *given)):
                raise RuntimeError(OUTSIDE_STEP)
        return nullcontext()

"""The base of the modes that move activations. They stand on another mode, which decides where the weights live."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.knobs import OUTSIDE_STEP, KnobError, knobs_under
from offload.modes.mode import NO_OPTIONS, Activations, Attached, AttachOptions, Mode
from offload.streams.registry import Streams
from offload.torch_private.module_contexts import ModuleContexts
from offload.torch_private.torch_internals import is_in_backward, is_transformed, tree_leaves
from offload.weights.footprint import Footprint


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

    @abstractmethod
    def activations(self, model: nn.Module, streams: Streams) -> MovedActivations:
        """Returns the half that moves the activations of `model`, whose weights are where they belong."""

    @property
    def recomputes(self) -> bool:
        return self.weights.recomputes

    def footprint(self, model: nn.Module, recompute: bool = False, options: AttachOptions = NO_OPTIONS) -> Footprint:
        with knobs_under("weights"):
            return self.weights.footprint(model, recompute, options)

    def attach(self, model: nn.Module, streams: Streams, options: AttachOptions = NO_OPTIONS) -> Attached:
        """Takes `model` over, as `weights` does, with the same errors."""
        with knobs_under("weights"):
            attached = self.weights.attach(model, streams, options)
        try:
            attached.activations = self.activations(model, streams)
        except BaseException:
            attached.detach()
            raise
        return attached


class MovedActivations(Activations, ABC):
    """Puts a context around each forward of `model` that is in a step and has gradients.

    Outside of a step a forward with gradients, of which nothing would move, raises RuntimeError.
    """

    def __init__(self, model: nn.Module):
        self._contexts = ModuleContexts([(model, functools.partial(self._around_call, model))])
        self._in_step = False

    @abstractmethod
    def around_forward(self, arguments: tuple, keywords: Mapping) -> AbstractContextManager:
        """Returns the context around a forward of the model with these arguments."""

    def around_step(self) -> AbstractContextManager:
        """Returns a context around each step, inside the step of the weights."""
        return nullcontext()

    @contextmanager
    def step(self) -> Iterator[None]:
        with self.around_step():
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = False
                self._contexts.close_open()

    def remove(self) -> None:
        self._contexts.remove()

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

"""tensor_swap: tensors saved for backward wait on the host, the idea of MindSpeed's swap-attention and of vDNN.

Another mode decides where the weights live: resident, or streamed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from offload.activations.policy import AutomaticBudget, FixedBudget
from offload.activations.swapper import ActivationSwapper
from offload.blocks import find_blocks
from offload.errors import KnobError, refuse_part
from offload.knobs import choice, knob, nbytes
from offload.memory.host_memory import HostArena
from offload.modes.activation_mode import ActivationMode
from offload.streams.counters import Counters
from offload.streams.registry import Streams
from offload.streams.transfer import Telemetry, Transfer
from offload.torch_private.module_contexts import Opener
from offload.torch_private.one_thread import OneThread
from offload.weights.footprint import Footprint

# Bytes of copies out that may be under way. Backward starts with the tensors saved last, so more only costs memory.
IN_FLIGHT_BYTES = 512 * 2**20


@dataclass(kw_only=True, eq=False)
class TensorSwap(ActivationMode):
    """Swaps activations; `weights` is the mode of the weights.

    Args:
        layers: patterns over module names, such as [model.layers.*] or ['*.mlp']: the tensors saved inside the
            outermost modules that match are swapped. null: in the whole model.
        min_bytes: smaller tensors stay on the device.
        budget: bytes that may stay on the device besides (0, 8GiB), those that backward uses first; or auto: as much as
            the copies could not hide behind compute, which the first steps find out.
        keep_last: the number of modules, the last ones that match, which keep theirs on the device (of the model's
            blocks, where layers is null).
        prefetch: bytes that may be back on the device ahead of use.
        host_budget: host memory for activations, at most (64GiB); null is as much as is free. Beyond it they stay on
            the device.
        predicate: import path of a function of a tensor that returns True or False, to swap it or not, such as
            mypackage.swap.wanted; it is asked last, also about meta tensors when a step is planned. It is imported and
            called: read it before you use a configuration of others.
        pin: auto page-locks the host memory, which copies five times as fast; "off" (quoted) takes pageable memory.
    """

    layers: list[str] | None = knob(None)
    min_bytes: str | int = nbytes("1MiB")
    budget: str | int = nbytes(0, or_else="auto")
    keep_last: int = knob(0, at_least=0)
    prefetch: str | int = nbytes("512MiB")
    host_budget: str | int | None = nbytes(None)
    predicate: str | None = knob(None)
    pin: str = choice("auto", "off")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._asked = None if self.predicate is None else _imported(self.predicate)
        self._model: nn.Module | None = None
        self._swapper: ActivationSwapper | None = None
        self._one_thread = OneThread()

    def check(self) -> None:
        if self.layers is not None and not self.layers:
            raise KnobError("layers", self.layers, "names no module; give patterns, or null for the whole model")

    def openers(self, model: nn.Module) -> Iterable[tuple[nn.Module, Opener]]:
        swapped = [model] if self.layers is None else self._matched(model)
        for module in dict.fromkeys([model, *swapped]):
            yield module, self._opener(module is model, module in swapped)
        kept = swapped if self.layers is not None else self._blocks(model)
        if self.keep_last > len(kept):
            raise KnobError("keep_last", self.keep_last, f"must be between 0 and the {len(kept)} there are")
        for module in kept[len(kept) - self.keep_last :]:
            yield module, lambda arguments, keywords: self._swapper.keeping()

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        if recompute and self.layers is not None:
            self._refuse_recomputed(model)
        budget = None if self.budget == "auto" else self.budget
        return replace(super().footprint(model, recompute), activation_budget_bytes=budget)

    def prepare(self, model: nn.Module, streams: Streams) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            refuse_part(name, tensor)
        self._model = model
        self._telemetry = Telemetry(streams)
        self._arena = HostArena(streams.device, self.pin == "auto")
        self._swapper = ActivationSwapper(
            Transfer(streams, self._telemetry),
            self._arena,
            min_bytes=self.min_bytes,
            in_flight_bytes=IN_FLIGHT_BYTES,
            prefetch_bytes=self.prefetch,
            host_budget=self.host_budget,
            policy=AutomaticBudget() if self.budget == "auto" else FixedBudget(self.budget),
            predicate=self._asked,
        )

    def around_step(self) -> AbstractContextManager:
        return self._swapper.step(kept=(*self._model.parameters(), *self._model.buffers()))

    def put_away(self) -> None:
        self._swapper.close()
        self._arena.close()
        self._model = self._swapper = None

    def activation_counters(self) -> Counters:
        self._telemetry.collect()
        return Counters(
            h2d_bytes=self._telemetry.h2d_bytes,
            d2h_bytes=self._telemetry.d2h_bytes,
            activation_h2d_bytes=self._telemetry.h2d_bytes,
            activation_d2h_bytes=self._telemetry.d2h_bytes,
            stall_ms=self._telemetry.stall_ms,
            swapped_bytes=self._swapper.swapped_bytes,
            released_bytes=self._swapper.released_bytes,
            host_pinned_bytes=self._arena.pinned_bytes,
            host_pageable_bytes=self._arena.pageable_bytes,
        )

    def _opener(self, is_root: bool, swaps: bool) -> Opener:
        @contextmanager
        def opened(arguments: tuple, keywords: Mapping) -> Iterator[None]:
            with ExitStack() as stack:
                if is_root:
                    stack.enter_context(self._one_thread.turn())
                    stack.enter_context(self._swapper.excluding(_tensors((arguments, keywords))))
                if swaps:
                    stack.enter_context(self._swapper.hooks())
                yield

        return opened

    def _matched(self, model: nn.Module) -> list[nn.Module]:
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:8])
                raise KnobError("layers", pattern, f"no module has such a name; the model has {some}")
        matched, inside = [], set()
        for name, module in model.named_modules():
            if name and module not in inside and any(fnmatchcase(name, pattern) for pattern in self.layers):
                matched.append(module)
                inside.update(module.modules())
        return matched

    def _refuse_recomputed(self, model: nn.Module) -> None:
        try:
            blocks = [block for _, block in find_blocks(model)]
        except ValueError:
            # recompute=block finds no blocks either, and is refused by itself.
            return
        within = {module for block in blocks for module in block.modules() if module is not block}
        if within.issuperset(self._matched(model)):
            raise KnobError(
                "layers",
                self.layers,
                "these lie inside blocks that recompute=block computes again, where nothing is saved: name the blocks,"
                " or take recompute=none",
            )

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        if not self.keep_last:
            return []
        try:
            return [block for _, block in find_blocks(model)]
        except ValueError:
            problem = "this model has no list of blocks; say in layers which modules to count"
            raise KnobError("keep_last", self.keep_last, problem) from None


def _imported(path: str) -> Callable[[Tensor], bool]:
    """Returns the function at `path`, wrapped so that its mistakes are reported as those of the knob."""
    module, _, name = path.rpartition(".")
    advice = "give an import path, package.module.function"
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the module's own code
        problem = f"cannot be imported ({type(error).__name__}: {error}); {advice}"
        raise KnobError("predicate", path, problem) from error
    if not callable(function):
        raise KnobError("predicate", path, f"is not a function; {advice}")

    def asked(tensor: Tensor) -> bool:
        try:
            answer = function(tensor)
        except Exception as error:
            raise KnobError("predicate", path, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise KnobError("predicate", path, f"returned a {type(answer).__name__}; return True or False")
        return answer

    return asked


def _tensors(value: object, inside: bool = False) -> Iterator[Tensor]:
    """Yields the tensors in a value, in the sequences and mappings inside it, and in the attributes of an object."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, inside)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, inside)
    elif not inside:
        # Not the attributes of attributes: they may lead anywhere.
        for item in list(getattr(value, "__dict__", {}).values()):
            yield from _tensors(item, True)

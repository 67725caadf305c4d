"""tensor_swap: what is saved for backward waits on the host, the idea of MindSpeed's swap-attention and of vDNN.

Weights are another mode's: resident, or streamed as that mode does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from offload.activations.policy import AutomaticBudget, FixedBudget
from offload.activations.swapper import ActivationSwapper
from offload.modes.activation_mode import ActivationMode
from offload.modes.mode import Mode
from offload.modes.weight_mode import one_of
from offload.runtime.blocks import find_blocks
from offload.runtime.byte_sizes import parse_bytes
from offload.runtime.host_memory import HostArena
from offload.runtime.module_contexts import Opener
from offload.runtime.registry import Streams
from offload.runtime.transfer import Telemetry, Transfer
from offload.weights.footprint import Footprint

# Copies out that may be under way. Backward starts with what was saved last, so more of it only costs memory.
IN_FLIGHT_BYTES = 512 * 2**20


class TensorSwap(ActivationMode):
    """Swaps activations; sizes are in bytes, ints or strings such as "512MiB".

    `weights` is the mode of the weights. `layers` are patterns over module names (`model.layers.*`, `*.mlp`): swapped
    is what is saved inside the outermost modules that match, None: in the whole model. The last `keep_last` of them
    (of the model's blocks, where `layers` is None) keep theirs on the device. Tensors under `min_bytes` stay. `budget`
    is how much may stay besides: bytes, or "auto", as much as copies would not hide behind compute. `prefetch` bytes
    are back ahead of use. `host_budget` bounds the host memory, None: what is free. `predicate` is the import path of
    a function that is asked of each tensor, after all this, whether to swap it: it returns True or False, and is asked
    about tensors of the meta device where a step is planned. `pin` is "auto" (page-lock host memory) or "off".
    Raises ValueError naming the key for a value that does not fit, also of what the predicate does.
    """

    def __init__(
        self,
        weights: Mode,
        layers: Sequence[str] | None = None,
        min_bytes: str | int = "1MiB",
        budget: str | int = 0,
        keep_last: int = 0,
        prefetch: str | int = "512MiB",
        host_budget: str | int | None = None,
        predicate: str | None = None,
        pin: str = "auto",
    ):
        super().__init__(weights)
        if keep_last < 0:
            raise ValueError(f"offload.keep_last={keep_last}: must be at least 0")
        if layers is not None and not layers:
            raise ValueError("offload.layers=[]: names no module; give patterns, or null for the whole model")
        self._layers = None if layers is None else tuple(layers)
        self._keep_last = keep_last
        self._min_bytes = parse_bytes("offload.min_bytes", min_bytes)
        self._budget = None if budget == "auto" else _budget(budget)
        self._prefetch_bytes = parse_bytes("offload.prefetch", prefetch)
        self._host_budget = None if host_budget is None else parse_bytes("offload.host_budget", host_budget)
        self._predicate = None if predicate is None else _imported(predicate)
        self._pin = one_of("pin", pin, "auto", "off") == "auto"
        self._model: nn.Module | None = None
        self._activations: ActivationSwapper | None = None

    def openers(self, model: nn.Module) -> Iterable[tuple[nn.Module, Opener]]:
        swapped = [model] if self._layers is None else self._matched(model)
        for module in dict.fromkeys([model, *swapped]):
            yield module, self._opener(module is model, module in swapped)
        kept = swapped if self._layers is not None else self._blocks(model)
        if self._keep_last > len(kept):
            raise ValueError(f"offload.keep_last={self._keep_last}: must be between 0 and the {len(kept)} there are")
        for module in kept[len(kept) - self._keep_last :]:
            yield module, lambda arguments, keywords: self._activations.keeping()

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        """The plan of the weights, and how many bytes of activations stay on the device."""
        if recompute and self._layers is not None:
            self._refuse_recomputed(model)
        return replace(super().footprint(model, recompute), activation_budget_bytes=self._budget)

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Takes `model` over, as `weights` does. Raises RuntimeError when a model is attached already."""
        super().attach(model, streams)
        self._model = model
        self._telemetry = Telemetry(streams)
        self._arena = HostArena(streams.device, self._pin)
        self._activations = ActivationSwapper(
            Transfer(streams, self._telemetry),
            self._arena,
            min_bytes=self._min_bytes,
            in_flight_bytes=IN_FLIGHT_BYTES,
            prefetch_bytes=self._prefetch_bytes,
            host_budget=self._host_budget,
            policy=AutomaticBudget() if self._budget is None else FixedBudget(self._budget),
            predicate=self._predicate,
        )

    def around_step(self) -> AbstractContextManager:
        return self._activations.step(kept=(*self._model.parameters(), *self._model.buffers()))

    def detach(self) -> None:
        """Gives the model back as it was found."""
        super().detach()
        self._activations.close()
        self._arena.close()
        self._model = self._activations = None

    def counters(self) -> dict[str, float]:
        """Those of the weights and of the activations in one; `swapped_bytes` went to the host, and of these the
        memory of `released_bytes` was free until they were wanted back."""
        self._telemetry.collect()
        counters = super().counters()
        counters["h2d_bytes"] += self._telemetry.h2d_bytes
        counters["d2h_bytes"] += self._telemetry.d2h_bytes
        counters["stall_ms"] += self._telemetry.stall_ms
        counters["host_pinned_bytes"] += self._arena.pinned_bytes
        counters["host_pageable_bytes"] += self._arena.pageable_bytes
        counters["activation_h2d_bytes"] = counters.get("activation_h2d_bytes", 0) + self._telemetry.h2d_bytes
        counters["activation_d2h_bytes"] = counters.get("activation_d2h_bytes", 0) + self._telemetry.d2h_bytes
        counters["swapped_bytes"] = self._activations.swapped_bytes
        counters["released_bytes"] = self._activations.released_bytes
        return counters

    def _opener(self, is_root: bool, swaps: bool) -> Opener:
        @contextmanager
        def opened(arguments: tuple, keywords: Mapping) -> Iterator[None]:
            with ExitStack() as stack:
                if is_root:
                    stack.enter_context(self._activations.excluding(_tensors((arguments, keywords))))
                if swaps:
                    stack.enter_context(self._activations.hooks())
                yield

        return opened

    def _matched(self, model: nn.Module) -> list[nn.Module]:
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self._layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:8])
                raise ValueError(f"offload.layers={pattern}: no module has such a name; the model has {some}")
        matched, inside = [], set()
        for name, module in model.named_modules():
            if name and module not in inside and any(fnmatchcase(name, pattern) for pattern in self._layers):
                matched.append(module)
                inside.update(module.modules())
        return matched

    def _refuse_recomputed(self, model: nn.Module) -> None:
        within = {module for _, block in find_blocks(model) for module in block.modules() if module is not block}
        if within.issuperset(self._matched(model)):
            raise ValueError(
                f"offload.layers={list(self._layers)}: these lie inside blocks that recompute=block computes again,"
                " where nothing is saved: name the blocks, or take recompute=none"
            )

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        if not self._keep_last:
            return []
        try:
            return [block for _, block in find_blocks(model)]
        except ValueError:
            message = (
                f"offload.keep_last={self._keep_last}: this model has no list of blocks; say in offload.layers which"
            )
            raise ValueError(f"{message} modules to count") from None


def _budget(value: str | int) -> int:
    try:
        return parse_bytes("offload.budget", value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def _imported(path: str) -> Callable[[Tensor], bool]:
    """The function at `path`, which says what it did wrong under that name."""
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the module's own code
        raise ValueError(
            f"offload.predicate={path}: cannot be imported ({type(error).__name__}: {error}); give an import path,"
            " package.module.function"
        ) from error
    if not callable(function):
        raise ValueError(f"offload.predicate={path}: is no function; give an import path, package.module.function")

    def asked(tensor: Tensor) -> bool:
        try:
            answer = function(tensor)
        except Exception as error:
            raise ValueError(f"offload.predicate={path}: raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise ValueError(f"offload.predicate={path}: returned a {type(answer).__name__}; return True or False")
        return answer

    return asked


def _tensors(value: object, inside: bool = False) -> Iterator[Tensor]:
    """The tensors in a value, in the sequences and mappings that it is made of, and in an object's attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, inside)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, inside)
    elif not inside:
        # Not the attributes of these in turn: they may lead anywhere.
        for item in list(getattr(value, "__dict__", {}).values()):
            yield from _tensors(item, True)

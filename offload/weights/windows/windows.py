"""Opens windows on units: has them on the device, installed in their modules, while a forward needs them.

[Note: who opens a window]

- The forward of a module opens the windows of the tensors that it may read, and closes them when it ends. The modules
  inside find them open, and do nothing.
- Code may also read a weight of a module that it does not call (see `held_tensors`). Then a window opens where the
  reader is: it stays open until the innermost forward that opened windows, or has windows inside, ends. Hooks of the
  model itself, and of modules that have hooks when the mode attaches, run in a scope of that module's call.
- Where such a window would take a slot that the windows inside may need, the reader gets a copy, which counts as a use
  of the stand-in. Code that runs in backward, outside of any forward, gets a copy, too.
- Code that runs outside of forward and backward gets what the module holds: the host's tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from offload.knobs import OUTSIDE_STEP
from offload.memory.device_slots import DeviceSlots
from offload.streams.registry import Streams
from offload.streams.stream_checker import Home
from offload.torch_private.module_contexts import ModuleContexts, OneThread, ReplacedForward, running_microbatch
from offload.torch_private.recomputed_blocks import arrived, leaving
from offload.torch_private.saved_tensor_hooks import (
    function_contexts,
    hidden_from_selective_checkpoints,
    watch_contexts,
)
from offload.torch_private.torch_internals import (
    NO_CONTEXT,
    check_no_data_parallel,
    check_no_transform,
    compiles_frames,
    has_hooks_around_forward,
    innermost_saved_tensor_hooks,
    is_in_backward,
    is_traced,
    left_out_of_graphs,
    node_in_progress,
)
from offload.weights.gradients.final import FinalGradients
from offload.weights.gradients.landing import GradientLanding
from offload.weights.prefetching.prefetcher import Prefetcher
from offload.weights.units.partition import CutModel, open_at_once
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.windows.held_tensors import (
    HeldTensors,
    LeavesSlots,
    OpenTensors,
    RunningForwards,
    Scope,
    ThreadForwards,
    copy_returned,
    end_watch,
    watch_reads,
)
from offload.weights.windows.saved_weights import SavedWeights, name_kept_weights
from offload.weights.windows.stand_in import StandIn, StandIns
from offload.weights.windows.stand_ins import (
    copy_of_stand_in,
    differs_from_home,
    drop_stand_ins,
    forget_stand_ins,
    install_stand_ins,
    remove_stand_ins,
)

Read = Sequence[tuple[OffloadUnit, UnitTensor]]


class Windows:
    """The windows of one attached model. `final` is told of every weight that a forward may read."""

    def __init__(
        self,
        cut: CutModel,
        slots: DeviceSlots,
        stand_ins: StandIns,
        prefetcher: Prefetcher,
        saved: SavedWeights,
        streams: Streams,
        *,
        sink: GradientLanding,
        final: FinalGradients,
    ):
        self._units = cut.units
        self._stand_ins = stand_ins
        self.prefetcher, self._contents = prefetcher, prefetcher.contents
        self._saved = saved
        self.streams = streams
        self._sink = sink
        self.final = final
        # Units keep their slots, as in a step, inside inference, and in a forward outside of both.
        self._keeps_units = self._in_step = False
        # Units that had windows since it began.
        self._opened: dict[OffloadUnit, None] = {}
        self.threads, self._one_thread = ThreadForwards(), OneThread()
        self._around, self._slots = set(cut.around), len(slots.all)
        self._inside = functools.cache(functools.partial(_units_inside, cut))
        self._on_modules = _OnModules(cut, slots, self)

    def begin(self, in_step: bool) -> None:
        """Begins a step, or a run of forwards without gradients. Units keep their slots, and stand-ins, until `end`."""
        self._keeps_units, self._in_step = True, in_step

    def end(self) -> None:
        """Drops the stand-ins, and closes scopes that an interrupt has left open."""
        self._on_modules.calls.close_open()
        self._keeps_units = self._in_step = False
        self._opened.clear()
        for stand_ins in self._stand_ins.values():
            drop_stand_ins(stand_ins)

    def remove(self) -> None:
        """Gives modules their own forwards and plain dictionaries again."""
        self._on_modules.remove()
        for stand_ins in self._stand_ins.values():
            forget_stand_ins(stand_ins)

    def run(
        self,
        module: nn.Module,
        read: Read,
        units: Sequence[OffloadUnit],
        forward: Callable,
        arguments: tuple,
        keywords: dict,
    ) -> object:
        """Runs the forward of a module with windows on `units`, those of `read`, the tensors that it may read."""
        check_no_transform(even_vmap=bool(read))
        check_no_data_parallel()
        running, scope = self.threads.running, Scope(module)
        with NO_CONTEXT if self._keeps_units else self._kept(), self._running(running, scope):
            for unit in units:
                self._open(unit, scope, running)
            if self.final.has_landed:
                for unit, tensor in read:
                    self.final.use(unit, tensor)
            first = function_contexts.begin()
            try:
                with self._saved.hooks(running):
                    return self._finish(running, scope, first, forward(*arguments, **keywords))
            finally:
                function_contexts.end()

    def call_of(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns what surrounds a call of `module`; the windows that are opened in it close at its end."""
        return self._running(self.threads.running, Scope(module))

    @contextmanager
    def _running(self, running: RunningForwards, scope: Scope) -> Iterator[None]:
        with NO_CONTEXT if running.scopes else self._outermost():
            running.scopes.append(scope)
            try:
                yield
            finally:
                running.end(scope)
                if scope.units:
                    with hidden_from_selective_checkpoints():
                        self._close(scope)
        if scope.copies:
            scope.check_copies()
            self._release_unless_kept()

    @contextmanager
    def _outermost(self) -> Iterator[None]:
        """Surrounds the outermost forward of a thread."""
        with self._one_thread.turn(), self.streams.device_work(self._homes):
            yield

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Surrounds an outermost forward, in which units keep their slots. Outside of it weights may change."""
        with hidden_from_selective_checkpoints():
            self.prefetcher.begin_forward()
        self._keeps_units = True
        try:
            yield
        except Exception:
            raise
        except BaseException:
            # torch calls no hook after a KeyboardInterrupt.
            self._on_modules.calls.close_open()
            raise
        finally:
            self._keeps_units = False
            self._release_for_host_writes()

    def _release_unless_kept(self) -> None:
        if not self._keeps_units:
            # A hook around the outermost forward has read weights.
            self._release_for_host_writes()

    def _release_for_host_writes(self) -> None:
        with hidden_from_selective_checkpoints():
            self.prefetcher.release_for_host_writes()
        for unit in [unit for unit in self._opened if not unit.open_windows]:
            drop_stand_ins(self._stand_ins[unit])
            del self._opened[unit]

    def _homes(self) -> list[Home]:
        homes: list[Home] = []
        for unit in self._units:
            homes.append((unit.weights.bytes, unit.name))
            apart = unit.tensors if unit.is_fixed else unit.strays()
            homes += [(part.data, tensor.name) for tensor in apart for part in tensor.parts]
        return homes

    def _open(self, unit: OffloadUnit, scope: Scope, running: RunningForwards) -> None:
        if torch.is_grad_enabled() and not self._in_step and unit.trained:
            raise RuntimeError(OUTSIDE_STEP)
        with hidden_from_selective_checkpoints():
            slot = self.prefetcher.fetch(unit, in_window=True)
            running.compute = self.streams.compute
            scope.units.append(unit)
            running.units.add(unit)
            self._opened[unit] = None
            if unit.open_windows == 1:
                install_stand_ins(unit, self._stand_ins[unit], slot, self._sink, self._units)
                if running_microbatch() is None:
                    for held in self._on_modules.held[unit]:
                        held.__class__ = OpenTensors
                if unit.buffer_places:
                    arrived(unit.buffer_places)

    def _close(self, scope: Scope) -> None:
        twice: list[StandIn] = []
        for unit in scope.units:
            unit.open_windows -= 1
            if unit.open_windows:
                continue
            for held in self._on_modules.held[unit]:
                held.__class__ = HeldTensors
            if unit.buffer_places:
                leaving(unit.buffer_places)
            changed = remove_stand_ins(self._stand_ins[unit], self._contents.slot_of[unit])
            if changed and is_in_backward():
                twice += [stand_in for stand_in in changed if differs_from_home(stand_in)]
                changed = [stand_in for stand_in in changed if stand_in not in twice]
            if changed:
                self._contents.write_home(unit, {stand_in.tensor: stand_in.parts for stand_in in changed})
            self._contents.mark_last_use(unit)
        self._release_unless_kept()
        if twice:
            raise RuntimeError(
                f"{twice[0].tensor.name} was changed by a forward, and once more as backward computes that forward"
                " again: change it outside of the block, or leave its block out of what is computed again"
            )

    def _finish(self, running: RunningForwards, scope: Scope, first: int, result: object) -> object:
        """Returns `result` without the memory of slots, which the forward's windows give up when they close now.

        `first` is the place of the first context of an autograd function that the forward may have made.
        """
        if made := function_contexts.made[first:]:
            # A function may also keep a weight that a module around this one gave it.
            name_kept_weights(made, running.units, self._saved)
        closing = [unit for unit in scope.units if unit.open_windows == 1]
        if not closing:
            return result
        with hidden_from_selective_checkpoints():
            return copy_returned(result, self._saved.slot_of, closing=closing.__contains__)

    @left_out_of_graphs
    def read(self, unit: OffloadUnit, tensor: UnitTensor) -> torch.Tensor | None:
        """Answers the read of a tensor where no window is known to be open; see `held_tensors.OnRead`."""
        running = self.threads.running
        if not running.scopes:
            return self._copy(unit, tensor) if self._is_device_work_of_backward() else None
        if unit not in running.units:
            check_no_transform(even_vmap=True)
            innermost = running.scopes[-1]
            if not self._has_room(unit, innermost.module):
                if tensor not in innermost.copies:
                    innermost.copies[tensor] = self._copy(unit, tensor)
                return innermost.copies[tensor]
            self._open(unit, innermost, running)
        if self.final.has_landed:
            self.final.use(unit, tensor)
        return None

    def _has_room(self, unit: OffloadUnit, module: nn.Module) -> bool:
        """Tells whether a window on `unit`, in a forward of `module`, leaves slots for those inside the module."""
        if running_microbatch() is not None and module in self._around:
            # Others run before this forward ends, and a window has the stand-ins of one.
            return False
        inside, at_once = self._inside(module)
        in_use = {unit}.union(other for other in self._units if other.open_windows)
        return len(in_use) + (0 if inside <= in_use else at_once) <= self._slots

    def _copy(self, unit: OffloadUnit, tensor: UnitTensor) -> torch.Tensor:
        check_no_transform(even_vmap=True)
        self.final.use(unit, tensor)
        with hidden_from_selective_checkpoints():
            slot = self.prefetcher.fetch(unit, in_window=True)
            self._opened[unit] = None
            try:
                stand_in = self._stand_ins.at(unit, tensor.offset)
                return copy_of_stand_in(unit, stand_in, slot, self._sink)
            finally:
                unit.open_windows -= 1
                if not unit.open_windows:
                    self._contents.mark_last_use(unit)

    def _is_device_work_of_backward(self) -> bool:
        if not (self._in_step and is_in_backward()):
            return False
        # Hooks of a parameter get its gradient in host memory, and run in the node that accumulates it there.
        variable = getattr(node_in_progress(), "variable", None)
        return not any(variable is tensor.host for unit in self._units for tensor in unit.tensors)


class ForwardInWindows(ReplacedForward):
    """Runs the forward of `module` with windows on the units of `read`, the tensors that it may read."""

    def __init__(self, module: nn.Module, read: Read, windows: Windows):
        super().__init__(module)
        self._read = read
        self._units = tuple(dict.fromkeys(unit for unit, _ in read))
        self._windows = windows

    def __call__(self, *arguments: object, **keywords: object) -> object:
        # Thousands of calls in a step find their windows open and the hooks in place: they need nothing of the engine.
        windows = self._windows
        running = windows.threads.running
        hooks = innermost_saved_tensor_hooks(True)
        if (
            not self._units
            or hooks is None
            or hooks[0] is not running.pack
            or not running.units.issuperset(self._units)
            or windows.final.has_landed
            or running.compute is not windows.streams.compute
            or is_traced()
            or compiles_frames() is not None
        ):
            return super().__call__(*arguments, **keywords)
        if windows.prefetcher.prefetch_waits:
            windows.prefetcher.try_again()
        # `_forward`, without the call.
        is_found = self._replaced is not None or type(self._module) is self._kind
        return (self._found if is_found else self._forward)(*arguments, **keywords)

    def run(self, *arguments: object, **keywords: object) -> object:
        return self._windows.run(self._module, self._read, self._units, self._forward, arguments, keywords)


class _OnModules:
    """Hooks of windows on the modules of a model: `calls`, and by unit the dictionaries that are `held`."""

    def __init__(self, cut: CutModel, slots: DeviceSlots, windows: Windows):
        read = {window.module: window.read for window in cut.windows} | dict.fromkeys(cut.around, ())
        hooked = [module for module in read if module is cut.model or has_hooks_around_forward(module)]
        with ExitStack() as undo:
            openers = [(module, lambda *_, module=module: windows.call_of(module)) for module in hooked]
            self.calls = ModuleContexts(openers, outermost=True)
            undo.callback(self.calls.remove)
            self._forwards: list[ForwardInWindows] = []
            for module, tensors in read.items():
                if type(module).forward is not nn.Module.forward:
                    self._forwards.append(ForwardInWindows(module, tensors, windows))
                    undo.callback(self._forwards[-1].remove)
            self._watched, self.held = watch_reads(cut.units, windows.read)
            self._state_dicts = [LeavesSlots(module, slots) for module in self._watched]
            undo.callback(lambda: [hook.remove() for hook in self._state_dicts])
            self._end_watch_of_contexts = watch_contexts(windows)
            undo.pop_all()

    def remove(self) -> None:
        """Gives modules their own forwards and plain dictionaries again."""
        self.calls.remove()
        for hook in (*self._forwards, *self._state_dicts):
            hook.remove()
        # These refer back to the windows: without them the device memory goes with its last reference.
        self._forwards.clear()
        self.held.clear()
        end_watch(self._watched)
        self._end_watch_of_contexts()


def _units_inside(cut: CutModel, module: nn.Module) -> tuple[frozenset[OffloadUnit], int]:
    """Returns the units with windows inside a module, its own among them, and how many are open at once."""
    inside = set(module.modules())
    units = frozenset(unit for window in cut.windows if window.module in inside for unit in window.units)
    return units, len(open_at_once(module, cut.windows))

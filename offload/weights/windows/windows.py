"""Opens windows on units: has them on the device, installed in their modules, while a forward needs them.

[Note: who opens a window]

- The forward of a module opens the windows of the tensors that it may read, and closes them when it ends.
- Code may also read a weight of a module that it does not call (see `held_tensors`). Then a window opens where the
  reader is: it stays open until the innermost forward that is running ends. So every module around units has a scope,
  which is its running forward. Hooks of the model itself, and of modules that have hooks when the mode attaches, run in
  a scope of that module's call.
- Where such a window would take a slot that the windows inside may need, the reader gets a copy, which counts as a use
  of the stand-in. Code that runs in backward, outside of any forward, gets a copy, too.
- Code that runs outside of forward and backward gets what the module holds: the host's tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from offload.errors import OUTSIDE_STEP
from offload.memory.device_slots import DeviceSlots
from offload.streams.device_work import Home
from offload.streams.registry import Streams
from offload.torch_private.block_buffers import arrived, leaving
from offload.torch_private.function_contexts import function_contexts, watch_contexts
from offload.torch_private.module_contexts import ModuleContexts, Opener, WrappedForward
from offload.torch_private.one_thread import OneThread
from offload.torch_private.running_microbatch import running_microbatch
from offload.torch_private.torch_internals import (
    AS_IT_IS,
    check_no_transform,
    compiles_frames,
    has_hooks_around_forward,
    is_in_backward,
    is_in_selective_checkpoint,
    is_traced,
    left_out_of_graphs,
    node_in_progress,
    sees_every_operation,
    unseen_by_selective_checkpoints,
)
from offload.weights.gradients.final import FinalGradients
from offload.weights.prefetching.prefetcher import Prefetcher
from offload.weights.units.partition import CutModel, open_at_once
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor
from offload.weights.windows.gradient_nodes import GradientSink
from offload.weights.windows.held_tensors import LeavesSlots, end_watch, watch_reads
from offload.weights.windows.kept_by_functions import name_kept_weights
from offload.weights.windows.leaving import copy_what_leaves
from offload.weights.windows.saved_weights import SavedWeights
from offload.weights.windows.scopes import Scope, ThreadForwards
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
        prefetcher: Prefetcher,
        saved: SavedWeights,
        streams: Streams,
        *,
        sink: GradientSink,
        final: FinalGradients,
    ):
        self._units, self._around = cut.units, set(cut.around)
        self._slots = slots
        self._prefetcher = prefetcher
        self._saved = saved
        self._streams = streams
        self._sink = sink
        self._final = final
        # `_in_forward`: in a forward outside of steps and inference.
        self._in_step = self._in_inference = self._in_forward = False
        # Units that had windows since it began.
        self._opened: dict[OffloadUnit, None] = {}
        self._threads, self._one_thread = ThreadForwards(), OneThread()
        read = {window.module: window.read for window in cut.windows} | dict.fromkeys(cut.around, ())
        hooked = [module for module in read if module is cut.model or has_hooks_around_forward(module)]
        with ExitStack() as undo:
            self._calls = ModuleContexts([(module, self._opener(module)) for module in hooked], outermost=True)
            undo.callback(self._calls.remove)
            self._forwards: list[WrappedForward] = []
            for module, tensors in read.items():
                # The forward of a scripted module is not an attribute of its class.
                if getattr(type(module), "forward", None) is not nn.Module.forward:
                    units = tuple(dict.fromkeys(unit for unit, _ in tensors))
                    runner = functools.partial(self._forward, module, tensors, units)
                    self._forwards.append(WrappedForward(module, runner))
                    undo.callback(self._forwards[-1].remove)
            self._watched = watch_reads(cut.units, self._read)
            self._state_dicts = [LeavesSlots(module, slots) for module in self._watched]
            undo.callback(lambda: [hook.remove() for hook in self._state_dicts])
            self._end_watch_of_contexts = watch_contexts(self)
            undo.pop_all()
        self._inside = functools.cache(functools.partial(_units_inside, cut))

    def begin_step(self) -> None:
        """Begins a step, in which windows keep gradients and units keep their slots."""
        self._in_step = True

    def end_step(self) -> None:
        """Ends the step: stand-ins are dropped, and scopes that an interrupt has left open are closed."""
        self._end()

    def begin_inference(self) -> None:
        """Begins a run of forwards without gradients, in which units keep their slots."""
        self._in_inference = True

    def end_inference(self) -> None:
        """Ends it as a step ends."""
        self._end()

    def _end(self) -> None:
        self._calls.close_open()
        self._in_step = self._in_inference = False
        self._opened.clear()
        for unit in self._units:
            drop_stand_ins(unit)

    def remove(self) -> None:
        """Gives modules their own forwards and plain dictionaries again."""
        self._calls.remove()
        for forward in self._forwards:
            forward.remove()
        for hook in self._state_dicts:
            hook.remove()
        for unit in self._units:
            forget_stand_ins(unit)
        # These refer back to this object: without them the device memory goes with its last reference.
        self._forwards.clear()
        end_watch(self._watched)
        self._end_watch_of_contexts()

    def _opener(self, module: nn.Module) -> Opener:
        return lambda arguments, keywords: self._scope(Scope(module))

    def _forward(
        self,
        module: nn.Module,
        read: Read,
        units: Sequence[OffloadUnit],
        forward: Callable,
        arguments: tuple,
        keywords: dict,
    ) -> object:
        """Runs the forward of a module that may read these tensors, which are those of `units`."""
        running = self._threads.running
        if not (
            running.scopes
            and running.units.issuperset(units)
            and (self._in_step or self._in_inference or self._in_forward)
            and self._saved.are_innermost
            and not is_in_selective_checkpoint()
            and self._prefetcher.are_read_here(units)
        ):
            return self._forward_in_windows(Scope(module), read, units, forward, arguments, keywords)
        # Forwards that are running do all that windows of its own would do, as a rule where units are blocks.
        if self._final.counting:
            for unit, tensor in read:
                self._final.use(unit, tensor)
        if self._prefetcher.is_put_off:
            self._prefetcher.try_again()
        scope, since = Scope(module), len(function_contexts.made)
        running.scopes.append(scope)
        try:
            result = forward(*arguments, **keywords)
            # Code inside may have read other weights.
            return self._finish(scope, since, result) if scope.units else result
        finally:
            running.end(scope)
            if scope.units or scope.copies:
                self._close(scope)
                scope.check_copies()

    def _forward_in_windows(
        self,
        scope: Scope,
        read: Read,
        units: Sequence[OffloadUnit],
        forward: Callable,
        arguments: tuple,
        keywords: dict,
    ) -> object:
        check_no_transform()
        with AS_IT_IS if self._keeps_units else self._kept(), self._scope(scope):
            for unit in units:
                self._open(unit, scope)
            for unit, tensor in read if self._final.counting else ():
                self._final.use(unit, tensor)
            since = function_contexts.begin()
            try:
                with self._saved.hooks():
                    result = self._finish(scope, since, forward(*arguments, **keywords))
            finally:
                function_contexts.end()
            self._saved.check_selective_checkpoints()
            return result

    @contextmanager
    def _scope(self, scope: Scope) -> Iterator[None]:
        """Surrounds a call of the scope's module; the windows that are opened in it close at its end."""
        running = self._threads.running
        with self._outermost() if not running.scopes else AS_IT_IS:
            self._sink.begin_forward()
            running.scopes.append(scope)
            try:
                yield
            finally:
                running.end(scope)
                with unseen_by_selective_checkpoints():
                    self._close(scope)
        if scope.copies:
            with unseen_by_selective_checkpoints():
                scope.check_copies()

    @contextmanager
    def _outermost(self) -> Iterator[None]:
        """Surrounds the outermost forward of a thread."""
        with self._one_thread.turn(), self._streams.device_work(self._homes):
            yield

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Surrounds an outermost forward, in which units keep their slots. Outside of it weights may change."""
        with unseen_by_selective_checkpoints():
            self._prefetcher.begin_forward()
        self._in_forward = True
        try:
            yield
        except Exception:
            raise
        except BaseException:
            # torch calls no hook after a KeyboardInterrupt.
            self._calls.close_open()
            raise
        finally:
            self._in_forward = False
            self._let_host_write()

    @property
    def _keeps_units(self) -> bool:
        return self._in_step or self._in_inference or self._in_forward

    def _let_host_write(self) -> None:
        with unseen_by_selective_checkpoints():
            self._prefetcher.let_host_write()
        for unit in [unit for unit in self._opened if not unit.open_windows]:
            drop_stand_ins(unit)
            del self._opened[unit]

    def _homes(self) -> list[Home]:
        homes: list[Home] = []
        for unit in self._units:
            homes.append((unit.weights.bytes, unit.name))
            apart = (tensor for tensor in unit.tensors if tensor.spans is not None or not tensor.is_home)
            homes += [(part.data, tensor.name) for tensor in apart for part in tensor.parts_of(tensor.host)]
        return homes

    def _open(self, unit: OffloadUnit, scope: Scope) -> None:
        if torch.is_grad_enabled() and not self._in_step and unit.trained:
            raise RuntimeError(OUTSIDE_STEP)
        check_no_transform(even_vmap=True)
        self._saved.check_selective_checkpoints()
        with unseen_by_selective_checkpoints():
            slot = self._prefetcher.fetch(unit, in_window=True)
            self._threads.running.opened(unit, scope)
            self._opened[unit] = None
            if unit.open_windows == 1:
                install_stand_ins(unit, slot, self._sink, self._units)
                arrived(unit.buffer_places)

    def _close(self, scope: Scope) -> None:
        twice: list[UnitTensor] = []
        for unit in scope.units:
            if not self._prefetcher.close_window(unit):
                continue
            leaving(unit.buffer_places)
            changed = remove_stand_ins(unit, self._prefetcher.slot_of(unit))
            if changed and is_in_backward():
                twice += [tensor for tensor in changed if differs_from_home(tensor)]
                changed = [tensor for tensor in changed if tensor not in twice]
            if changed:
                self._prefetcher.write_home(unit, changed)
            self._prefetcher.no_window_left(unit)
        if (scope.units or scope.copies) and not self._keeps_units:
            # A hook around the outermost forward has read weights.
            self._let_host_write()
        if twice:
            raise RuntimeError(
                f"{twice[0].name} was changed by a forward, and once more as backward computes that forward again:"
                " change it outside of the block, or leave its block out of what is computed again"
            )

    def _finish(self, scope: Scope, since: int, result: object) -> object:
        """Replaces tensors of slots that leave the last window on their units.

        `since` is the place of the first context of an autograd function that the forward may have made.
        """
        if made := function_contexts.made[since:]:
            # A function may also keep a weight that a module around this one gave it.
            name_kept_weights(made, self._threads.running.units, self._saved)
        closing = [unit for unit in scope.units if unit.open_windows == 1]
        if not closing:
            return result
        with unseen_by_selective_checkpoints():
            return copy_what_leaves(result, self._slots, closing=closing.__contains__)

    def _read(self, unit: OffloadUnit, tensor: UnitTensor) -> torch.Tensor | None:
        """Answers the read of a tensor; see `OnRead`."""
        # What `left_out_of_graphs` does, without its call. As a rule the forward that reads has a window on the unit.
        if (
            is_traced()
            or compiles_frames() is not None
            or unit not in self._threads.running.units
            or sees_every_operation()
        ):
            return self._answered(unit, tensor)
        if self._final.counting:
            self._final.use(unit, tensor)
        return None

    @left_out_of_graphs
    def _answered(self, unit: OffloadUnit, tensor: UnitTensor) -> torch.Tensor | None:
        if sees_every_operation():
            check_no_transform()
            self._saved.check_selective_checkpoints()
        running = self._threads.running
        if not running.scopes:
            if not self._is_device_work_of_backward():
                return None
            with unseen_by_selective_checkpoints():
                return self._copy(unit, tensor)
        if unit not in running.units:
            innermost = running.scopes[-1]
            if not self._has_room(unit, innermost):
                with unseen_by_selective_checkpoints():
                    return self._copy_for(innermost, unit, tensor)
            self._open(unit, innermost)
        self._final.use(unit, tensor)
        return None

    def _has_room(self, unit: OffloadUnit, scope: Scope) -> bool:
        """Tells whether a window on `unit` leaves slots for the windows inside the scope's module."""
        if running_microbatch() is not None and scope.module in self._around:
            # Others run before this forward ends, and a window has the stand-ins of one.
            return False
        inside, at_once = self._inside(scope.module)
        in_use = {unit}.union(other for other in self._units if other.open_windows)
        return len(in_use) + (0 if inside <= in_use else at_once) <= len(self._slots.all)

    def _copy_for(self, scope: Scope, unit: OffloadUnit, tensor: UnitTensor) -> torch.Tensor:
        if tensor not in scope.copies:
            scope.keep(tensor, self._copy(unit, tensor))
        return scope.copies[tensor]

    def _copy(self, unit: OffloadUnit, tensor: UnitTensor) -> torch.Tensor:
        check_no_transform(even_vmap=True)
        self._final.use(unit, tensor)
        slot = self._prefetcher.fetch(unit, in_window=True)
        self._opened[unit] = None
        try:
            return copy_of_stand_in(unit, tensor, slot, self._sink)
        finally:
            if self._prefetcher.close_window(unit):
                self._prefetcher.no_window_left(unit)

    def _is_device_work_of_backward(self) -> bool:
        if not (self._in_step and is_in_backward()):
            return False
        # Hooks of a parameter get its gradient in host memory, and run in the node that accumulates it there.
        variable = getattr(node_in_progress(), "variable", None)
        return not any(variable is tensor.host for unit in self._units for tensor in unit.tensors)


def _units_inside(cut: CutModel, module: nn.Module) -> tuple[frozenset[OffloadUnit], int]:
    """Returns the units with windows inside a module, its own among them, and how many are open at once."""
    inside = set(module.modules())
    units = frozenset(unit for window in cut.windows if window.module in inside for unit in window.units)
    return units, len(open_at_once(module, cut.windows))

"""The contract of an offload mode: `Mode` describes it, `attach` takes a model over, `Attached` is the model under it.

The default of every method is the behaviour of a resident model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.files.file_filler import Spans
from offload.knobs import check_knobs
from offload.microbatches.layer_major import one_after_another
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import StateFormat
from offload.sharing.sharers import NO_SHARERS, Sharers
from offload.speculation.trials import Speculation
from offload.streams.registry import Streams
from offload.streams.transfer import Counters
from offload.weights.footprint import Footprint
from offload.weights.units.partition import cut
from offload.weights.units.placement import DevicePlacement, UnfilledTensors

_mode_of: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@contextmanager
def attaching(model: nn.Module, mode: object, streams: object) -> Iterator[Callable[[], None]]:
    """Surrounds what attaches `mode` to `model`: its modules have a mode from then on, those inside it too.

    Gives the function that forgets this, as an exception in the block does. Raises TypeError in one line for a device
    in place of its streams, and RuntimeError, noting nothing, where one of the modules has a mode already: because it,
    a module around it or one inside it was attached before.
    """
    if isinstance(streams, (str, torch.device)):
        raise TypeError(f"attach to {streams!r}: give the streams of a device, as offload.acquire({streams!r}) returns")
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if module in _mode_of:
            raise RuntimeError(
                f"{name or type(module).__name__} is attached already, to the mode {_mode_of[module]}: detach that"
                " mode before you attach another"
            )
    # A mode is known by the file that it is in.
    _mode_of.update(dict.fromkeys(modules.values(), type(mode).__module__.rpartition(".")[2]))

    def release() -> None:
        for module in modules.values():
            _mode_of.pop(module, None)

    try:
        yield release
    except BaseException:
        release()
        raise


# A group of parameters of an optimizer, with its hyper-parameters.
Group = dict[str, Any]


class OwnOptimizer(Optimizer):
    """An optimizer in which a system clips and updates in its own way, in the place of a run's `HostAdamW`.

    A schedule changes its learning rate `lr`. It has no parameters, which the system may have replaced. `update(lr,
    measure)` does what `step` promises.
    """

    device_share = 0

    def __init__(self, lr: float, update: Callable[[float, bool], float | None]):
        super().__init__([nn.Parameter(torch.empty(0))], {"lr": lr})
        self._update = update

    def step(self, measure: bool = False) -> float | None:
        """Clips, updates and clears the gradients, with the learning rate of now.

        `measure`: the norm of the gradients before clipping is wanted, though it may take a pass over host memory.
        Returns it as a float where the system knows it.
        """
        return self._update(self.param_groups[0]["lr"], measure)

    def finish(self) -> None:
        """Does nothing: updates end in `step`, or when the system waits for them before their next use."""


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """Facts of a run that a mode needs: they are no knobs, and the same for `footprint` and `attach`.

    Attributes:
        sharers: the processes that attach the same model at the same time, each to a device of its own. The weights
            that stream then have one home, which they share; each has its own copy of the rest. The values of shared
            parameters are given to them once, by any one of the sharers, after `attach` has returned.
        spans: where parameters are in files, a span for each of their plain tensors. With the knob `source=mapped` a
            mode reads them from there in every step, and they take no host memory.
        release_gradients: gradients of what streams go to updates inside backward, and to no `.grad`. They take no host
            memory but that of a ring, through which they pass. It needs `overlap` with `early` before the first step,
            and steps that make their gradients in one `accumulate`, of one microbatch or layer-major. Whatever else
            needs such a gradient raises RuntimeError: hooks, gradients that are there already, sparse ones, and those
            that are not final when they land (NotFinalError).
        state_format: of the states of the optimizer that will be given to `overlap`. Where there are sharers, the
            memory of these states is made beside the rest of `attach`, and what follows it.
    """

    sharers: Sharers = NO_SHARERS
    spans: Spans | None = None
    release_gradients: bool = False
    state_format: StateFormat | None = None


NO_OPTIONS = AttachOptions()


@dataclass(kw_only=True, eq=False)
class Mode:
    """Decides where weights and activations live and when they move. It describes; `attach` does.

    A mode is a dataclass whose fields are its knobs (see `offload.knobs`), and has no other state: it may be attached
    to several models. Modes that stream weights derive from `WeightMode`, those that move activations from
    `ActivationMode`.

    Attributes:
        foreign: another system does the work, whose memory and copies are neither planned nor counted.
        owns_update: the mode brings an optimizer (`Attached.own_optimizer`); else the run's own updates.
        lacks: of "checkpoints", "evaluation", "clipping" and "training", what it cannot do; a run goes without, and
            notes it. Without "training" a step is a forward and its loss.
        notes: the differences between this run and the one that was asked for, a line each; a comparison shows them.
        recomputes: True for a mode that computes blocks again in backward by itself.
    """

    foreign: ClassVar[bool] = False
    owns_update: ClassVar[bool] = False
    lacks: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_knobs(self)
        self.check()

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def recomputes(self) -> bool:
        return False

    def check(self) -> None:
        """Raises KnobError for knobs that contradict each other. Each by itself has been checked before."""

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError, in one line, for a device on which the mode cannot run."""

    def footprint(self, model: nn.Module, recompute: bool = False, options: AttachOptions = NO_OPTIONS) -> Footprint:
        """Returns the bytes that `attach` will take and a step will move; touches nothing.

        `recompute`: each block's activations are computed again in backward. Raises KnobError for a knob that does not
        fit the model.
        """
        return Footprint.of(cut(model, []), slots=0, recompute=recompute)

    def attach(self, model: nn.Module, streams: Streams, options: AttachOptions = NO_OPTIONS) -> Attached:
        """Takes `model` over and moves it to where it belongs, here to the device of `streams`.

        Meta parameters and buffers become memory for the caller to fill: until then, steps and forwards raise
        RuntimeError. Raises KnobError as `footprint` does, and RuntimeError when a module of this model has a mode.
        After an exception the model is as it was found.
        """
        return Attached(self, model, streams, options)


class Activations:
    """The half of an attached model that moves activations; here they stay where they are made."""

    def step(self) -> AbstractContextManager:
        """Surrounds a step, inside the step of the weights."""
        return nullcontext()

    def counters(self) -> Counters:
        """Returns the counters of the activations, without those of the weights."""
        return Counters()

    def remove(self) -> None:
        """Takes its hooks off the model, whose weights have not been given back."""

    def close(self) -> None:
        """Gives its memory back; the weights have been given back."""


class Attached:
    """A model under a mode, from `Mode.attach` to `detach`, and `activations`, the half that moves these.

    A subclass has the weights elsewhere. It overrides the private methods, and of the others those that it does
    differently from a resident model.

    Attributes:
        model: the model.
        shared_parameters: the parameters whose homes are shared with other processes.
    """

    shared_parameters: frozenset[nn.Parameter] = frozenset()

    def __init__(self, mode: Mode, model: nn.Module, streams: Streams, options: AttachOptions):
        self.model = model
        self.activations = Activations()
        self._in_step = self._in_inference = False
        self._unfilled = UnfilledTensors()
        with attaching(model, mode, streams) as self._forget_mode:
            self._unfilled.watch(model, self._take(mode, streams, options))

    def detach(self) -> None:
        """Gives the model back as it was found. Raises RuntimeError inside a step, and after an earlier call.

        An error of an update beside the step that no call has raised yet is raised when the model is given back.
        """
        self._check_attached()
        if self._in_step:
            raise RuntimeError("detach inside a step: close the step first")
        if self._in_inference:
            raise RuntimeError("detach inside attached.inference(): end it first")
        self.activations.remove()
        try:
            self._give_back()
        finally:
            self._unfilled.close()
            self._forget_mode()
            self.activations.close()
            self.model = None

    @contextmanager
    def step(self, norms: bool = False) -> Iterator[None]:
        """Surrounds forward and backward of one step; afterwards gradients can be read where the mode keeps them.

        `norms`: the norms of the gradients will be asked for (`gradient_norms`). Activations may still be on their way
        at the end; the device's next computation is queued behind them. Raises RuntimeError when a step is open
        already, and while a tensor that was on the meta device has not been filled.
        """
        self._check_attached()
        if self._in_step:
            raise RuntimeError("a step is open already: close it before the next")
        if self._in_inference:
            where = "inside attached.inference(), where weights stay as they are"
            raise RuntimeError(f"a step {where}: end it before the step")
        self._unfilled.check_step()
        with self._around_step(norms), self.activations.step():
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = False

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Surrounds forwards without gradients, as for samples and evaluations: gradients are off inside.

        The caller changes no weight meanwhile. A mode that streams weights then keeps what is on the device from one
        forward to the next, and fetches what the next uses first while this one ends. Inside a step, and inside itself,
        it turns off gradients and does nothing more; no step begins inside it. Raises RuntimeError while a tensor that
        was on the meta device has not been filled, and, in a mode that streams weights, for a parameter whose version
        counter shows a change, or that was moved or replaced by one that cannot be streamed.
        """
        self._check_attached()
        self._unfilled.check_step()
        with torch.no_grad():
            if self._in_step or self._in_inference:
                yield
                return
            with self._around_inference():
                self._in_inference = True
                try:
                    yield
                finally:
                    self._in_inference = False

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Computes every loss, a scalar, and the gradients of all, inside a step. Returns the losses, detached."""
        return one_after_another(losses)

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        """Returns the L2 norms that the step took of gradients on their way off the device: float32 scalars there."""
        return {}

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        """Returns the parameters whose gradients of the last step are sums over the sharers already.

        Every sharer sees the whole sums once all have ended the step.
        """
        return frozenset()

    def own_optimizer(self, groups: list[Group], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        """Makes the optimizer of a mode with `owns_update`, once the parameters are filled.

        `groups` are those of AdamW, with all hyper-parameters; the mode may keep and change them. `microbatches` is the
        number of losses of each step. Raises RuntimeError in a mode without one.
        """
        raise RuntimeError("this mode has no optimizer of its own: the run's own updates")

    def overlap(
        self, optimizer: HostAdamW, early: bool, device_share: int = 0, speculation: Speculation | None = None
    ) -> None:
        """Hides the updates of `optimizer` behind the step, where the mode has weights on the host.

        `early`: updates may begin inside backward; in these gradients count in full, so `step` refuses another scale
        than 1, which would reach the rest alone. `device_share`: bytes of optimizer states that live on the device.
        `speculation`: where not `early`, updates begin inside backward all the same, and are undone if `step` has
        another scale than 1, or `skip` is called.

        Where processes share weights, `optimizer`, which has no states yet, updates this process's slices of them, with
        shared states. The caller sums the gradients of the sharers, but for those of `summed_parameters`.
        """

    def place_states(self, nbytes: int) -> None:
        """Keeps optimizer states of `nbytes` on the device from now on, which the mode chooses; between steps."""

    def counters(self) -> Counters:
        """Returns the totals since `attach`, of weights and activations together."""
        self._check_attached()
        return self._counters() + self.activations.counters()

    def _take(self, mode: Mode, streams: Streams, options: AttachOptions) -> Collection[Tensor]:
        """Moves the weights to where they belong, or leaves them where they are with an exception.

        Returns those of the meta device that have their values for good.
        """
        self._placement = DevicePlacement(cut(self.model, []).resident, streams.device)
        return ()

    def _around_step(self, norms: bool) -> AbstractContextManager:
        return nullcontext()

    def _around_inference(self) -> AbstractContextManager:
        return nullcontext()

    def _give_back(self) -> None:
        self._placement.restore()

    def _counters(self) -> Counters:
        """Returns those of the weights."""
        return Counters()

    def _check_attached(self) -> None:
        if self.model is None:
            raise RuntimeError("this model was given back by detach: attach the mode to it again")

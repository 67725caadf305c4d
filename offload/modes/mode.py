"""The contract of an offload mode, with the behaviour of a resident model as the default of every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.errors import NOT_ATTACHED
from offload.files.file_filler import Spans
from offload.knobs import check_knobs
from offload.microbatches.layer_major import one_after_another
from offload.optimizer.adamw import HostAdamW
from offload.sharing.sharers import NO_SHARERS, Sharers
from offload.speculation.trials import Speculation
from offload.streams.counters import Counters
from offload.streams.registry import Streams
from offload.torch_private.attachment import Attachment, attaching
from offload.weights.footprint import Footprint
from offload.weights.gradients.updates import Updates
from offload.weights.units.partition import cut
from offload.weights.units.placement import DevicePlacement
from offload.weights.units.unfilled import UnfilledTensors

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


@dataclass(kw_only=True, eq=False)
class Mode:
    """Decides where weights and activations live and when they move. One object serves one model at a time.

    A mode is a dataclass whose fields are its knobs (see `offload.knobs`). It overrides what it does
    differently from a resident model, whose parameters, gradients and buffers stay on the device and whose steps move
    nothing. Modes that stream weights derive from `WeightMode`, those that move activations from `ActivationMode`.

    Attributes:
        foreign: another system does the work, whose memory and copies are neither planned nor counted.
        lacks: of "checkpoints", "evaluation", "clipping" and "training", what it cannot do; a run goes without, and
            notes it. Without "training" a step is a forward and its loss.
    """

    foreign: ClassVar[bool] = False
    lacks: ClassVar[frozenset[str]] = frozenset()

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

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError, in one line, for a device on which the mode cannot run."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The differences between this run and the one that was asked for, a line each; a comparison shows them."""
        return ()

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        """Returns the bytes that `attach` will take and a step will move; touches nothing.

        `recompute`: each block's activations are computed again in backward. Raises KnobError for a knob that does not
        fit the model.
        """
        return Footprint.of(cut(model, []), slots=0, recompute=recompute)

    def map_weights(self, spans: Spans) -> None:
        """Tells where parameters are in files, a span for each of their plain tensors; before `footprint` and `attach`.

        With the knob `source=mapped` a mode reads them from there in every step, and they take no host memory. Here
        they stay on the device.
        """

    def why_gradients_stay(self, model: nn.Module) -> str | None:
        """Returns in words why `release_gradients` cannot be asked for with `model`; None if it can."""
        return "no weights stream, so no gradients go to the host"

    def release_gradients(self, released: bool = True) -> None:
        """Makes gradients of what streams go to updates inside backward, and to no `.grad`.

        Call it before `footprint` and `attach`. Gradients take no host memory but that of a ring, through which they
        pass. It needs `overlap` with `early` before the first step, and steps that make their gradients in one
        `accumulate`, of one microbatch or layer-major. Whatever else needs such a gradient raises RuntimeError: hooks,
        gradients that are there already, sparse ones, and those that are not final when they land (NotFinalError).
        Raises RuntimeError while a model is attached.
        """

    @property
    def releases_gradients(self) -> bool:
        """True if `release_gradients` was asked for."""
        return False

    def use_updates(self, updates: Updates) -> None:
        """Calls `updates` at the points of a step, where the mode has weights on the host; after `attach`."""

    def expect_sharers(self, count: int) -> None:
        """Tells how many processes of a host will attach to the model together (see `attach`); before `footprint`."""

    def attach(self, model: nn.Module, streams: Streams, sharers: Sharers = NO_SHARERS) -> None:
        """Takes `model` over and moves it to where it belongs, here to the device of `streams`.

        `sharers`: the processes that attach the same model at the same time, each to a device of its own. The weights
        that stream then have one home, which they share; each has its own copy of the rest. The values of shared
        parameters are given to them once, by any one of the sharers, after `attach` has returned.

        Meta parameters and buffers become memory for the caller to fill: until then, steps and forwards raise
        RuntimeError. Raises KnobError as `footprint` does, RuntimeError when this mode has a model already, or a module
        of this model has a mode. After an exception the model is as it was found.
        """
        if self._placement is not None:
            raise RuntimeError("this mode has a model already: detach it, or make a second mode")
        with attaching(model, self, streams) as self._attachment:
            self._placement = DevicePlacement(cut(model, []).resident, streams.device)
            self._unfilled.watch(model)

    def detach(self) -> None:
        """Gives the model back as it was found. Raises RuntimeError inside a step, and where there is none.

        An error of an update beside the step that no call has raised yet is raised when the model is given back.
        """
        if self._placement is None:
            raise RuntimeError(NOT_ATTACHED)
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
        """Computes every loss, a scalar, and the gradients of all, inside a step. Returns the losses, detached."""
        return one_after_another(losses)

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        """Returns the L2 norms that the step took of gradients on their way off the device: float32 scalars there."""
        return {}

    @property
    def owns_update(self) -> bool:
        """True where the mode brings an optimizer (`own_optimizer`), and False where the run's own updates."""
        return False

    def own_optimizer(self, groups: list[Group], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        """Makes the optimizer of a mode with `owns_update`, once the parameters are filled.

        `groups` are those of AdamW, with all hyper-parameters; the mode may keep and change them. `microbatches` is the
        number of losses of each step. Raises RuntimeError in a mode without one.
        """
        raise RuntimeError(f"{type(self).__name__} has no optimizer of its own: the run's own updates")

    def overlap(
        self, optimizer: HostAdamW, early: bool, device_share: int = 0, speculation: Speculation | None = None
    ) -> None:
        """Hides the updates of `optimizer` behind the step, where the mode has weights on the host.

        `early`: updates may begin inside backward; in these gradients count in full, so `step` refuses another scale
        than 1, which would reach the rest alone. `device_share`: bytes of optimizer states that live on the device.
        `speculation`: where not `early`, updates begin inside backward all the same, and are undone if `step` has
        another scale than 1, or `skip` is called.
        """

    def divide(self, optimizer: HostAdamW) -> None:
        """Limits `optimizer` to updates of this process's slices of what sharers have in common, with shared states.

        Call it before `overlap`, and before the optimizer has states. The caller sums the gradients of the sharers, but
        for those of `summed_parameters`. Without sharers it does nothing.
        """

    def shared_parameters(self) -> frozenset[nn.Parameter]:
        """Returns the parameters whose homes are shared."""
        return frozenset()

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        """Returns the parameters whose gradients of the last step are sums over the sharers already.

        Every sharer sees the whole sums once all have ended the step.
        """
        return frozenset()

    def place_states(self, nbytes: int) -> None:
        """Keeps optimizer states of `nbytes` on the device from now on, which the mode chooses; between steps."""

    def counters(self) -> Counters:
        """Returns the totals since `attach`."""
        return Counters()

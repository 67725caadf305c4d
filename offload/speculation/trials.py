"""Updates before it is known whether their gradients count in full, which are undone exactly where they do not.

With clipping no update may begin before the norm of all gradients is known, after backward. But most steps of most runs
are not clipped: their gradients count once, as without clipping. So updates inside backward take that for granted,
with a log each (`undo_log`). When the norm is known, they are kept, or undone bit for bit and made again. Speculative
execution with roll-back is that of processors, and of Jefferson (1985), "Virtual time". docs/exact_clipping.md has the
proof and the costs.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.claims import Claim, operands_of
from offload.optimizer.kernels import torch_threads
from offload.optimizer.native_kernel import NativeLibrary
from offload.optimizer.states import some_elements, version_and_address
from offload.speculation.undo_log import ReversibleUpdate, UndoArena, UndoLog
from offload.streams.transfer import Counters

# With speculate="auto" a step speculates if this many steps before it were neither clipped nor taken back.
QUIET_STEPS = 2


@dataclass(frozen=True)
class Speculation:
    """Allows updates that may have to be undone: given to `Attached.overlap`.

    `limit`: gradients whose norm is above it, or not finite, do not count in full. `undo_bytes`: host memory for the
    logs.
    """

    limit: float
    undo_bytes: int


class Mark(NamedTuple):
    """Shows whether a tensor was written or given other data.

    Autograd's counter rises with most writes, but not with those through `.data` or NumPy, nor with a GradScaler's:
    some elements show whether all were changed.
    """

    version: int
    address: int
    elements: bytes


def mark_of(tensor: Tensor, parts: Iterable[range]) -> Mark:
    """Returns the mark of a tensor on the host, of elements in `parts` of its flat form; others may change."""
    return Mark(*version_and_address(tensor), some_elements(tensor, parts))


@dataclass(frozen=True, eq=False)
class Trial:
    """A claimed update that was made and can be undone.

    `logs` are those of the ranges of elements that were updated. Before it the state had the tensors `held` and had
    counted `step` updates.
    """

    claim: Claim
    logs: Sequence[tuple[range, UndoLog]]
    held: frozenset[str]
    step: float
    # Of the parameter and of its gradient in `parts` of their flat forms, as the update leaves them.
    parts: Sequence[range]
    marks: tuple[Mark, Mark]

    @property
    def is_untouched(self) -> bool:
        """True if nobody seems to have changed the parameter or its gradient since the update."""
        return self.marks == (mark_of(self.claim.parameter, self.parts), mark_of(self.claim.gradient, self.parts))


@dataclass(frozen=True)
class Decision:
    """The end of a step's speculation: its gradients count `scale` times, and `claims` has what is to be updated.

    Without claims all trials are undone, and nothing is made in their place.
    """

    scale: float = 1.0
    claims: Mapping[Tensor, Claim] = field(default_factory=dict)

    @property
    def undoes_all(self) -> bool:
        """True where that is known without a look at the trials."""
        return self.scale != 1.0 or not self.claims

    def keeps(self, trial: Trial) -> bool:
        """Tells whether the trial is the update that is to be made."""
        new, old = self.claims.get(trial.claim.parameter), trial.claim
        return (
            new is not None
            and self.scale == 1.0
            and new.gradient is old.gradient
            and new.hyperparameters == old.hyperparameters
            and trial.is_untouched
        )


@dataclass(eq=False)
class Attempt:
    """Claimed updates that are tried one after the other, until there is a `decision` on them.

    The first `counted` trials are counted as undone.
    """

    claims: list[Claim]
    trials: list[Trial] = field(default_factory=list)
    decision: Decision | None = None
    counted: int = 0


class Trials:
    """Makes, keeps and undoes trials of `optimizer`, and decides by the steps before whether a step has any.

    The worker makes and settles them; the thread that makes the steps begins and ends these. Where `processes` share
    the parameters, each has trials of its own slices, and stops or takes back by itself. But all keep them or none:
    `scale` and `skip` follow from the norm of all gradients.
    """

    def __init__(self, optimizer: HostAdamW, library: NativeLibrary, speculation: Speculation, processes: int = 1):
        # True if trials may be made in this step: those made so far have not shown that they will be undone.
        self.goes_on = False
        self._optimizer = optimizer
        self._library = library
        self._limit = speculation.limit
        self._arena = UndoArena(speculation.undo_bytes, processes)
        self._squares = 0.0
        # For each of the last steps: True if it was not clipped and nothing was taken back in it.
        self._quiet: deque[bool] = deque(maxlen=QUIET_STEPS)
        self._was_taken_back = False
        self._made_parameters = self._undone_parameters = 0
        self._undo_ms = 0.0
        self._counting = threading.Lock()

    def begin_step(self) -> None:
        self._squares, self._was_taken_back = 0.0, False
        self.goes_on = self._optimizer.speculate == "on" or all(self._quiet)

    def take_back(self) -> None:
        """Notes that the trials of this step are undone, for another reason than its norm."""
        self.goes_on, self._was_taken_back = False, True
        self._quiet.append(False)

    def end_step(self, is_clipped: bool) -> None:
        """Notes that the step is over, whose gradients did not count in full if it `is_clipped`."""
        self.goes_on = False
        if not self._was_taken_back:
            self._quiet.append(not is_clipped)

    def make(self, attempt: Attempt) -> int:
        """Makes updates until the norm so far passes the limit, a log is full, or there is a decision on them.

        Returns the number of parameters in them.
        """
        for claim in attempt.claims:
            trial = self._try(claim) if self.goes_on and attempt.decision is None else None
            if trial is None:
                break
            attempt.trials.append(trial)
        self._count_undone(attempt)
        return sum(trial.claim.parameter.numel() for trial in attempt.trials)

    def decide(self, attempt: Attempt, decision: Decision) -> None:
        """Decides on an attempt, which `settle` then follows."""
        attempt.decision = decision
        self._count_undone(attempt)

    def settle(self, attempts: Iterable[Attempt]) -> int:
        """Does what was decided on each of them; returns the number of parameters in the updates that it makes."""
        return sum(map(self._settle, attempts))

    def counters(self) -> Counters:
        """Counts the parameters that were updated inside backward, and of these those that were undone."""
        return Counters(
            # The worker takes what undoes updates for updates.
            update_ms=-self._undo_ms,
            speculated_parameters=self._made_parameters,
            undone_parameters=self._undone_parameters,
            undo_ms=self._undo_ms,
        )

    def _settle(self, attempt: Attempt) -> int:
        decision, start = attempt.decision, perf_counter()
        kept = {trial.claim.parameter for trial in attempt.trials if decision.keeps(trial)}
        undone = [trial for trial in attempt.trials if trial.claim.parameter not in kept]
        if not decision.undoes_all:
            with self._counting:
                self._undone_parameters += sum(trial.claim.parameter.numel() for trial in undone)
        for trial in undone:
            self._undo(trial)
        for _ in attempt.trials:
            self._arena.give_back()
        # They refer to gradients.
        attempt.trials.clear()
        self._undo_ms += (perf_counter() - start) * 1e3 if undone else 0
        parameters = [claim.parameter for claim in attempt.claims if claim.parameter not in kept]
        claims = [decision.claims[parameter] for parameter in parameters if parameter in decision.claims]
        if claims:
            self._optimizer.apply(claims, decision.scale)
        return sum(claim.parameter.numel() for claim in claims)

    def _count_undone(self, attempt: Attempt) -> None:
        """Counts trials that will all be undone when that is decided: in the step which undoes them."""
        with self._counting:
            if attempt.decision is not None and attempt.decision.undoes_all:
                self._undone_parameters += sum(t.claim.parameter.numel() for t in attempt.trials[attempt.counted :])
                attempt.counted = len(attempt.trials)

    @torch.no_grad()
    def _try(self, claim: Claim) -> Trial | None:
        optimizer, parameter, states = self._optimizer, claim.parameter, self._optimizer.states
        parts = states.parts(parameter)
        logs = self._arena.take(list(map(len, parts))) if self._can_undo(claim) else None
        if logs is None:
            self.goes_on = False
            return None
        state = states.tensors[parameter]
        held, step = frozenset(state), state["step"].item() if "step" in state else 0.0
        begun: list[tuple[range, UndoLog]] = []
        # Noted before anything is read. The update itself raises the parameter's counter by one.
        version, gradient_mark = parameter._version, mark_of(claim.gradient, parts)
        (state,), is_complete = states.begin([parameter]), True
        # `.data` has a version counter of its own: the kernel's writes are no changes by somebody else.
        operands = operands_of(claim, state, parameter.data, claim.gradient)
        kernel = ReversibleUpdate(self._library, optimizer.threads)
        with torch_threads(optimizer.threads):
            for part, log in zip(parts, logs, strict=True):
                # Logs behind the one that is full are not written, and cannot be undone.
                begun.append((part, log))
                squares, is_complete = kernel.update(operands.part(part), state["step"], claim.hyperparameters, log)
                self._squares += squares
                if not is_complete:
                    break
        # A sum that is not a number passes no limit, and stops as well.
        if not math.sqrt(self._squares) <= self._limit or self._squares == math.inf:
            self.goes_on = False
        marks = mark_of(parameter, parts)._replace(version=version + 1), gradient_mark
        trial = Trial(claim, begun, held, step, parts, marks)
        if is_complete:
            self._made_parameters += parameter.numel()
            return trial
        self.goes_on = False
        self._undo(trial)
        self._arena.give_back()
        return None

    @torch.no_grad()
    def _undo(self, trial: Trial) -> None:
        optimizer, claim, states = self._optimizer, trial.claim, self._optimizer.states
        parameter = claim.parameter
        if not trial.is_untouched:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)}, or its gradient, was changed between backward and"
                " optimizer.step(), after an update that has to be undone: call optimizer.finish() before the"
                " change, or give the optimizer speculate=off"
            )
        state = states.tensors[parameter]
        operands = operands_of(claim, state, parameter.data, claim.gradient)
        kernel = ReversibleUpdate(self._library, optimizer.threads)
        for part, log in trial.logs:
            kernel.undo(operands.part(part), state["step"], claim.hyperparameters, log)
        # The old count is written, not subtracted: from 2^24 on a float32 counts no further.
        states.begin([parameter])[0]["step"].fill_(trial.step)
        # A master that this update has made would later overwrite what others write to the weight until then.
        for name in state.keys() - trial.held:
            del state[name]
        if not state:
            del states.tensors[parameter]

    def _can_undo(self, claim: Claim) -> bool:
        """Tells whether an update can be undone: of a parameter on the host, contiguous, its state beside it."""
        parameter = claim.parameter
        on_host = parameter.device.type == "cpu" and not self._optimizer.states.is_placed(parameter)
        dtypes = {parameter.dtype, claim.gradient.dtype}
        return on_host and parameter.is_contiguous() and dtypes <= {torch.float32, torch.bfloat16}

"""AdamW for parameters on the host: each may be updated by itself, as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import unwrap
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.knobs import KnobError, bytes_or, one_of
from offload.memory.limits import usable_cores
from offload.optimizer.claims import Claim, State, in_two, update_together
from offload.optimizer.formats import StateFormat, noise_seed, state_bytes
from offload.optimizer.kernel_choice import update_on
from offload.optimizer.kernels import UpdateKernel, torch_threads
from offload.optimizer.native_kernel import begin_compiling
from offload.optimizer.state_dicts import (
    check_dtype,
    check_group,
    check_hyperparameters,
    decay_groups,
    hyperparameters_of,
    loads_states,
    states_as_torchs,
    states_to_load,
)
from offload.optimizer.states import States
from offload.torch_private.torch_internals import left_out_of_graphs

# The system could not start more: the process would end without a message.
MAX_THREADS = 1024
# What an error says of updates that cannot be taken back.
BEGUN = "updates of this step have begun inside backward, without it: let updates begin after backward (early=False)"


class Deferral(Protocol):
    """Makes some of an optimizer's updates beside the caller.

    `offer_all` claims and starts them. `skip` takes back those of this step that it can. `finish` waits, and takes back
    those of which it is not decided whether they count. `follow` is `HostAdamW.follow`.
    """

    def offer_all(self, scale: float) -> None: ...

    def skip(self) -> None: ...

    def finish(self) -> None: ...

    def follow(self, act: Callable[[Iterable[Tensor]], None]) -> set[Tensor]: ...


class Member(NamedTuple):
    """The number of a parameter's group, by position because loading replaces the groups, and the seed of its noise."""

    group: int
    seed: int


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with masters, in which each parameter may be updated as soon as its gradient is there.

    `step()` is that of any torch optimizer. Before it some may be updated already: a `claim` is taken where gradients
    land, and `apply` makes it then or later, on another thread, after a scheduler has changed the settings and
    `zero_grad` has dropped the gradient. Each parameter is claimed once a step, which `step` or `skip` ends. Updates of
    different parameters may be applied in any order.

    A bf16 or fp16 parameter is updated through a float32 master (Micikevicius et al. 2018), because without one an
    update below its resolution is lost; float32 parameters are updated in place. `allocate`, or the first update, makes
    a parameter's state (see `offload.optimizer.states`) from its value then. One that is written later counts as it is
    then (a bf16 one together with the remainder that it had, less than its last bit); but an fp16 one is overwritten by
    its master. A parameter without a gradient is left alone.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr, betas, eps, weight_decay: as torch.optim.AdamW; a group may have its own, and a scheduler may change them.
        decay_norms_and_biases: False splits each group in two, as `decay_groups` does.
        master: how the master of a bf16 parameter is held. "compact": as the 16 bits that the weight lacks of it.
            "stochastic": not at all; weights are rounded up or down at random, right on average.
        state_dtype: of the moments. "fp32", "bf16" for half the size, or "int8" for blocks of 256 numbers in 8 bits
            (`offload.optimizer.formats`). They are computed in float32 and then rounded.
        device_share: bytes of states ("10GiB") that a mode which overlaps the updates places on the device, or "auto"
            for as many as fit there. Without such a mode it has no effect.
        gradients: of weights that stream. "keep" leaves them in `.grad`, in host memory; "release" hands each to its
            update inside backward, so that it needs no memory of its own (see `AttachOptions`). "auto"
            releases them where nothing else needs them.
        threads: cores that update host parameters. None takes all but one, which launches the device's work, or all
            but three under a mode that begins updates inside backward (see `leave_cores`).
        speculate: "on" lets a mode that overlaps the updates begin them inside backward where gradients may still be
            clipped, and undo them exactly if they are (`offload.speculation`). "auto" does so while steps are
            not clipped, "off" never. No number depends on it.

    Raises KnobError for a setting out of range.
    """

    # Updates may run on a thread of their own, beside the step (`Attached.overlap`).
    overlaps = True
    begin_compiling = staticmethod(begin_compiling)
    # A GradScaler then leaves the gradients alone: updates that have begun would not see what it makes of them.
    _step_supports_amp_scaling = True
    planned_bytes = staticmethod(state_bytes)

    # torch's own import its compiler at their first call, which takes seconds.
    _add_group, _clear, _get_state, _load_state = (
        left_out_of_graphs(unwrap(method))
        for method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict)
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decay_norms_and_biases: bool = True,
        master: Literal["compact", "stochastic"] = "compact",
        state_dtype: Literal["fp32", "bf16", "int8"] = "fp32",
        device_share: str | int = 0,
        gradients: Literal["auto", "keep", "release"] = "auto",
        threads: int | None = None,
        speculate: Literal["auto", "on", "off"] = "auto",
    ):
        self.format = StateFormat(master, state_dtype)
        one_of("speculate", speculate, "auto", "on", "off")
        one_of("gradients", gradients, "auto", "keep", "release")
        if threads is not None and threads not in range(1, MAX_THREADS + 1):
            raise KnobError("threads", threads, f"must be at least 1 and at most {MAX_THREADS}, or null to choose")
        check_hyperparameters(lr, betas, eps, weight_decay)
        self.cores = usable_cores() if threads is None else None
        self.threads = threads or max(self.cores - 1, 1)
        self.device_share = bytes_or("auto", "device_share", device_share)
        self.speculate, self._all_decay = speculate, decay_norms_and_biases
        self._claimed: set[Tensor] = set()
        self.deferral: Deferral | None = None
        """`step` offers its updates to this first, which may end later; None: `step` makes all itself"""
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        self.states = States(self.format, self.state)
        if any(parameter.requires_grad and parameter.device.type == "cpu" for parameter in self._members):
            # Compiled now, and not in the first step.
            self.kernel_on(torch.device("cpu"))

    def kernel_on(self, device: torch.device) -> UpdateKernel:
        """Returns the kernel that updates states on `device`."""
        return update_on(device, self.threads, self.format)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, or the two of `decay_groups`. Raises ValueError, adding nothing, where `check_group` does."""
        count = len(self.param_groups)
        try:
            for group in [param_group] if self._all_decay else decay_groups([param_group]):
                self._add_group(group)
                check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[count:]
            raise
        groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        members = (Member(group, noise_seed(number)) for number, group in enumerate(groups))
        self._members = dict(zip(parameters, members, strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None, *, scale: float = 1.0) -> Tensor | None:
        """Updates every parameter that has a gradient and is not claimed yet, and ends the step.

        `closure` computes the loss first, which is returned. Gradients count `scale` times, and without the scale of a
        GradScaler that calls it. The version counters of updated parameters rise. Raises RuntimeError where updates
        have begun without such a factor.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if (factor := _scaler_factor(self)) is None:
            if not self.skip():
                raise RuntimeError(f"GradScaler skips this step: {BEGUN}")
            return loss
        if self.deferral is not None:
            self.deferral.offer_all(scale * factor)
        claims = self.claim(self._members)
        try:
            self.apply(claims, scale * factor)
        except BaseException:
            # Else the next step would leave them out. Some are updated, as after an error in torch's AdamW.
            self.release(claims)
            raise
        self._claimed.clear()
        return loss

    def leave_cores(self, count: int) -> None:
        """Makes updates run on all of this process's `cores` but `count`; these are None where `threads` was given."""
        if self.cores is not None:
            self.threads = max(self.cores - count, 1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as any torch optimizer. Zeros are written after the updates that still read them."""
        if not set_to_none:
            self.finish()
        self._clear(set_to_none)

    def finish(self) -> None:
        """Waits for updates that are under way."""
        if self.deferral is not None:
            self.deferral.finish()

    def follow(self, act: Callable[[Iterable[Tensor]], None]) -> set[Tensor]:
        """Has `act` called, after the step that has ended, with parameters whose updates run beside the caller.

        It reads them on the thread of the updates, between those of this step and of the next, and `finish` waits for
        it. Returns these parameters; the others are updated already.
        """
        return set() if self.deferral is None else self.deferral.follow(act)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the layout of torch.optim.AdamW, after the updates that are under way."""
        self.finish()
        self.states.bring_home()
        return states_as_torchs(self._get_state(), list(self._members))

    def skip(self) -> bool:
        """Ends the step without updating parameters that are not claimed yet; other updates stay if they are final.

        Returns True if none stays.
        """
        if self.deferral is not None:
            self.deferral.skip()
        final, self._claimed = self._claimed, set()
        return not final

    @property
    def has_begun(self) -> bool:
        """True if a parameter is claimed in a step that neither `step` nor `skip` has ended."""
        return bool(self._claimed)

    def claim(self, parameters: Iterable[Tensor], released: Mapping[Tensor, Tensor] | None = None) -> list[Claim]:
        """Claims the updates of those parameters that have a gradient and are not claimed yet in this step.

        `released` has gradients that are in no `.grad`. Parameters of no group are left out. Raises ValueError for a
        sparse gradient and for a dtype that is not supported, and claims nothing then.
        """
        hyperparameters, claims = [hyperparameters_of(group) for group in self.param_groups], []
        for parameter in dict.fromkeys(parameters):
            gradient = parameter.grad if released is None else released.get(parameter, parameter.grad)
            if gradient is None or parameter in self._claimed or (member := self._members.get(parameter)) is None:
                continue
            if gradient.layout is not torch.strided:
                raise ValueError("AdamW takes no sparse gradients: build the embedding with sparse=False")
            check_dtype(parameter)
            claims.append(Claim(parameter, gradient, hyperparameters[member.group], self.format, member.seed))
        self._claimed.update([claim.parameter for claim in claims])
        return claims

    def release(self, claims: Iterable[Claim]) -> None:
        """Takes claims back whose updates are not made, or undone."""
        self._claimed.difference_update(claim.parameter for claim in claims)

    @torch.no_grad()
    def apply(self, claims: Iterable[Claim], scale: float = 1.0) -> None:
        """Makes claimed updates on the calling thread; gradients count `scale` times.

        Holds Python's lock between kernels only. Device parameters are updated on the current stream.
        """
        # Around all of them: copies between layouts use torch's threads too.
        with torch_threads(self.threads):
            alone, together = in_two(claims, self.states.is_placed)
            for claim in alone:
                self.states.update(claim, self.kernel_on, scale)
            update_together(together, self.states.begin, self.kernel_on, scale)

    @torch.no_grad()
    def allocate(self) -> None:
        """Makes the states of all parameters that train and have none; else their first updates would.

        Raises MemoryError with both sizes, before any is made, where the host has no room for them.
        """
        with torch_threads(self.threads):
            self.states.allocate(self._members)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict()`, or of torch's AdamW; tensors that need not move are shared.

        A master that the state lacks, or that torch has carried along, is made at the next update from the parameter:
        so load the weights before that. Raises ValueError for state of another model, or for settings that are not
        supported; nothing is loaded then.
        """
        self.finish()
        with loads_states(self, lambda given: states_to_load(given, list(self._members), self.format), self._adopt):
            self._load_state(state_dict)

    def _adopt(self, loaded: Mapping[Tensor, State]) -> None:
        self._claimed.clear()
        self.states.adopt(loaded)
        self.state = self.states.tensors

    def __getstate__(self) -> dict[str, Any]:
        self.finish()
        names = ["threads", "cores", "device_share", "format", "speculate", "_claimed", "_members", "_all_decay"]
        # A copy makes its updates itself.
        own = {"deferral": None, "states": States(self.format, self.state)}
        return super().__getstate__() | {name: getattr(self, name) for name in names} | own


def _scaler_factor(optimizer: torch.optim.Optimizer) -> float | None:
    """Returns the factor that undoes the scale of the gradients, 1.0 without a scaler; None to leave the step out.

    A GradScaler sets `grad_scale`, None where it has changed the gradients itself (`unscale_`), and `found_inf`, not 0
    where a gradient is not finite.
    """
    if getattr(optimizer, "found_inf", 0):
        return None
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)

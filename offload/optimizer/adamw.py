"""AdamW for parameters on the host: each may be updated by itself, as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.errors import KnobError
from offload.knobs import bytes_or, one_of
from offload.memory.limits import usable_cores
from offload.optimizer.claims import Claim, update_elsewhere, update_in_place
from offload.optimizer.conversions import copy_state
from offload.optimizer.deferral import BEGUN, Deferral
from offload.optimizer.formats import StateFormat
from offload.optimizer.grad_scaler import scaler_factor
from offload.optimizer.kernel_choice import fastest_update, update_on
from offload.optimizer.kernels import UpdateKernel, torch_threads
from offload.optimizer.operands import check_hyperparameters
from offload.optimizer.param_groups import check_dtype, check_group, decay_groups, hyperparameters_of
from offload.optimizer.rounding import noise_seed
from offload.optimizer.shared_states import SharedStates
from offload.optimizer.state_dicts import loads_states, states_as_torchs, states_to_load
from offload.optimizer.states import State, StatePlacement, require_host_memory, state_bytes
from offload.optimizer.together import in_two, update_together
from offload.sharing.sharers import Sharers

# The system could not start more: the process would end without a message.
MAX_THREADS = 1024


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with masters, in which each parameter may be updated as soon as its gradient is there.

    `step()` is that of any torch optimizer. Before it, `update(parameters)` may update some of them already. `claim`
    and `apply` split that in two: a claim is taken where gradients land and applied later, on another thread, after a
    scheduler has changed the settings and `zero_grad` has dropped the gradient. Each parameter is claimed once a step,
    which `step` or `skip` ends. Updates of different parameters may be applied in any order.

    A bf16 or fp16 parameter is updated through a float32 master (Micikevicius et al. 2018), because without one an
    update below its resolution is lost; float32 parameters are updated in place. `offload.optimizer.states` describes
    the state of a parameter. `allocate` makes it, or the first update, from the parameter's value then. A parameter
    that is written later counts as it is then (a bf16 one together with the remainder that it had, less than its last
    bit); but under master="fp32", and in fp16, it is overwritten by the master. A parameter without a gradient is left
    alone.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr, betas, eps, weight_decay: as torch.optim.AdamW; a group may have its own, and a scheduler may change them.
        decay_norms_and_biases: False splits each group in two, as `decay_groups` does.
        master: how the master of a bf16 parameter is held. "compact": as the 16 bits that the weight lacks of it.
            "fp32": whole; the same numbers, 2 bytes more. "stochastic": not at all; weights are rounded up or down at
            random, right on average. "kahan": as the weight and its rounding error in bf16 (compensated summation).
        state_dtype: of the moments. "fp32", "bf16" for half the size, or "int8" for blocks of 256 numbers in 8 bits
            (`offload.optimizer.block_quantise`). They are computed in float32 and then rounded.
        state_rounding: of moments below float32: to the "nearest", or "stochastic".
        rounding_seed: of random rounding, which depends on it, the parameter's place, the step and the element alone.
        device_share: bytes of states ("10GiB") that a mode which overlaps the updates places on the device, or "auto"
            for as many as fit there. Without such a mode it has no effect.
        gradients: of weights that stream. "keep" leaves them in `.grad`, in host memory; "release" hands each to its
            update inside backward, so that it needs no memory of its own (see `Mode.release_gradients`). "auto"
            releases them where nothing else needs them.
        threads: cores that update host parameters. None takes all but one, which launches the device's work, or all
            but three under a mode that begins updates inside backward (see `leave_cores`).
        speculate: "on" lets a mode that overlaps the updates begin them inside backward where gradients may still be
            clipped, and undo them exactly if they are (`offload.optimizer.speculation`). "auto" does so while steps are
            not clipped, "off" never. No number depends on it.
        compile: "auto" takes the fastest kernels, of the host and of a GPU (`update_on`), "off" torch's.

    Raises KnobError for a setting out of range.
    """

    # Updates may run on a thread of their own, beside the step (`Mode.overlap`).
    overlaps = True
    # A GradScaler then leaves the gradients alone: updates that have begun would not see what it makes of them.
    _step_supports_amp_scaling = True
    planned_bytes = staticmethod(state_bytes)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decay_norms_and_biases: bool = True,
        master: str = "compact",
        state_dtype: str = "fp32",
        state_rounding: str = "nearest",
        rounding_seed: int = 0,
        device_share: str | int = 0,
        gradients: str = "auto",
        threads: int | None = None,
        speculate: str = "auto",
        compile: str = "auto",
    ):
        self.format = StateFormat(master, state_dtype, state_rounding)
        one_of("speculate", speculate, "auto", "on", "off")
        one_of("compile", compile, "auto", "off")
        one_of("gradients", gradients, "auto", "keep", "release")
        if threads is not None and threads not in range(1, MAX_THREADS + 1):
            raise KnobError("threads", threads, f"must be at least 1 and at most {MAX_THREADS}, or null to choose")
        check_hyperparameters(lr, betas, eps, weight_decay)
        self.cores = usable_cores() if threads is None else None
        self.threads = threads or max(self.cores - 1, 1)
        self._rounding_seed = rounding_seed
        self.device_share = bytes_or("auto", "device_share", device_share)
        self.speculate, self._compile, self._all_decay = speculate, compile, decay_norms_and_biases
        self._claimed: set[Tensor] = set()
        self._deferral: Deferral | None = None
        self._placement = StatePlacement(self.format)
        self._shared: SharedStates | None = None
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        if self._updates_on_host:
            # Compiled and measured now, and not in the first step.
            fastest_update(self.threads, compile, self.format)

    def kernel_on(self, device: torch.device) -> UpdateKernel:
        """Returns the kernel that updates states on `device`."""
        return update_on(device, self.threads, self._compile, self.format)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, or the two of `decay_groups`. Raises ValueError, adding nothing, where `check_group` does."""
        count = len(self.param_groups)
        try:
            for group in [param_group] if self._all_decay else decay_groups([param_group]):
                super().add_param_group(group)
                check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[count:]
            raise
        # By position, because loading replaces the groups.
        self._group_of = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._noise_seeds = {p: noise_seed(self._rounding_seed, number) for number, p in enumerate(self._group_of)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None, *, scale: float = 1.0) -> Tensor | None:
        """Updates every parameter that has a gradient and is not claimed yet, and ends the step.

        `closure` computes the loss first, which is returned. Gradients count `scale` times, and without the scale of a
        GradScaler that calls it. The version counter of each updated parameter rises, which shows that copies of it are
        outdated. Raises RuntimeError where updates have begun without such a factor.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if (factor := scaler_factor(self)) is None:
            if not self.skip():
                raise RuntimeError(f"GradScaler skips this step: {BEGUN}")
            return loss
        if self._deferral is not None:
            self._deferral.offer_all(scale * factor)
        self.update(self._group_of, scale * factor)
        self._claimed.clear()
        return loss

    @property
    def is_deferred(self) -> bool:
        """True if something makes its updates beside the step."""
        return self._deferral is not None

    def defer_to(self, updates: Deferral | None) -> None:
        """Makes `step` offer its updates to `updates` first, which may end later; None: `step` makes all itself."""
        self._deferral = updates

    def share(self, slices: Mapping[Tensor, Sequence[range]], sharers: Sharers) -> None:
        """Makes this process one of several that update the parameters of `slices`, each in its own ranges of elements.

        The parameters, contiguous and on the host, are the sharers' shared memory, and so are their states from now on.
        `allocate` makes these; each sharer calls it, and waits for the others. Raises RuntimeError where states exist,
        or have a place on the device, and ValueError for moments in 8 bits where a range does not begin with a block.
        """
        if self.state or any(map(self._placement.is_placed, slices)):
            raise RuntimeError("states that exist cannot be shared: share the parameters before anything has states")
        self._shared = SharedStates(slices, self.format, sharers)

    def leave_cores(self, count: int) -> None:
        """Makes updates run on all of this process's `cores` but `count`; these are None where `threads` was given."""
        if self.cores is not None:
            self.threads = max(self.cores - count, 1)
            if self._updates_on_host:
                fastest_update(self.threads, self._compile, self.format)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as any torch optimizer. Zeros are written after the updates that still read them."""
        if not set_to_none:
            self.finish()
        super().zero_grad(set_to_none)

    def finish(self) -> None:
        """Waits for updates that are under way."""
        if self._deferral is not None:
            self._deferral.finish()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the layout of torch.optim.AdamW, after the updates that are under way."""
        self.bring_states_home()
        return states_as_torchs(super().state_dict(), self._parameters)

    def skip(self) -> bool:
        """Ends the step without updating parameters that are not claimed yet; other updates stay if they are final.

        Returns True if none stays.
        """
        if self._deferral is not None:
            self._deferral.skip()
        final, self._claimed = self._claimed, set()
        return not final

    @property
    def has_begun(self) -> bool:
        """True if a parameter is claimed in a step that neither `step` nor `skip` has ended."""
        return bool(self._claimed)

    def update(self, parameters: Iterable[Tensor], scale: float = 1.0) -> None:
        """Updates these parameters now, on the calling thread: `apply(claim(parameters), scale)`.

        After an error some of them are updated and none of them is claimed, as after an error in torch's AdamW.
        """
        claims = self.claim(parameters)
        try:
            self.apply(claims, scale)
        except BaseException:
            # Else the next step would leave them out.
            self.release(claims)
            raise

    def claim(self, parameters: Iterable[Tensor], released: Mapping[Tensor, Tensor] | None = None) -> list[Claim]:
        """Claims the updates of those parameters that have a gradient and are not claimed yet in this step.

        `released` has gradients that are in no `.grad`. Parameters of no group are left out. Raises ValueError for a
        sparse gradient and for a dtype that is not supported, and claims nothing then.
        """
        hyperparameters, claims = [hyperparameters_of(group) for group in self.param_groups], []
        for parameter in dict.fromkeys(parameters):
            gradient = parameter.grad if released is None else released.get(parameter, parameter.grad)
            if gradient is None or parameter in self._claimed or (group := self._group_of.get(parameter)) is None:
                continue
            if gradient.layout is not torch.strided:
                raise ValueError("AdamW takes no sparse gradients: build the embedding with sparse=False")
            check_dtype(parameter)
            claims.append(Claim(parameter, gradient, hyperparameters[group], self.format, self._noise_seeds[parameter]))
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
            alone, together = in_two(claims, self._placement.placed)
            for claim in alone:
                self._apply(claim, scale)
            update_together(together, self.begin_updates, self.kernel_on, scale)

    @torch.no_grad()
    def apply_on_device(self, claim: Claim, gradient: Tensor, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Updates the placed states of a claimed parameter with `gradient` on their device, on the current stream.

        Where the parameter is shared, `gradient` has this process's slices, one behind the other (1-D). Returns pairs
        of a place at home and the new weight for it on the device, alike in shape and dtype.
        """
        parameter, kernel = claim.parameter, self.kernel_on(self._owner(claim.parameter).device_of(claim.parameter))
        state = self.begin_updates([parameter])[0]
        if self._is_shared(parameter):
            return self._shared.update_placed(claim, state, gradient, kernel, scale)
        return [(parameter.data, update_elsewhere(claim, state, gradient, kernel, scale))]

    def bytes_to_place(self, parameters: Sequence[Tensor]) -> int:
        """Returns the bytes of the states that `place` puts on the device for these parameters, masters included."""
        shared = [parameter for parameter in parameters if self._is_shared(parameter)]
        own = state_bytes((p for p in parameters if not self._is_shared(p)), self.format, placed=True)
        return own + sum(self._shared.bytes_to_place(parameter) for parameter in shared)

    def bring_states_home(self) -> None:
        """Copies shared states that were updated on this process's device to the memory that all sharers read.

        A sharer that reads whole states has the others do so before; `state_dict` does so for this process's slices.
        """
        self.finish()
        if self._shared is not None:
            self._shared.bring_home()

    def place(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        """Puts the states of these parameters, masters too, on `device`, wherever the parameters live.

        States that exist move. They are updated by `apply_on_device`, for a caller who has the gradients there.
        """
        for parameter in parameters:
            if self._is_shared(parameter):
                self._shared.place(parameter, device)
            else:
                self._placement.place(parameter, self.state.get(parameter, {}), device)

    @torch.no_grad()
    def allocate(self) -> None:
        """Makes the states of all parameters that train and have none; else their first updates would.

        Raises MemoryError with both sizes, before any is made, where the host has no room for them.
        """
        if self._shared is not None:
            self._shared.allocate()
        missing = [p for p in self._group_of if p.requires_grad and not self.state.get(p)]
        on_host = [p for p in missing if p.device.type == "cpu" and not (self.is_elsewhere(p) or self._is_shared(p))]
        require_host_memory(on_host, self.format)
        with torch_threads(self.threads):
            for parameter in missing:
                self._owner(parameter).prepare(parameter, self.state[parameter])
        if self._shared is not None:
            self._shared.settle()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict()`; tensors move to the parameters' devices, and else are shared with it.

        State of torch's own AdamW loads too, and ours loads there. A master that the state lacks, or that torch has
        carried along, is made at the next update from the parameter: so load the weights before that.

        Raises ValueError for state of another model, or for settings that are not supported; nothing is loaded then.
        """
        self.finish()
        with loads_states(self, lambda given: states_to_load(given, self._parameters, self.format), self._adopt):
            super().load_state_dict(state_dict)

    def _adopt(self, loaded: dict[Tensor, State]) -> None:
        self._claimed.clear()
        for parameter, state in loaded.items():
            self.state[parameter] = self._owner(parameter).adopt(parameter, state)

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Copies a state of any format into that of `parameter`, which exists; see `conversions.copy_state`.

        The parameter has the values that belong to the state; where that has no master, they are it.
        """
        self.finish()
        if self._is_shared(parameter):
            self._shared.forget_placed(parameter)
        copy_state(state, self.state[parameter], parameter, self.format)

    def _apply(self, claim: Claim, scale: float) -> None:
        parameter, is_shared = claim.parameter, self._is_shared(claim.parameter)
        owner = self._owner(parameter)
        if owner.is_placed(parameter):
            torch.autograd.graph.increment_version(parameter)  # The copy there is made anew: see `some_elements`.
            gradient = self._shared.own_part(parameter, claim.gradient) if is_shared else claim.gradient
            for home, weight in self.apply_on_device(claim, gradient.to(owner.device_of(parameter)), scale):
                home.copy_(weight)
            return
        state, slices = self.begin_updates([parameter])[0], self._shared.slices(parameter) if is_shared else None
        update_in_place(claim, state, self.kernel_on(parameter.device), scale, slices)

    def begin_updates(self, parameters: list[Tensor]) -> list[State]:
        """Counts updates that are about to be made, of parameters of one device; returns the parameters' states."""
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            self._owner(parameter).prepare(parameter, state)
        self._placement.count_updates(parameters, states)
        return states

    def own_parts(self, parameter: Tensor) -> Sequence[range]:
        """Returns the ranges of elements of a parameter's flat form that this process updates: all, or its slices."""
        return self._shared.slices(parameter) if self._is_shared(parameter) else (range(parameter.numel()),)

    def _owner(self, parameter: Tensor) -> SharedStates | StatePlacement:
        return self._shared if self._is_shared(parameter) else self._placement

    def _is_shared(self, parameter: Tensor) -> bool:
        return self._shared is not None and parameter in self._shared

    def is_elsewhere(self, parameter: Tensor) -> bool:
        """True if what this process has of a parameter's state was placed on a device, and is updated there."""
        return self._owner(parameter).is_placed(parameter)

    @property
    def _updates_on_host(self) -> bool:
        return any(parameter.requires_grad and parameter.device.type == "cpu" for parameter in self._group_of)

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        self.finish()
        names = ["threads", "cores", "device_share", "format", "speculate", "_compile", "_claimed"]
        names += ["_group_of", "_rounding_seed", "_noise_seeds", "_all_decay"]
        # A copy makes its updates itself.
        own = {"_deferral": None, "_shared": None, "_placement": StatePlacement(self.format)}
        return super().__getstate__() | {name: getattr(self, name) for name in names} | own

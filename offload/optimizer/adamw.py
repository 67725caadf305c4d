"""AdamW for parameters on the host: each may be updated by itself, as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.optimizer.claims import Claim, update_elsewhere, update_in_place
from offload.optimizer.conversions import MASTER, in_format
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernel_choice import fastest_update
from offload.optimizer.kernels import FusedUpdate, UpdateKernel, torch_threads
from offload.optimizer.param_groups import check_group, check_settings, decay_groups, hyperparameters_of
from offload.optimizer.rounding import noise_seed
from offload.optimizer.shared_states import SharedStates
from offload.optimizer.state_dicts import states_as_torchs, states_to_load
from offload.optimizer.states import WEIGHT, State, StatePlacement, state_bytes
from offload.runtime.byte_sizes import GIB
from offload.runtime.errors import KnobError
from offload.runtime.host_cores import usable_cores
from offload.runtime.host_memory import free_host_bytes
from offload.runtime.knobs import bytes_or, in_range, one_of
from offload.runtime.sharers import Sharers

# The system could not start more: the process would end without a message.
MAX_THREADS = 1024


class Deferral(Protocol):
    """Makes some of an optimizer's updates beside the caller; see `offload.optimizer.overlap`."""

    def offer_all(self, scale: float) -> None:
        """Claims and starts its updates."""
        ...

    def finish(self) -> None:
        """Waits for its updates."""
        ...


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
        threads: cores that update host parameters. None takes all but one, which launches the device's work, or all
            but three under a mode that begins updates inside backward (see `leave_cores`).
        compile: "auto" takes the fastest kernel of the host, "off" torch's own (see `fastest_update`).

    Raises KnobError for a setting out of range.
    """

    # Updates may run on a thread of their own, beside the step (`Mode.overlap`).
    overlaps = True

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
        threads: int | None = None,
        compile: str = "auto",
    ):
        self.format = StateFormat(master, state_dtype, state_rounding)
        one_of("compile", compile, "auto", "off")
        if threads is not None and threads not in range(1, MAX_THREADS + 1):
            raise KnobError("threads", threads, f"must be at least 1 and at most {MAX_THREADS}, or null to choose")
        in_range("lr", lr, at_least=0)
        in_range("eps", eps, above=0)
        in_range("weight_decay", weight_decay, at_least=0)
        if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            raise KnobError("betas", list(betas), "must be two numbers, at least 0 and below 1")
        groups = params if decay_norms_and_biases else decay_groups(params)
        self.threads = _all_but(1) if threads is None else threads
        self._chooses_threads = threads is None
        self._rounding_seed = rounding_seed
        self.device_share = bytes_or("auto", "device_share", device_share)
        self._compile = compile
        self._claimed: set[Tensor] = set()
        self._deferral: Deferral | None = None
        self._placement = StatePlacement(self.format)
        self._shared: SharedStates | None = None
        super().__init__(groups, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        if self._updates_on_host:
            # Compiled and measured now, and not in the first step.
            fastest_update(self.threads, compile, self.format)

    @property
    def kernel(self) -> UpdateKernel:
        """The kernel that updates host parameters."""
        return fastest_update(self.threads, self._compile, self.format)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as any torch optimizer. Raises ValueError, adding nothing, where `check_group` does."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        # By position, because loading replaces the groups.
        self._group_of = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._noise_seeds = {p: noise_seed(self._rounding_seed, number) for number, p in enumerate(self._group_of)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None, *, scale: float = 1.0) -> Tensor | None:
        """Updates every parameter that has a gradient and is not claimed yet, and ends the step.

        `closure` computes the loss first, which is returned. Gradients count `scale` times. The version counter of each
        updated parameter rises, which shows that copies of it are outdated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._deferral is not None:
            self._deferral.offer_all(scale)
        self.update(self._group_of, scale)
        self._claimed.clear()
        return loss

    def defer_to(self, updates: Deferral | None) -> None:
        """Makes `step` offer its updates to `updates` first, which may end later; None: `step` makes all itself."""
        self._deferral = updates

    def share(self, slices: Mapping[Tensor, Sequence[range]], sharers: Sharers) -> None:
        """Makes this process one of several that update the parameters of `slices`, each in its own ranges of elements.

        The parameters, contiguous and on the host, are the sharers' shared memory, and so are their states from now on.
        `allocate` makes these; each sharer calls it, and waits for the others. Raises RuntimeError where states exist,
        and KnobError for moments in 8 bits: ranges do not begin with their blocks.
        """
        if self.format.state_dtype == "int8":
            raise KnobError("state_dtype", "int8", "must be fp32 or bf16 where several processes share the states")
        if self.state:
            raise RuntimeError("states that exist cannot be shared: share the parameters before the first update")
        self._shared = SharedStates(slices, self.format, sharers)

    def leave_cores(self, count: int) -> None:
        """Makes updates run on all cores but `count`, unless `threads` was given."""
        if self._chooses_threads:
            self.threads = _all_but(count)
            if self._updates_on_host:
                # Measured now, and not in the next step.
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
        self.finish()
        return states_as_torchs(super().state_dict(), self._parameters)

    def skip(self) -> None:
        """Ends the step without updating parameters that are not claimed yet; claimed ones are updated all the same."""
        self._claimed.clear()

    @property
    def has_begun(self) -> bool:
        """True if a parameter is claimed in a step that neither `step` nor `skip` has ended."""
        return bool(self._claimed)

    def update(self, parameters: Iterable[Tensor], scale: float = 1.0) -> None:
        """Updates these parameters now, on the calling thread: `apply(claim(parameters), scale)`."""
        self.apply(self.claim(parameters), scale)

    def claim(self, parameters: Iterable[Tensor]) -> list[Claim]:
        """Claims the updates of those parameters that have a gradient and are not claimed yet in this step.

        Parameters of no group are left out. Raises ValueError for a sparse gradient.
        """
        hyperparameters = [hyperparameters_of(group) for group in self.param_groups]
        claims = []
        for parameter in parameters:
            if parameter.grad is None or parameter in self._claimed or parameter not in self._group_of:
                continue
            if parameter.grad.layout is not torch.strided:
                raise ValueError("AdamW takes no sparse gradients: build the embedding with sparse=False")
            self._claimed.add(parameter)
            settings = hyperparameters[self._group_of[parameter]]
            claims.append(Claim(parameter, parameter.grad, settings, self.format, self._noise_seeds[parameter]))
        return claims

    @torch.no_grad()
    def apply(self, claims: Iterable[Claim], scale: float = 1.0) -> None:
        """Makes claimed updates on the calling thread; gradients count `scale` times.

        Holds Python's lock between kernels only. Device parameters are updated on the current stream.
        """
        # Around all of them: copies between layouts use torch's threads too.
        with torch_threads(self.threads):
            for claim in claims:
                self._apply(claim, scale)

    @torch.no_grad()
    def apply_on_device(self, claim: Claim, gradient: Tensor, scale: float = 1.0) -> Tensor:
        """Updates the placed states of a claimed parameter with `gradient` on their device, on the current stream.

        Returns the new weight there: the parameter's shape and dtype.
        """
        state = self._begin_update(claim.parameter)
        return update_elsewhere(claim, state, gradient, FusedUpdate(self.threads), scale)

    def place(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        """Puts the states of these parameters, masters too, on `device`, wherever the parameters live.

        States that exist move. They are updated by `apply_on_device`, for a caller who has the gradients there.
        """
        for parameter in parameters:
            self._placement.place(parameter, self.state.get(parameter, {}), device)

    @torch.no_grad()
    def allocate(self) -> None:
        """Makes the states of all parameters that train and have none; else their first updates would.

        Raises MemoryError with both sizes, before any is made, where the host has no room for them.
        """
        if self._shared is not None:
            self._shared.allocate()
        missing = [p for p in self._group_of if p.requires_grad and not self.state.get(p)]
        on_host = [p for p in missing if p.device.type == "cpu" and not self._is_elsewhere(p)]
        needed = state_bytes(on_host, self.format)
        free = free_host_bytes()
        if free is not None and needed > free:
            raise MemoryError(
                f"{needed / GIB:.2f} GiB of host memory are needed for the optimizer's states,"
                f" {free / GIB:.2f} GiB are free"
            )
        with torch_threads(self.threads):
            for parameter in missing:
                self._prepare(parameter, self.state[parameter])
        if self._shared is not None:
            self._shared.settle()

    @staticmethod
    def planned_bytes(parameters: Iterable[Tensor], format: StateFormat = StateFormat(), placed: bool = False) -> int:  # noqa: B008
        """Returns the bytes of the states of those `parameters` that train, each counted once; meta ones will do.

        `placed`: on a device, for weights that are elsewhere.
        """
        return state_bytes(parameters, format, placed)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict()`; tensors move to the parameters' devices, and else are shared with it.

        State of torch's own AdamW loads too, and ours loads there. A master that the state lacks, or that torch has
        carried along, is made at the next update from the parameter: so load the weights before that.

        Raises ValueError for state of another model, and for settings that are not supported here; nothing is loaded
        then.
        """
        self.finish()
        for group in state_dict["param_groups"]:
            check_settings(group, "the optimizer state to load")
        loaded = states_to_load(state_dict, self._parameters, self.format)
        # torch would round float32 state of a bf16 parameter to bf16, so it gets the settings alone.
        super().load_state_dict({**state_dict, "state": {}})
        self._claimed.clear()
        for parameter, state in loaded.items():
            owner = self._shared if self._is_shared(parameter) else self._placement
            self.state[parameter] = owner.adopt(parameter, state)

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Copies a state of any format into that of `parameter`, which exists; see `conversions.in_format`.

        The parameter has the values that belong to the state; where that has no master, they are it.
        """
        found = in_format(state, parameter, self.format)
        for name, tensor in self.state[parameter].items():
            if name in found:
                tensor.copy_(found[name])
            elif name in (WEIGHT, MASTER):
                tensor.copy_(parameter)
            else:
                tensor.zero_()

    def _apply(self, claim: Claim, scale: float) -> None:
        parameter = claim.parameter
        if self._placement.is_placed(parameter):
            gradient = claim.gradient.to(self._placement.device_of(parameter))
            parameter.data.copy_(self.apply_on_device(claim, gradient, scale))
            return
        state = self._begin_update(parameter)
        kernel = self.kernel if parameter.device.type == "cpu" else FusedUpdate()
        slices = self._shared.slices(parameter) if self._is_shared(parameter) else None
        update_in_place(claim, state, kernel, scale, slices)

    def _begin_update(self, parameter: Tensor) -> State:
        """Counts an update that is about to be made; returns the parameter's state."""
        state = self.state[parameter]
        self._prepare(parameter, state)
        state["step"] += 1
        # The kernels that write the weight themselves do not raise its version.
        torch.autograd.graph.increment_version(parameter)
        self._placement.note_update(parameter)
        return state

    def _prepare(self, parameter: Tensor, state: State) -> None:
        if not self._is_shared(parameter):
            self._placement.prepare(parameter, state)
        elif not state:
            state |= self._shared.make(parameter)

    def _is_shared(self, parameter: Tensor) -> bool:
        return self._shared is not None and parameter in self._shared

    def _is_elsewhere(self, parameter: Tensor) -> bool:
        return self._placement.is_placed(parameter) or self._is_shared(parameter)

    @property
    def _updates_on_host(self) -> bool:
        return any(parameter.requires_grad and parameter.device.type == "cpu" for parameter in self._group_of)

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        names = ["threads", "_chooses_threads", "device_share", "format", "_compile", "_claimed", "_group_of"]
        names += ["_rounding_seed", "_noise_seeds"]
        # A copy makes its updates itself.
        own = {"_deferral": None, "_shared": None, "_placement": StatePlacement(self.format)}
        return super().__getstate__() | {name: getattr(self, name) for name in names} | own


def _all_but(count: int) -> int:
    return max(usable_cores() - count, 1)

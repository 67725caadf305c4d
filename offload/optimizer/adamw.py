"""AdamW whose states live where the parameters do, on the host above all, updated piece by piece as gradients land."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.optimizer.kernels import (
    FusedUpdate,
    Operands,
    Settings,
    Update,
    fastest_update,
    torch_threads,
    usable_cores,
)
from offload.optimizer.param_groups import check_group, check_settings, decay_groups, settings_of
from offload.optimizer.state_dicts import MOMENTS, is_own_master, states_as_torchs, states_to_load
from offload.runtime.byte_sizes import parse_bytes
from offload.runtime.host_memory import free_host_bytes

# More cannot all be started: the process would end without a word.
MAX_THREADS = 1024
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Claim:
    """One parameter's update of one step, complete: what happens to settings and to `.grad` later does not touch it."""

    parameter: Tensor
    gradient: Tensor
    settings: Settings


class Deferral(Protocol):
    """Who makes updates beside the caller."""

    def offer_all(self, scale: float) -> None:
        """Claims and starts the updates that it makes."""
        ...

    def finish(self) -> None:
        """Waits for them."""
        ...


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with float32 masters, in which each parameter may be updated as soon as its gradient is there.

    `step()` is that of any torch optimizer. Before it, `update(parameters)` may update some of them already, and
    `claim` and `apply` split that in two: a claim is taken where gradients land and applied later, on another thread,
    after a scheduler has changed the settings and `zero_grad` has dropped the gradient. Each parameter is claimed
    once a step, which `step` or `skip` ends. Updates of different parameters may be applied in any order.

    A bf16 or fp16 parameter is updated through a float32 master (Micikevicius et al. 2018), because alone it stands
    still where an update is below its resolution; contiguous float32 parameters are updated in place. State of a
    parameter, on its device: `step` (float32 scalar), `exp_avg` and `exp_avg_sq` (the parameter's shape, contiguous)
    and, unless the parameter can be its own, `master` (float32, likewise). It is made by `allocate`, or at the first
    update, from the parameter's value then. A float32 parameter that is written later has its master made anew; weights
    of lower precision that are written later, other than by `load_state_dict`, are overwritten by the master. Without a
    gradient a parameter is left alone.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr, betas, eps, weight_decay: as torch.optim.AdamW; a group may have its own, and a scheduler may change them.
        decay_norms_and_biases: False splits each group in two, as `decay_groups` does.
        state_dtype: "fp32", or "bf16" for moments of half the size, computed in float32 and rounded to nearest.
        device_share: bytes of states ("10GiB") that a mode which overlaps the updates places on the device, or "auto":
            as many as find room there. Without such a mode it has no effect.
        visiting_share: part of the states, from 0 to 1, that such a mode sends to the device to be updated there
            while the host updates the others (see `VisitingStates`). On a GPU the two round differently.
        threads: cores that update host parameters. None is all but one, which launches the device's work, or all but
            three under a mode that begins updates inside backward (see `leave_cores`).
        compile: "auto" takes the fastest kernel of the host, "off" torch's own (see `fastest_update`).

    Raises ValueError for a setting out of range.
    """

    # Updates may run on a thread of their own, beside the step (`Mode.overlap`).
    overlaps = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Iterable[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decay_norms_and_biases: bool = True,
        state_dtype: str = "fp32",
        device_share: str | int = 0,
        visiting_share: float = 0.0,
        threads: int | None = None,
        compile: str = "auto",
    ):
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype={state_dtype}: must be one of {', '.join(STATE_DTYPES)}")
        if compile not in ("auto", "off"):
            raise ValueError(f"compile={compile}: must be auto or off")
        if threads is not None and threads not in range(1, MAX_THREADS + 1):
            raise ValueError(f"threads={threads}: must be at least 1 and at most {MAX_THREADS}, or null to choose")
        groups = params if decay_norms_and_biases else decay_groups(params)
        self.threads = _all_but(1) if threads is None else threads
        self._chooses_threads = threads is None
        self._state_dtype = STATE_DTYPES[state_dtype]
        self.device_share = device_share if device_share == "auto" else parse_bytes("device_share", device_share)
        if not 0 <= visiting_share <= 1:
            raise ValueError(f"visiting_share={visiting_share}: must be between 0 and 1")
        self.visiting_share = visiting_share
        self._compile = compile
        self._claimed: set[Tensor] = set()
        self._deferral: Deferral | None = None
        self._placed: dict[Tensor, torch.device] = {}
        self._homes: dict[Tensor, dict[str, Tensor]] = {}
        # Autograd's version counter of parameters when their masters were last equal to them.
        self._versions: dict[Tensor, int] = {}
        super().__init__(groups, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        if any(parameter.device.type == "cpu" for parameter in self._group_of):
            # Compiled and measured now, and not in the first step.
            fastest_update(self.threads, compile)

    @property
    def kernel(self) -> Update:
        """What updates host parameters."""
        return fastest_update(self.threads, self._compile)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any torch optimizer. Raises ValueError, adding nothing, for what `check_group` refuses."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        # By position, because loading replaces the groups.
        self._group_of = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None, *, scale: float = 1.0) -> Tensor | None:
        """Updates every parameter that has a gradient and is not claimed yet, and ends the step.

        `closure` evaluates the loss first, which is returned. Gradients count `scale` times. The version counter of
        each updated parameter rises, so that whoever keeps copies of weights can tell.
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
        """From now on `step` offers its updates to `updates` first, which may go on after it; None: it makes all."""
        self._deferral = updates

    def leave_cores(self, count: int) -> None:
        """Has updates run on all cores but `count`, which others are busy on, unless `threads` was given."""
        if self._chooses_threads:
            self.threads = _all_but(count)
            # Measured now, and not in the next step.
            fastest_update(self.threads, self._compile)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any torch optimizer. Zeros are written only after the updates that still read the gradients."""
        if not set_to_none:
            self.finish()
        super().zero_grad(set_to_none)

    def finish(self) -> None:
        """Waits for updates that are under way."""
        if self._deferral is not None:
            self._deferral.finish()

    def state_dict(self) -> dict[str, Any]:
        """The state in the layout of torch.optim.AdamW, after the updates that are under way."""
        self.finish()
        return states_as_torchs(super().state_dict(), self._parameters)

    def skip(self) -> None:
        """Ends the step without an update of what is not claimed yet; what is claimed is updated all the same."""
        self._claimed.clear()

    @property
    def has_begun(self) -> bool:
        """Whether something is claimed in a step that neither `step` nor `skip` has ended."""
        return bool(self._claimed)

    def update(self, parameters: Iterable[Tensor], scale: float = 1.0) -> None:
        """Updates these parameters now, on the calling thread: `apply(claim(parameters), scale)`."""
        self.apply(self.claim(parameters), scale)

    def claim(self, parameters: Iterable[Tensor]) -> list[Claim]:
        """The updates that are due: of those parameters that have a gradient and are not claimed yet in this step.

        What is in no group is left alone. Raises ValueError for a sparse gradient.
        """
        settings = [settings_of(group) for group in self.param_groups]
        claims = []
        for parameter in parameters:
            if parameter.grad is None or parameter in self._claimed or parameter not in self._group_of:
                continue
            if parameter.grad.layout is not torch.strided:
                raise ValueError("AdamW takes no sparse gradients: build the embedding with sparse=False")
            self._claimed.add(parameter)
            claims.append(Claim(parameter, parameter.grad, settings[self._group_of[parameter]]))
        return claims

    @torch.no_grad()
    def apply(self, claims: Iterable[Claim], scale: float = 1.0) -> None:
        """Makes claimed updates, on the calling thread, gradients counting `scale` times.

        It holds Python's lock between kernels only. Device parameters are updated on the current stream.
        """
        # Around all of them: copies between layouts use torch's threads too.
        with torch_threads(self.threads):
            for claim in claims:
                self._apply(claim, scale)

    def _apply(self, claim: Claim, scale: float) -> None:
        parameter = claim.parameter
        if parameter in self._placed:
            gradient = claim.gradient.to(self._placed[parameter])
            parameter.data.copy_(self.apply_on_device(claim, gradient, scale))
            return
        self.begin_update(claim)
        operands = self.operands(claim)
        kernel = self.kernel if parameter.device.type == "cpu" else FusedUpdate()
        kernel(operands, self.state[parameter]["step"], claim.settings, scale)
        if not parameter.is_contiguous():
            parameter.data.copy_(self.state[parameter]["master"])

    def begin_update(self, claim: Claim) -> dict[str, Tensor]:
        """Counts the update of a claim that the caller is about to make; returns the parameter's state."""
        state = self._state_of(claim.parameter)
        state["step"] += 1
        # No kernel does, where it writes the weight itself.
        torch.autograd.graph.increment_version(claim.parameter)
        self._versions[claim.parameter] = claim.parameter._version
        return state

    def operands(self, claim: Claim) -> Operands:
        """What the update of a claimed parameter reads and writes; its state is there already."""
        parameter, state = claim.parameter, self.state[claim.parameter]
        master = state.get("master", parameter.detach())
        return Operands(
            weight=_flat(parameter.detach()) if parameter.is_contiguous() else _flat(master),
            gradient=_flat(claim.gradient),
            master=_flat(master),
            exp_avg=_flat(state["exp_avg"]),
            exp_avg_sq=_flat(state["exp_avg_sq"]),
        )

    def place(self, parameters: Iterable[Tensor], device: torch.device) -> None:
        """Has the states of these parameters, masters too, on `device`, wherever the parameters live.

        States that there are move. Their updates are `apply_on_device`, for somebody who has their gradients there.
        """
        for parameter in parameters:
            self._placed[parameter] = device
            self._homes.pop(parameter, None)
            state = self.state.get(parameter, {})
            state |= {name: tensor.to(device) for name, tensor in state.items()}

    def state_dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """The dtypes of a parameter's states by name, but for the step."""
        master = {} if is_own_master(parameter) else {"master": torch.float32}
        return dict.fromkeys(MOMENTS, self._state_dtype) | master

    def keep_in(self, parameter: Tensor, name: str, memory: Tensor) -> None:
        """Has one state of a parameter in `memory`, 1-D of its dtype; what there is of it moves."""
        home = self._homes.setdefault(parameter, {})[name] = memory.view(parameter.shape)
        if name in self.state.get(parameter, {}):
            self.state[parameter][name] = home.copy_(self.state[parameter][name])

    def placed_bytes(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of the states that `place` would have made."""
        return sum(4 + parameter.numel() * (4 + 2 * self._state_dtype.itemsize) for parameter in set(parameters))

    @torch.no_grad()
    def apply_on_device(self, claim: Claim, gradient: Tensor, scale: float = 1.0) -> Tensor:
        """Updates the placed states of a claimed parameter with `gradient` on their device, on the current stream.

        Returns the new weight there: the parameter's shape and dtype.
        """
        parameter, state = claim.parameter, self.begin_update(claim)
        master = state["master"]
        weight = torch.empty_like(master, dtype=parameter.dtype)
        operands = (weight, gradient, master, state["exp_avg"], state["exp_avg_sq"])
        FusedUpdate(self.threads)(Operands(*map(_flat, operands)), state["step"], claim.settings, scale)
        return weight

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=self._placed.get(parameter, parameter.device))
            for name in MOMENTS:
                # Written, not merely promised as by torch.zeros, so that memory that is missing is missed now.
                state[name] = self._memory(parameter, name, self._state_dtype).zero_()
        if (parameter in self._placed or not is_own_master(parameter)) and self._needs_master(parameter):
            master = state["master"] if "master" in state else self._memory(parameter, "master", torch.float32)
            state["master"] = master.copy_(parameter.detach())
            self._versions[parameter] = parameter._version
        return state

    def _needs_master(self, parameter: Tensor) -> bool:
        written = parameter.dtype == torch.float32 and self._versions.get(parameter) != parameter._version
        return written or "master" not in self.state[parameter]

    def _memory(self, parameter: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        home = self._homes.get(parameter, {}).get(name)
        if home is not None:
            return home
        return torch.empty(parameter.shape, dtype=dtype, device=self._placed.get(parameter, parameter.device))

    @torch.no_grad()
    def allocate(self) -> None:
        """Makes the states of all parameters that train and have none, which the first updates would make else.

        Raises MemoryError with both sizes, before anything is made, where the host has no room for them.
        """
        missing = [p for p in self._group_of if p.requires_grad and not self.state.get(p)]
        elsewhere = self._placed.keys() | self._homes.keys()
        on_host = [p for p in missing if p.device.type == "cpu" and p not in elsewhere]
        needed = self.planned_bytes(on_host, self._state_dtype)
        free = free_host_bytes()
        if free is not None and needed > free:
            raise MemoryError(
                f"{needed / 2**30:.2f} GiB of host memory are needed for the optimizer's states,"
                f" {free / 2**30:.2f} GiB are free"
            )
        with torch_threads(self.threads):
            for parameter in missing:
                self._state_of(parameter)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that there are."""
        return sum(tensor.nbytes for state in self.state.values() for tensor in state.values())

    @staticmethod
    def planned_bytes(parameters: Iterable[Tensor], state_dtype: torch.dtype | str = "fp32") -> int:
        """Bytes of the states of those of `parameters`, each counted once, that train; meta parameters will do."""
        moment = STATE_DTYPES.get(state_dtype, state_dtype).itemsize
        total = 0
        for parameter in dict.fromkeys(parameters):
            if parameter.requires_grad:
                master = 0 if is_own_master(parameter) else 4
                total += 4 + parameter.numel() * (master + 2 * moment)
        return total

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` returned, tensors moved to the parameters' devices, and otherwise shared with it.

        State of torch's own AdamW loads too, and ours loads there. A master that the state lacks, or that torch has
        carried along, is made at the next update from the parameter: so load the weights first or after, but before
        that.

        Raises ValueError for state of another model, and for settings that are not supported here; nothing is loaded
        then.
        """
        self.finish()
        for group in state_dict["param_groups"]:
            check_settings(group, "the optimizer state to load")
        loaded = states_to_load(state_dict, self._parameters)
        # torch would round float32 state of a bf16 parameter to bf16, so it gets the settings alone.
        super().load_state_dict({**state_dict, "state": {}})
        self._claimed.clear()
        for parameter, states in loaded.items():
            self.state[parameter] = {name: self._moved(parameter, name, states[name]) for name in states}

    def _moved(self, parameter: Tensor, name: str, loaded: Tensor) -> Tensor:
        dtype = self._state_dtype if name in MOMENTS else torch.float32
        loaded = loaded.to(self._placed.get(parameter, parameter.device), dtype).contiguous()
        home = self._homes.get(parameter, {}).get(name)
        return loaded if home is None else home.copy_(loaded)

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        names = ["threads", "_chooses_threads", "device_share", "visiting_share"]
        names += ["_state_dtype", "_compile", "_claimed", "_group_of"]
        # A copy makes its updates itself.
        own = {"_deferral": None, "_placed": {}, "_homes": {}, "_versions": {}}
        return super().__getstate__() | {name: getattr(self, name) for name in names} | own


def _all_but(count: int) -> int:
    return max(usable_cores() - count, 1)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)

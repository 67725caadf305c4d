"""The base of an adapter: a mode that hands the model to an installed system."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor, nn

from offload import (
    NO_OPTIONS,
    Attached,
    AttachOptions,
    Counters,
    Footprint,
    KnobError,
    Mode,
    Streams,
    allocator_pinned_bytes,
    l2_norm,
)

# What a module's own call does around its forward.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class PeerError(KnobError):
    """The system cannot run here. The message names the option, which no knob of it explains."""

    def under(self, path: str) -> PeerError:
        return self


@dataclass(kw_only=True, eq=False)
class Peer(Mode):
    """Hands a model to another system for the length of a run, in one process with one device.

    A dry run of it is that of a resident model, because its copies cannot be planned.

    Attributes:
        attached: the class of a model that the system has.
        option: the name in conf/offload.
        package: the module that must be installed; its requirement is in `requirements-peers.txt`.
        needs_cuda: True if it runs on CUDA devices only.
        on_host: the weights are filled in host memory, and not on the device.
        one_dtype: True if it computes with all weights in one dtype.
    """

    foreign: ClassVar[bool] = True
    lacks: ClassVar[frozenset[str]] = frozenset({"checkpoints"})
    attached: ClassVar[type[AttachedPeer]]
    option: ClassVar[str]
    package: ClassVar[str] = "torch"
    needs_cuda: ClassVar[bool] = False
    on_host: ClassVar[bool] = True
    one_dtype: ClassVar[bool] = False

    def check(self) -> None:
        if find_spec(self.package) is None:
            raise PeerError(
                "offload", self.option, f"{self.package} is not installed: pip install -r requirements-peers.txt"
            )

    def check_device(self, device: torch.device) -> None:
        if self.needs_cuda and device.type == "cpu":
            raise PeerError("offload", self.option, f"{self.package} runs on CUDA devices only, and device={device}")

    def footprint(self, model: nn.Module, recompute: bool = False, options: AttachOptions = NO_OPTIONS) -> Footprint:
        if not all(parameter.requires_grad for parameter in model.parameters()):
            raise PeerError(
                "offload", self.option, "is compared on models that train in full: take adapter=none quantize=none"
            )
        kept = [name for name, each in model.named_parameters() if each.dtype == torch.float32]
        if self.one_dtype and kept and len({each.dtype for each in model.parameters()}) > 1:
            raise PeerError(
                "offload",
                self.option,
                f"computes with all weights in one dtype, and {kept[0]} is float32 beside bf16: take precision=fp32",
            )
        return super().footprint(model, recompute, options)

    def attach(self, model: nn.Module, streams: Streams, options: AttachOptions = NO_OPTIONS) -> Attached:
        if streams.device.type == "meta":
            return super().attach(model, streams, options)
        return self.attached(self, model, streams, options)


class AttachedPeer(Attached):
    """A model that another system has.

    A subclass overrides `microbatch` where the system computes forward and backward, `own_optimizer` where it updates,
    and `close`.

    Attributes:
        mode: the knobs.
        device: on which the system computes.
    """

    mode: Peer
    device: torch.device

    def prepare(self) -> None:
        """Does what has to be done before the parameters, which have memory now, are filled."""

    def microbatch(self, loss: Callable[[], Tensor], last: bool) -> Tensor:
        """Computes a loss and its gradients; `last`: of this step's. Returns the loss, detached."""
        value = loss()
        value.backward()
        return value.detach()

    def close(self) -> None:
        """Ends the system's threads and gives up its memory."""

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        return [self.microbatch(loss, last=index == len(losses) - 1) for index, loss in enumerate(losses)]

    def _take(self, mode: Peer, streams: Streams, options: AttachOptions) -> Collection[Tensor]:
        self.mode, self.device = mode, streams.device
        self._found = _materialised(self.model, torch.device("cpu") if mode.on_host else self.device)
        self.prepare()
        return ()

    def _give_back(self) -> None:
        self.close()
        for module, name, tensor in self._found:
            (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[name] = tensor

    def _counters(self) -> Counters:
        """Returns the page-locked memory of torch's allocator, the only one that is known here."""
        return Counters(stall_ms=None, host_pinned_bytes=allocator_pinned_bytes())

    def captured(self, loss: Callable[[], Tensor]) -> tuple[tuple[Tensor, ...], float]:
        """Returns the arguments with which `loss` calls the model, and the factor that it puts on the model's loss."""
        calls: list[tuple[Tensor, ...]] = []

        def record(*arguments: Tensor) -> Tensor:
            calls.append(arguments)
            # As a loss that trains: the loop refuses others.
            return torch.ones((), requires_grad=True)

        attributes = vars(self.model)
        before = {name: attributes[name] for name in (*HOOKS, "forward") if name in attributes}
        # Hooks are left out: with them the system would begin a forward of its own.
        attributes.update({name: {} for name in HOOKS}, forward=record)
        try:
            weight = loss().item()
        finally:
            del attributes["forward"]
            attributes.update(before)
        (arguments,) = calls
        return arguments, weight


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Returns the L2 norm of all numbers of `tensors`, computed in float32; 0 for none."""
    norms = [l2_norm(tensor).cpu() for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


def adamw_group(group: dict) -> dict:
    """Returns the entries of a parameter group that torch.optim.AdamW, and optimizers called as it is, take."""
    return {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")}


def names_for_parameters(model: nn.Module, groups: list[dict]) -> None:
    """Replaces the parameters of `groups` by their names in `model`, so that nothing else holds their memory."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in groups:
        group["params"] = [names[parameter] for parameter in group["params"]]


def clip(gradients: Sequence[Tensor], clip_norm: float | None, measure: bool) -> float | None:
    """Scales `gradients` down to the norm `clip_norm`; returns their norm before, or None where it is not asked for."""
    if clip_norm is None and not measure:
        return None
    norm = norm_of(gradients)
    if clip_norm is not None and norm > clip_norm:
        factor = clip_norm / (norm + 1e-6)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _materialised(model: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, Tensor]]:
    """Gives every meta tensor of `model` memory on `device`, tied ones the same; returns what the modules held."""
    found, memory = [], {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                found.append((module, name, tensor))
                if tensor not in memory:
                    empty = torch.empty_like(tensor, device=device)
                    memory[tensor] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = memory[tensor]
    return found

"""Takes over what the user of a model changes between steps: replaced tensors, other data, what trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from offload.memory.host_memory import HostArena
from offload.torch_private.tensor_parts import wraps
from offload.weights.units.placement import check_frozen
from offload.weights.units.unit import OffloadUnit, UnitTensor


def is_as_taken(unit: OffloadUnit) -> bool:
    """Tells whether each tensor is the one that was taken over last, with its data in its place in the block.

    False where to find out takes more than a look: of fixed units and of tensors that consist of several.
    """
    if unit.compound or unit.is_fixed:
        return False
    for tensor in unit.tensors:
        host = tensor.host
        for attribute in tensor.attributes:
            # `attribute.tensor`, without the call.
            held = attribute.module._buffers if tensor.is_buffer else attribute.module._parameters
            if held.get(attribute.name) is not host:
                return False
        if not tensor.home or host.data_ptr() != tensor.home[0] or host.stride() != tensor.strides:
            return False
    return True


def take_changes(unit: OffloadUnit, arena: HostArena, end_updates: Callable[[], None] = lambda: None) -> None:
    """Takes over, between steps, what the user has changed of a unit since the last: replaced tensors and data.

    Given data moves the unit into a new block, as the user may hold views of the old one, when `end_updates` has
    blocked the host until no update writes there. Raises RuntimeError in one line for what cannot be streamed.
    """
    for tensor in unit.tensors:
        # As a rule there is none.
        if len(tensor.attributes) > 1 or tensor.attributes[0].tensor is not tensor.host:
            take_replacement(tensor, unit.weights.bytes.device)
    unit.notice_writes()
    strays = unit.strays()
    if not strays:
        return
    end_updates()
    for tensor in strays:
        if tensor.trains:
            # Who has a copy of it sees by this that the copy is outdated: memory may come back at an old address.
            torch.autograd.graph.increment_version(tensor.host)
    old = unit.weights
    unit.move_into(arena.allocate(unit.nbytes, old.name))
    arena.release(old)


def take_replacement(tensor: UnitTensor, home: torch.device) -> None:
    """Takes the tensor that all modules hold now in place of `tensor.host`: `load_state_dict(assign=True)` does that.

    `home` is the device of the unit's block. A buffer of another shape or dtype is left to its modules. Raises
    RuntimeError for a parameter that cannot be streamed.
    """
    now = {id(attribute.tensor): attribute.tensor for attribute in tensor.attributes}
    if id(tensor.host) in now and len(now) == 1:
        return
    new = next(iter(now.values()))
    if tensor.is_buffer:
        alike = len(now) == 1 and new is not None and (new.shape, new.dtype) == (tensor.shape, tensor.dtype)
        if alike and new.device.type == "cpu":
            tensor.host = new
        return
    if len(now) > 1 and any(isinstance(each, nn.Parameter) for each in now.values()):
        raise RuntimeError(
            f"{tensor.name} was replaced in one place and not in all that share it; detach the mode before that, and"
            " attach it again"
        )
    if len(now) > 1 or not isinstance(new, nn.Parameter):
        raise is_gone(tensor)
    tensor.check_data(new, home)
    tensor.host = new


def is_gone(tensor: UnitTensor) -> RuntimeError:
    """Returns the error for a parameter that its module does not hold any more."""
    return RuntimeError(
        f"{tensor.name} is no longer a parameter of its module: it was pruned, parametrized or deleted; detach the mode"
        " before that, and attach it again"
    )


def check_what_trains(unit: OffloadUnit) -> None:
    """Raises for a parameter that wants gradients of another kind or dtype than the mode makes.

    ValueError for one that wraps other tensors, and RuntimeError for one with a `grad_dtype` of its own.
    """
    for tensor in unit.trained:
        if tensor.layout.is_compound:
            check_frozen(tensor.name, tensor.host)
        if getattr(tensor.host, "grad_dtype", tensor.dtype) not in (None, tensor.dtype):
            raise RuntimeError(
                f"{tensor.name} has grad_dtype {tensor.host.grad_dtype} and streams as {tensor.dtype}, in which its"
                " gradients are summed on the device: set its grad_dtype to None, or leave its module out of the"
                " mode with `exclude`"
            )


def check_one_owner(units: Iterable[OffloadUnit]) -> None:
    """Raises RuntimeError if two parameters were made one since the mode was attached, or were given the same data."""
    owners: dict[int, UnitTensor] = {}
    for tensor in [tensor for unit in units for tensor in unit.parameters]:
        held = tensor.attributes[0].tensor
        if held is None or held.is_meta or not tensor.layout.nbytes or wraps(held):
            continue
        owner = owners.setdefault(held.data_ptr(), tensor)
        if owner is not tensor:
            raise RuntimeError(
                f"{owner.name} and {tensor.name} share memory, which they did not when the mode was attached: detach"
                " it before they are tied, or copy (parameter.data = other.data.clone())"
            )


@contextmanager
def counting_fused_updates() -> Iterator[None]:
    """Surrounds code in which the `step` of a fused optimizer advances the version counters of its parameters.

    Its kernels do not. An optimizer whose `step` is inside a step (LBFGS) has to show that slots are out of date.
    """
    handle = register_optimizer_step_post_hook(_count)
    try:
        yield
    finally:
        handle.remove()


def _count(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.is_inference():
                    torch.autograd.graph.increment_version(parameter)

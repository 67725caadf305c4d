"""Gives the buffers of a transformers model that was built on the meta device their values.

Buffers such as rotary frequencies are computed when a model is made, and are in no file of weights. A model that was
made on the meta device lacks them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

# A model whose buffers differ between these seeds has random ones.
SEEDS = (0, 1)


@torch.no_grad()
def fill_buffers(model: nn.Module) -> None:
    """Fills every buffer in place with the value that it has in a model built on the CPU, bit for bit.

    The model's class is built again with the same configuration, on the CPU: its buffers have memory, its parameters
    none. So it is transformers that computes the values, and no architecture needs a line here. Buffers of the state
    dict (those of batch norms, say) get their first values; load weights after this.

    Raises:
        ValueError: a buffer is on the meta device, has random values or is not in the model built again; or a module
            holds a tensor of the meta device that is neither parameter nor buffer. Nothing has been written then.
    """
    values = dict(model_without_weights(model.hf).named_buffers(remove_duplicate=False))
    buffers = dict(model.hf.named_buffers(remove_duplicate=False))
    _refuse([name for name, buffer in buffers.items() if buffer.is_meta], "allocate the memory of the model before")
    wrong = [n for n, b in buffers.items() if n not in values or values[n].shape != b.shape or values[n].is_meta]
    _refuse(wrong, "the model built again has no value for it, so build this model on the CPU")
    _refuse(_loose_tensors(model.hf), "it is neither parameter nor buffer, so build this model on the CPU")
    for name, buffer in buffers.items():
        buffer.copy_(values[name])


def model_without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Builds the model's class with its configuration: buffers on the CPU, and parameters on the meta device.

    Every parameter goes to the meta device as it is registered. Until then its memory is reserved and not written, so
    that none of the system's is used, as a rule. Random numbers of the caller are not changed.

    Raises:
        ValueError: buffers have random values.
    """
    built = []
    with torch.random.fork_rng(devices=[]):
        for seed in SEEDS:
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            built.append(build_again(model))
            if torch.equal(state, torch.get_rng_state()):
                break
    first, last = (dict(one.named_buffers()) for one in (built[0], built[-1]))
    differing = [name for name, value in first.items() if not torch.equal(value, last[name])]
    _refuse(differing, "its values are random, so build this model on the CPU")
    return built[0]


def build_again(model: PreTrainedModel, kept: Collection[tuple[type[nn.Module], str]] = ()) -> PreTrainedModel:
    """Builds as `model_without_weights` does, with the random numbers of torch's generator as it is.

    `kept`: parameters that keep their memory and the values that they are made with, as class and attribute of their
    module.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or (type(module), name) in kept:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    config = copy.deepcopy(model.config)
    hook = register_module_parameter_registration_hook(to_meta)
    try:
        with torch.device("cpu"):
            # It sets the dtype while the model is made, and sub-configurations have their own.
            return type(model)._from_config(config, dtype=model.dtype)
    finally:
        hook.remove()


def _loose_tensors(model: nn.Module) -> list[str]:
    return [
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]


def _refuse(names: list[str], advice: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise ValueError(f"{names[0]}{more}: {advice}")

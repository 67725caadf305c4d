"""Builds a model a second time, on the CPU and without memory for its weights: for its buffers and first values.

A model that was made on the meta device lacks these values, and no file of weights has them. So it is the library that
computes them, and no architecture needs a line here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

Model = TypeVar("Model", bound=nn.Module)
Build = Callable[[], Model]
"""makes the same model again"""

# The attributes that torch keeps in a module: its parameters, buffers, hooks.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# A model whose buffers differ between these seeds has random ones.
SEEDS = (0, 1)


def without_weights(build: Build, kept: Collection[tuple[type[nn.Module], str]] = ()) -> Model:
    """Builds the model with its buffers on the CPU and its parameters on the meta device.

    Every parameter goes to the meta device as it is registered. Until then its memory is reserved and not written, so
    that none of the system's is used, as a rule. Random numbers are those of torch's generator as it is.

    `kept`: parameters that keep their memory and the values that they are made with, as class and attribute of their
    module.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or (type(module), name) in kept:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    with register_module_parameter_registration_hook(to_meta), torch.device("cpu"):
        return build()


def with_buffers(build: Build) -> Model:
    """Builds as `without_weights` does; random numbers of the caller are not changed.

    Raises ValueError if buffers, or tensors that are neither parameters nor buffers, have random values.
    """
    built = []
    with torch.random.fork_rng(devices=[]):
        for seed in SEEDS:
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            built.append(without_weights(build))
            if torch.equal(state, torch.get_rng_state()):
                break
    first, last = (_computed(one) for one in (built[0], built[-1]))
    for name, values in first.items():
        if any(
            not value.is_meta and not torch.equal(value, other) for value, other in zip(values, last[name], strict=True)
        ):
            raise ValueError(f"{name}: its values are random, so build this model on the CPU")
    return built[0]


def _computed(model: nn.Module) -> dict[str, list[Tensor]]:
    return {name: [buffer] for name, buffer in model.named_buffers()} | loose_tensors(model)


def loose_tensors(model: nn.Module) -> dict[str, list[Tensor]]:
    """Returns the plain attributes of modules that are or contain tensors, neither parameters nor buffers, by name.

    Contained are the tensors in lists, tuples and dictionaries.
    """
    named = (
        (f"{name}.{attribute}" if name else attribute, list(_tensors_in(value)))
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in OF_EVERY_MODULE
    )
    return {name: tensors for name, tensors in named if tensors}


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


@torch.no_grad()
def fill_buffers(model: nn.Module, build: Build, build_stored: Build | None = None) -> None:
    """Fills every buffer in place with the value that it has in a model built on the CPU, bit for bit.

    Values are converted to the dtype of the buffer. Buffers of the state dict (those of batch norms, say) get their
    initial values; load weights after this. Parameters and the caller's random numbers are not changed.

    A plain attribute of a module that is a tensor of the meta device, or a list of some (diffusers has such tables of
    rotary places, because complex numbers in buffers would be converted), becomes that of the model built again, on the
    CPU: no `.to` of the model moves it, and the module's forward does.

    Args:
        build: makes the same model again; its buffers take memory, its parameters none.
        build_stored: makes the one that has the values for buffers of the state dict; by default `build`.

    Raises ValueError if a buffer is on the meta device; or a buffer or such a tensor has random values, depends on
    parameters or is not in the model built again. Nothing has been written then.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    _refuse([name for name, buffer in buffers.items() if buffer.is_meta], "allocate the memory of the model before")
    loose = {name: tensors for name, tensors in loose_tensors(model).items() if any(t.is_meta for t in tensors)}
    if not buffers and not loose:
        return
    built = with_buffers(build)
    values = dict(built.named_buffers(remove_duplicate=False))
    stored = buffers.keys() & model.state_dict(keep_vars=True).keys()
    if build_stored is not None and any(buffers[name].is_floating_point() for name in stored):
        values |= {n: b for n, b in with_buffers(build_stored).named_buffers(remove_duplicate=False) if n in stored}
    wrong = [n for n, b in buffers.items() if n not in values or values[n].shape != b.shape or values[n].is_meta]
    made = loose_tensors(built)
    wrong += [
        name
        for name, tensors in loose.items()
        if [tensor.shape for tensor in made.get(name, ())] != [tensor.shape for tensor in tensors]
        or any(tensor.is_meta for tensor in made[name])
    ]
    _refuse(wrong, "the model built again has no value for it, so build this model on the CPU")
    for name, buffer in buffers.items():
        buffer.copy_(values[name])
    for name in loose:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, getattr(built.get_submodule(path), attribute))


def with_statistics(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the norms that keep running statistics of the examples which they see, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            yield name, module


def _refuse(names: list[str], advice: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise ValueError(f"{names[0]}{more}: {advice}")


def as_made(model: nn.Module, build: Build, names: Iterable[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters of `model`, by name, with the values that construction makes them with.

    Random ones come from torch's generator on the CPU, seeded by `seed`. Raises ValueError for a parameter that
    construction gives no value.
    """
    names = list(names)
    if not names:
        return
    places = [name.rpartition(".") for name in names]
    kinds = {(type(model.get_submodule(path)), own) for path, _, own in places}
    # Memory that nothing is written to is NaN then.
    settings = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(digest(f"{seed}"))
            made = without_weights(build, kinds)
    finally:
        torch.use_deterministic_algorithms(settings[0], warn_only=settings[1])
    for name in names:
        value = made.get_parameter(name)
        refuse_nan(name, value)
        yield name, value


def refuse_nan(name: str, value: Tensor) -> None:
    """Raises ValueError for a parameter that was filled with NaN, and that its library wrote nothing to."""
    if value.isnan().any():
        raise ValueError(f"{name}: its library gives it no first value: load weights instead")


def digest(key: str) -> int:
    """Returns the seed that a text stands for, an int64."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)

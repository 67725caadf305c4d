"""Initial values of the parameters of a transformers model: its own distributions, as a function of seed and name.

transformers knows for each architecture how its parameters begin: zeros for the norms of Gemma, which add one; a
smaller deviation for the projections into GPT-2's residual stream; the transition matrix of Mamba. But it draws from
one generator in one order, on the device where each parameter is. `models.initialise` depends on seed and name alone,
and knows none of this. Here transformers says what each parameter begins with, and the hash gives the numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, initialization

from models.built_again import as_made, digest, refuse_nan, with_buffers
from models.hf_source import same_again
from models.initialise import Draws, check_initialisable
from models.quantise import values_of

# The functions of torch that do nothing to a tensor of the meta device.
LEFT_OUT = ("trunc_normal_", "orthogonal_", "dirac_", "sparse_")


@dataclass(frozen=True)
class Write:
    """An operation that wrote into a parameter, or a view of it, during the initialisation of `module`.

    Attributes:
        module: the name of the module.
        fill: the constant that was written, or None.
        std: the standard deviation of the normal numbers with mean 0 that were written, or None.
        whole: every element was written.
        view: size, strides and offset, in elements.
    """

    module: str
    fill: float | None
    std: float | None
    whole: bool
    view: tuple[tuple[int, ...], tuple[int, ...], int]


@torch.no_grad()
def initialise_hf(model: nn.Module, seed: int, device: torch.device | str | None = None) -> None:
    """Fills every parameter in place, on its own device, as transformers' own initialisation would.

    * Constants (norms, biases, tokens) are those of transformers.
    * Normal numbers with mean 0, most of every model, have the standard deviation of transformers, and come from
      `models.initialise.HashNormal` by (seed, name, index): the same bits on every device.
    * Anything else (uniform, truncated or computed numbers, such as Mamba's A_log and dt_proj) is what transformers
      computes for the module on the CPU in float32, with torch's generator seeded by (seed, the module's name).

    * A tensor that transformers' initialisation leaves alone (a few convolutions and biases) has the value that its
      module was made with, on the CPU with torch's generator seeded by `seed`.

    So a value depends neither on the order of filling nor on the mode, the device or the dtype (but for rounding to
    it). The initialisation runs on the meta device once, and what it writes shows which of these a tensor is.
    Tied parameters have the value of the one that the others are tied to. Buffers are not changed:
    `models.built_again.fill_buffers`.

    Args:
        seed: any integer.
        device: where hashed numbers are computed before they are copied; by default the parameter's own device.

    Raises ValueError if a parameter is on the meta device or has no floating-point dtype, and nothing has been written
    then; or transformers gives it no value.
    """
    parameters = dict(model.hf.named_parameters())
    check_initialisable(parameters.items())
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            raise ValueError(f"{name} is not contiguous: allocate it as the model made it")
    shell = with_buffers(partial(same_again, model.hf))
    sources = _sources(shell)
    for name in parameters:
        if name not in sources:
            raise ValueError(f"{name} is tied to another parameter in transformers, but not in this model: tie them")
    parameters = {sources[name]: parameter for name, parameter in parameters.items()}
    writes = _watched(shell)
    draws = Draws(seed, device)
    computed: dict[str, list[str]] = {}
    left = []
    for name, parameter in parameters.items():
        final = _final(writes[name])
        if not writes[name]:
            left.append(name)
        elif final is None:
            computed.setdefault(writes[name][-1].module, []).append(name)
        else:
            with values_of(parameter) as values:
                _write(values, name, final, draws)
    for module, names in computed.items():
        for name, value in _computed(shell, module, names, seed):
            parameters[name].detach().copy_(value)
    for name, value in as_made(model.hf, partial(same_again, model.hf), left, seed):
        parameters[name].detach().copy_(value)


def _write(values: Tensor, name: str, final: Sequence[Write], draws: Draws) -> None:
    """Writes the value of the parameter `name`: a constant or normal numbers, then constants into parts of it."""
    if final[0].std is None:
        values.fill_(final[0].fill)
    else:
        draws.normal(values, name, final[0].std)
    for write in final[1:]:
        _part(values, write).fill_(write.fill)


def _part(values: Tensor, write: Write) -> Tensor:
    """Returns the elements of a parameter's `values` that `write` wrote."""
    size, strides, offset = write.view
    # The parameter may begin anywhere in its storage.
    return values.as_strided(size, strides, values.storage_offset() + offset)


def _final(writes: list[Write]) -> list[Write] | None:
    """Returns the writes that give a parameter its value: a whole one, then constants into parts of it.

    None if they do not: the parameter must be computed.
    """
    for index in reversed(range(len(writes))):
        if writes[index].whole and (writes[index].std is not None or writes[index].fill is not None):
            final = writes[index:]
            return final if all(write.fill is not None for write in final[1:]) else None
    return None


def _sources(shell: PreTrainedModel) -> dict[str, str]:
    """Returns for each parameter the one that has its initial value; then the parameters are tied no more.

    transformers ties parameters after their initialisation, so what it wrote into the others is lost.
    """
    names = [name for name, _ in shell.named_parameters()]
    tied = shell.all_tied_weights_keys
    for target in tied:
        path, _, own = target.rpartition(".")
        setattr(shell.get_submodule(path), own, nn.Parameter(torch.empty_like(shell.get_parameter(target))))
    return {name: tied.get(name, name) for name in names}


def _watched(shell: PreTrainedModel) -> dict[str, list[Write]]:
    """Runs transformers' initialisation of a model without weights; returns what it wrote, by parameter."""
    with torch.random.fork_rng(devices=[]), _Watch(shell) as watch, _visible_everywhere():
        for name, module, owner in _in_order(shell, shell, ""):
            watch.module = name
            owner._init_weights(module)
    return watch.writes


def _in_order(module: nn.Module, owner: PreTrainedModel, name: str) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yields modules in the order in which transformers initialises them, each with the model that does it."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        yield from _in_order(child, child if isinstance(child, PreTrainedModel) else owner, path)
    yield name, module, owner


@contextmanager
def _visible_everywhere() -> Iterator[None]:
    """Lets those writes be seen that torch leaves out on the meta device."""
    functions = {name: lambda tensor, **_: tensor.uniform_() for name in LEFT_OUT}
    with patch.dict(initialization.TORCH_INIT_FUNCTIONS, functions):
        yield


class _Watch(TorchDispatchMode):
    """Records the writes into the parameters of a model on the meta device."""

    def __init__(self, shell: PreTrainedModel) -> None:
        super().__init__()
        self.module = ""
        self.writes: dict[str, list[Write]] = {name: [] for name, _ in shell.named_parameters()}
        self._parameters = {_storage(parameter): (name, parameter) for name, parameter in shell.named_parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(tensor, Tensor) and _storage(tensor) in self._parameters:
                    self._record(tensor, func.overloadpacket.__name__, args, kwargs)
        return func(*args, **kwargs)

    def _record(self, tensor: Tensor, operation: str, args: tuple, kwargs: dict) -> None:
        name, parameter = self._parameters[_storage(tensor)]
        fill = std = None
        if operation == "zero_":
            fill = 0.0
        elif operation == "fill_" and not isinstance(args[1], Tensor):
            fill = float(args[1])
        elif operation == "normal_":
            mean, deviation = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
            std = deviation if mean == 0 else None
        view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        self.writes[name].append(Write(self.module, fill, std, tensor.numel() == parameter.numel(), view))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _computed(shell: PreTrainedModel, module: str, names: list[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters as transformers computes them on the CPU; `module` is the one whose initialisation does."""
    original, owner = next((found, owner) for name, found, owner in _in_order(shell, shell, "") if name == module)
    copied = copy.deepcopy(original)
    prefix = f"{module}." if module else ""
    values: dict[str, nn.Parameter] = {}
    for name in names:
        path, _, own = name.removeprefix(prefix).rpartition(".")
        place = copied.get_submodule(path)
        # NaN, to find what the initialisation leaves out.
        values[name] = nn.Parameter(torch.full(getattr(place, own).shape, torch.nan, device="cpu"))
        setattr(place, own, values[name])
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _in_place_of(original, copied, module, shell):
        torch.manual_seed(digest(f"{seed}/{module}"))
        (copied if owner is original else owner)._init_weights(copied)
    for name, value in values.items():
        refuse_nan(name, value)
        yield name, value


@contextmanager
def _in_place_of(original: nn.Module, other: nn.Module, name: str, shell: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model has another module of that name: xLSTM looks up which one it initialises."""
    with ExitStack() as undo:
        if name:
            shell.set_submodule(name, other)
            undo.callback(shell.set_submodule, name, original)
        yield

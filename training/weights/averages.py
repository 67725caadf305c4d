"""Averages of the weights that train (EMA), in float32 in host memory: for samples, evaluations and export.

The rule is that of diffusers' `EMAModel` with its defaults, which has it from TensorFlow's `ExponentialMovingAverage`:
after step n the average moves towards the weight by 1 - min(decay, n / (9 + n)) of the distance, and in the first step
all the way. So the average of a short run, or of the beginning of a long one, forgets the initial weights soon.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from models.adapter_files import adapter_parameters
from models.adapters import is_adapted
from models.safetensors_files import StoredTensor, read_headers
from models.weights import named_tensors
from training.runs.checkpoint_files import EMA_STEM

# The most elements that are averaged at a time, in scratch that stays in the caches. Small weights are joined to as
# many: a device is asked once for all of them.
PIECE = 1 << 20

# Calls a function with weights once they are updated, on another thread; returns these weights.
Beside = Callable[[Callable[[Iterable[nn.Parameter]], None]], Collection[nn.Parameter]]


def trained_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns what trains in `model`, under the names that it has in a checkpoint's files of weights."""
    if is_adapted(model):
        return adapter_parameters(model)
    return {names[0]: tensor for tensor, names in named_tensors(model) if tensor.requires_grad}


class Averages:
    """The averages of all that trains in `model`, which has its values; `tensors` by the names of `trained_by_name`."""

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        trained = trained_by_name(model)
        # Of a tied weight, which may have several names, there is one.
        weights = list(dict.fromkeys(trained.values()))
        self._flat = torch.empty(sum(weight.numel() for weight in weights), dtype=torch.float32, device="cpu")
        parts = self._flat.split([weight.numel() for weight in weights])
        self._average_of = {weight: part.view(weight.shape) for weight, part in zip(weights, parts, strict=True)}
        for weight, average in self._average_of.items():
            average.copy_(weight.detach())
        self.tensors = {name: self._average_of[weight] for name, weight in trained.items()}

    def update(self, step: int, beside: Beside = lambda act: ()) -> None:
        """Averages the weights after `step`, from 1: all that `beside` does not take before this returns."""
        add = partial(self._add, 1 - min(self._decay, step / (9 + step) if step > 1 else 0.0))
        taken = beside(add)
        add(weight for weight in self._average_of if weight not in taken)

    @torch.no_grad()
    def _add(self, share: float, weights: Iterable[nn.Parameter]) -> None:
        for group in self._groups(weights):
            flat = [weight.reshape(-1) for weight in group]
            values = flat[0] if len(flat) == 1 else torch.cat(flat)
            first = self._average_of[group[0]].storage_offset()
            means = self._flat[first : first + len(values)]
            for mean, now in zip(means.split(PIECE), values.split(PIECE), strict=True):
                # In the operations of EMAModel, none of which is fused: so every CPU gets the same bits.
                mean.sub_((mean - _on_host(now).float()).mul_(share))

    def _groups(self, weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Returns the weights in groups of one device whose averages follow each other: of a piece, or a larger one."""
        groups: list[list[nn.Parameter]] = []
        first = end = 0
        for weight in weights:
            start = self._average_of[weight].storage_offset()
            joins = bool(groups) and start == end and weight.device == groups[-1][0].device
            end = start + weight.numel()
            if joins and end - first <= PIECE:
                groups[-1].append(weight)
            else:
                groups.append([weight])
                first = start
        return groups

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block the model has the averages; afterwards it has its own weights again, equal in every bit.

        They are kept in host memory meanwhile. The optimizer must make no update inside the block.
        """
        own = {weight: weight.detach().to("cpu", copy=True) for weight in self._average_of}
        try:
            _write(self._average_of)
            yield
        finally:
            _write(own)


def averages_in(checkpoint: Path, decay: float | None) -> dict[str, StoredTensor]:
    """Returns the places of a checkpoint's averages in its files, by name; {} if `decay` is None.

    Raises ValueError if `decay` is given and the checkpoint has no averages.
    """
    if decay is None:
        return {}
    files = sorted(checkpoint.glob(f"{EMA_STEM}*.safetensors"))
    if not files:
        raise ValueError(f"ema={decay}: {checkpoint} has no averages: give ema=null for its weights")
    return read_headers(files)


def _on_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    # Of page-locked memory torch keeps what was made before.
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


@torch.no_grad()
def _write(values: dict[nn.Parameter, Tensor]) -> None:
    for weight, value in values.items():
        weight.copy_(value)

"""Frozen models in safetensors-like files, for tests of weights that stay in their files."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.files import mapped_files
from offload.files.mapped_files import FileSpan
from offload.modes.mode import NO_OPTIONS, AttachOptions
from offload.modes.weight_mode import WeightMode
from tests.offload.helpers.models import stack_inputs, under

_names = itertools.count()


class LowRank(nn.Module):
    """A frozen linear layer beside two small matrices that train."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base(rows) + self.up(self.down(rows))


def with_low_rank(model: nn.Module) -> nn.Module:
    """Freezes `model`, and puts low-rank matrices beside its linear layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LowRank(child))
    return model


def write_frozen(model: nn.Module, folder: Path, start: int = 24) -> dict[torch.Tensor, list[FileSpan]]:
    """Writes the frozen parameters of `model` into two files, in no order of use; returns where each is."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad][::-1]
    spans = {}
    for half in (frozen[::2], frozen[1::2]):
        path, content = folder / f"{next(_names)}.safetensors", bytearray(start)
        for parameter in half:
            spans[parameter] = [FileSpan(path, len(content), parameter.nbytes)]
            content += bytes(parameter.detach().contiguous().view(-1).view(torch.uint8).tolist())
        path.write_bytes(content)
    return spans


def files_of(spans: dict[torch.Tensor, list[FileSpan]]) -> list[Path]:
    return sorted({span.path for each in spans.values() for span in each})


def losses_of(
    model: nn.Module, step: int, microbatches: int = 2, device: str = "cpu"
) -> list[Callable[[], torch.Tensor]]:
    return [partial(lambda k: model(stack_inputs(step, k, device)).square().mean(), k) for k in range(microbatches)]


def trained(
    model: nn.Module, mode: WeightMode, steps: int = 2, device: str = "cpu", options: AttachOptions = NO_OPTIONS
) -> list[torch.Tensor]:
    """Trains `model` under `mode`, then runs forwards; returns losses, outputs and the state dict, on the host."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen = []
    with under(mode, model, device, options) as attached:
        for step in range(steps):
            with attached.step():
                seen += attached.accumulate(losses_of(model, step, device=device))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            with attached.inference():
                seen += [model(stack_inputs(8, k, device)) for k in range(3)]
            seen.append(model(stack_inputs(9, 0, device)))
        seen += [value.clone() for value in model.state_dict().values()]
    return [value.cpu() for value in seen]


@contextmanager
def reads_through(read: Callable[..., int]) -> Iterator[None]:
    """Passes every read of a file to `read`, with the system's own function and its arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_files.os, "preadv", partial(read, os.preadv))
        yield

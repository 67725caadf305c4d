"""Delete any one wait, record or synchronize of the engine, and the twin must notice."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from support import Stack, attached, stack_inputs, train
from torch import nn

import offload
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.ordering import CheckedEvent, CheckedStream, CheckedStreams, StreamOrderError

ENGINE = Path(offload.__file__).parent
CALLS = ((CheckedStream, "wait_event"), (CheckedEvent, "record"), (CheckedStreams, "synchronize"))


def _site() -> str:
    """The engine's line that made the call. `Transfer` and `Telemetry` act for a caller: their line and his."""
    frame, lines = sys._getframe(2), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == ENGINE and path.name != "telemetry.py":
            lines.append(f"{path.name}:{frame.f_lineno}")
            if path.name != "transfer.py":
                break
        frame = frame.f_back
    return " from ".join(lines)


class _Sites:
    """Notes every call site of the synchronisation primitives and disables the ones in `deleted`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: set[str] = set()
        self.deleted: str | None = None
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def _watched(self, original, name: str):
        def call(*arguments):
            site = f"{name} at {_site()}"
            self.seen.add(site)
            if site != self.deleted:
                original(*arguments)

        return call


def _statistics() -> nn.Module:
    """Buffers that forward updates."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*blocks)))


def _scenario() -> None:
    """Fewer slots than units, recompute, accumulation, a lone layer, and a step without backward."""
    for slots in (1, 2, 3):
        train(Stack(recompute="non-reentrant"), BounceLinear(slots=slots), steps=3)
    train(nn.Linear(8, 4), BounceLinear(), steps=2)
    model, mode = Stack(), BounceLinear()
    with attached(mode, model):
        for _ in range(3):
            with mode.step(), torch.no_grad():
                model.stem(stack_inputs(0, 0))
                model.blocks[0](torch.ones(5, 16))
        with torch.no_grad():
            model(stack_inputs(0, 0))
    for slots in (1, 2, 3):
        model, mode = _statistics(), LayerStream(layers="layers", slots=slots)
        train(model, mode, stack_inputs, steps=2)
        with attached(mode, model), torch.no_grad():
            model(stack_inputs(0, 0))


def test_every_wait_and_record_is_needed(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    sites = _Sites(monkeypatch)
    _scenario()
    every_site = sorted(sites.seen)
    assert len(every_site) >= 10
    survivors = []
    for site in every_site:
        sites.deleted = site
        try:
            _scenario()
        except StreamOrderError:
            continue
        survivors.append(site)
    assert not survivors

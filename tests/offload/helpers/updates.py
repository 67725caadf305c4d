"""Trains models with updates beside the step, by workers of every pace."""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached, AttachOptions
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.worker import UpdateWorker
from offload.speculation.trials import Speculation
from offload.speculation.updates import SpeculativeOverlap
from tests.offload.helpers.models import Stack, stack_inputs, under
from tests.offload.helpers.optimizers import SETTINGS
from training.run.loop import clip_scale, gradient_norm

MODES = {
    "bounce_linear": lambda: BounceLinear(slots=3, outside="stream"),
    "layer_stream": lambda: LayerStream(slots=2, outside="stream"),
    "shard_offload": lambda: ShardOffload(shards=2),
    "tensor_swap over layer_stream": lambda: TensorSwap(LayerStream(slots=2)),
}
EARLY = pytest.mark.parametrize("early", [False, True], ids=["at step", "early"])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WORKER = "host optimizer"


class Mixed(Stack):
    """Frozen parameters, weights tied across blocks, buffers, and every third forward skips a block."""

    def __init__(self):
        super().__init__(depth=5, dropout=0.2)
        self.blocks[1].norm.requires_grad_(False)
        self.blocks[4].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm = nn.BatchNorm1d(16)
        self.forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        skipped = 3 if self.forwards // 3 % 3 == 2 else None
        self.forwards += 1
        hidden = self.stem(inputs)
        for index, block in enumerate(self.blocks):
            if index != skipped:
                hidden = block(hidden)
        return self.head(hidden)


def host_adamw(model: nn.Module, **options) -> HostAdamW:
    options = {"threads": 1, "decay_norms_and_biases": False} | options
    return HostAdamW(model.parameters(), **SETTINGS, **options)


@contextmanager
def updating(
    mode,
    model: nn.Module,
    early: bool,
    device_share: int = 0,
    speculation: Speculation | None = None,
    releases: bool = False,
    **options,
) -> Iterator[tuple[Attached, HostAdamW]]:
    """Attaches `mode` to `model` for the length of the block; the optimizer that it yields updates beside the step."""
    with under(mode, model, options=AttachOptions(release_gradients=releases)) as attached:
        optimizer = host_adamw(model, **options)
        attached.overlap(optimizer, early, device_share, speculation)
        yield attached, optimizer


def one_step(
    model: nn.Module, attached: Attached, step: int = 0, microbatches: int = 1, inputs=stack_inputs, norms: bool = False
):
    def loss_of(microbatch: int) -> torch.Tensor:
        torch.manual_seed(100 * step + microbatch)
        given = inputs(step, microbatch)
        given = given.to(next(model.parameters()).dtype) if given.is_floating_point() else given
        return model(given).float().square().mean() / microbatches

    with attached.step(norms=norms):
        return attached.accumulate([functools.partial(loss_of, index) for index in range(microbatches)])


def train(
    model: nn.Module,
    mode,
    early: bool = False,
    *,
    steps: int = 8,
    microbatches: int = 1,
    clip_norm: float | None = None,
    overlaps: bool = True,
    device_share: int = 0,
    speculation: Speculation | None = None,
    releases: bool = False,
    inputs=stack_inputs,
    device: str = "cpu",
    after_step: Callable[[Attached, HostAdamW], list[torch.Tensor]] = lambda attached, optimizer: [],
    **options,
) -> list[torch.Tensor]:
    """Returns every loss and result of `after_step`, and at the end the optimizer's state, weights and buffers."""
    seen = []
    with under(mode, model, device, AttachOptions(release_gradients=releases)) as attached:
        optimizer = host_adamw(model, **options)
        if overlaps:
            attached.overlap(optimizer, early, device_share, speculation)
        schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1 / (step + 1)))
        for step in range(steps):
            seen += one_step(model, attached, step, microbatches, inputs, norms=clip_norm is not None)
            norm = gradient_norm(model, attached.gradient_norms()) if clip_norm is not None else 0.0
            if math.isfinite(norm):
                optimizer.step(scale=clip_scale(norm, clip_norm))
            else:
                optimizer.skip()
            seen += after_step(attached, optimizer)
            optimizer.zero_grad()
            schedule.step()
    return seen + states_of(optimizer) + [tensor.detach().clone() for tensor in model.state_dict().values()]


def states_of(optimizer: HostAdamW) -> list[torch.Tensor]:
    """Returns copies of all states, parameter by parameter."""
    states = optimizer.state_dict()["state"]
    return [states[index][name].clone() for index in sorted(states) for name in sorted(states[index])]


def made(model: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return model().to(dtype)


def decides_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the worker make the updates that it was offered before it knows whether they count, at any load."""
    settle = SpeculativeOverlap._settle

    def settle_later(self, unit, decision) -> None:
        while self._worker.is_busy:
            time.sleep(0.001)
        settle(self, unit, decision)

    monkeypatch.setattr(SpeculativeOverlap, "_settle", settle_later)


def sleepy(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.005) -> list[str]:
    """Makes the worker slow. Returns the names of the threads that made updates, in their order."""
    apply, threads = HostAdamW.apply, []

    def late_apply(self, claims, scale=1.0):
        threads.append(threading.current_thread().name)
        if threads[-1] == WORKER:
            time.sleep(seconds)
        apply(self, claims, scale)

    monkeypatch.setattr(HostAdamW, "apply", late_apply)
    return threads


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes the worker wait before each update until the returned event is set."""
    apply, gate = HostAdamW.apply, threading.Event()

    def gated(self, claims, scale=1.0):
        if threading.current_thread().name == WORKER:
            gate.wait(timeout=600)
        apply(self, claims, scale)

    monkeypatch.setattr(HostAdamW, "apply", gated)
    return gate


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the worker fast: each update is done before its offer returns."""
    offer = UpdateWorker.offer

    def offered_and_done(self, update):
        done = offer(self, update)
        while not done.is_set():
            time.sleep(0.0005)
        return done

    monkeypatch.setattr(UpdateWorker, "offer", offered_and_done)


def no_worker_lives() -> bool:
    return all(thread.name != WORKER for thread in threading.enumerate())

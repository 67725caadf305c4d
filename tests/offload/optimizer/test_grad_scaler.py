"""torch.amp.GradScaler, and writes that no version counter shows, with updates that begin before `step`."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.optimizer.adamw import HostAdamW
from offload.speculation.trials import Speculation, mark_of
from offload.streams.registry import acquire, release

TRIALS = {"early": False, "speculation": Speculation(1e9, 1 << 22)}
DEFERRED = {"early": False}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))


def train(
    mode: Mode,
    overlap: dict | None,
    end: Callable[[HostAdamW, torch.amp.GradScaler], None],
    infinite: int | None = None,
) -> tuple[list[Tensor], float]:
    """Trains with a scaler; `end` ends each step. The loss of step `infinite` is. Returns the weights and the scale."""
    model, streams = blocks(), acquire("cpu")
    attached = mode.attach(model, streams)
    try:
        optimizer = HostAdamW(model.parameters(), lr=1e-2, threads=1, speculate="on")
        if overlap is not None:
            attached.overlap(optimizer, **overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            factor = torch.inf if step == infinite else 1.0
            with attached.step():
                attached.accumulate([lambda: scaler.scale(model(inputs).square().mean() * factor)])  # noqa: B023
            if overlap is not None:
                # The trials are made, before anybody writes.
                while attached._overlap._worker.is_busy:
                    time.sleep(0.001)
            end(optimizer, scaler)
            optimizer.zero_grad()
        optimizer.finish()
        return [parameter.detach().clone() for parameter in model.parameters()], scaler.get_scale()
    finally:
        attached.detach()
        release(streams)


def scaled_step(optimizer: HostAdamW, scaler: torch.amp.GradScaler) -> None:
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.sampled
@pytest.mark.parametrize("infinite", [None, 0, 2])
@pytest.mark.parametrize("overlap", [None, DEFERRED, TRIALS], ids=["step", "deferred", "speculative"])
def test_a_scaler_changes_nothing_but_what_it_skips(overlap: dict | None, infinite: int | None):
    def torchs_own(optimizer: HostAdamW, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(optimizer)
        if all(parameter.grad.isfinite().all() for parameter in optimizer.param_groups[0]["params"]):
            optimizer.step()
        scaler.update()

    expected, scale = train(Resident(), None, torchs_own, infinite)
    found, found_scale = train(LayerStream(slots=2), overlap, scaled_step, infinite)
    assert found_scale == scale
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# In the first step no update begins inside backward.
@pytest.mark.parametrize("infinite", [None, 1], ids=["scale", "skip"])
def test_a_scaler_is_too_late_for_updates_inside_backward(infinite: int | None):
    what = "GradScaler skips this step" if infinite == 1 else r"step\(scale=0.000976562\)"
    with pytest.raises(RuntimeError, match=f"^{what}: updates of this step have begun inside backward"):
        train(LayerStream(slots=2), {"early": True}, scaled_step, infinite)


UNSEEN = {
    "unscale": lambda optimizer, scaler, parameters: scaler.unscale_(optimizer),
    "data": lambda optimizer, scaler, parameters: parameters[3].grad.data.mul_(0.5),
    "numpy": lambda optimizer, scaler, parameters: parameters[3].grad.numpy().fill(0.1),
    "weight": lambda optimizer, scaler, parameters: parameters[3].data.mul_(0.5),
}


@pytest.mark.parametrize("write", UNSEEN)
def test_writes_without_a_counter_are_refused_between_backward_and_step(write: str):
    def end(optimizer: HostAdamW, scaler: torch.amp.GradScaler, finishes: bool = False) -> None:
        if finishes:
            optimizer.finish()
        UNSEEN[write](optimizer, scaler, optimizer.param_groups[0]["params"])
        optimizer.step()
        optimizer.finish()
        if write == "unscale":
            scaler.update()

    with pytest.raises(RuntimeError, match=r"changed between backward and .* optimizer.finish\(\) before the change"):
        train(LayerStream(slots=2), TRIALS, end)
    found, _ = train(LayerStream(slots=2), TRIALS, lambda *given: end(*given, finishes=True))
    expected, _ = train(Resident(), None, end)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_mark_shows_its_parts_alone():
    tensor = torch.arange(64, dtype=torch.bfloat16).view(8, 8).t()
    before = mark_of(tensor, [range(8, 16)])
    tensor.data[0] = 9.0
    assert mark_of(tensor, [range(8, 16)]) == before
    tensor.data[1] = 9.0
    assert mark_of(tensor, [range(8, 16)]) != before

"""Updates that are made before the norm is known, and undone where it clips, leave the numbers of deferred updates."""

import functools
import time

import pytest
import torch
from torch import nn

from offload.knobs import KnobError
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.overlap import Overlap
from offload.speculation.trials import Speculation, Trials
from offload.speculation.undo_log import UndoLog
from tests.offload.helpers.kernels import needs_compiler
from tests.offload.helpers.models import Stack, assert_same, under
from tests.offload.helpers.updates import (
    DTYPES,
    MODES,
    Mixed,
    eager,
    held_up,
    host_adamw,
    made,
    one_step,
    sleepy,
    train,
    updating,
)
from training.run.loop import gradient_norm

pytestmark = [pytest.mark.usefixtures("small"), needs_compiler]

PLENTY = 1 << 24


@functools.cache
def norms(model: str, dtype: str, microbatches: int, steps: int) -> list[float]:
    """The norms of the gradients of a run that is not clipped."""
    seen, watched = [], made(MODELS[model], DTYPES[dtype])
    options = {"microbatches": microbatches, "steps": steps, "clip_norm": 1e9}

    def note(*_: object) -> list:
        seen.append(gradient_norm(watched, {}))
        return []

    train(watched, Resident(), overlaps=False, after_step=note, **options)
    return seen


MODELS = {"regular": functools.partial(Stack, dropout=0.2), "irregular": Mixed}


def some_clipped(model: str, dtype: str = "fp32", microbatches: int = 1, steps: int = 8) -> float:
    """A limit that clips about half of the steps."""
    seen = sorted(norms(model, dtype, microbatches, steps)[2:])
    return seen[len(seen) // 2] * 1.001


def counted(model: nn.Module, mode, **options):
    """Trains, and returns what `train` returns and the counters of the updates."""
    last = {}

    def read(attached, _) -> list:
        last["counters"] = attached.counters()
        return []

    return train(model, mode, after_step=read, **options), last["counters"]


@functools.cache
def expected(model: str, dtype: str, microbatches: int, clip_norm: float, mode: str = "none"):
    options = {"microbatches": microbatches, "clip_norm": clip_norm, "steps": 8}
    return train(made(MODELS[model], DTYPES[dtype]), MODES.get(mode, Resident)(), overlaps=False, **options)


@pytest.mark.parametrize(
    ("model", "dtype", "microbatches", "speculate"),
    [
        ("regular", "bf16", 1, "on"),
        pytest.param("regular", "fp32", 1, "auto", marks=pytest.mark.slow),
        pytest.param("irregular", "fp32", 2, "on", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("mode", MODES)
def test_equals_deferred_updates_where_clipping_comes_and_goes(
    mode: str, model: str, dtype: str, microbatches: int, speculate: str
):
    limit = some_clipped(model, dtype, microbatches)
    options = {"microbatches": microbatches, "clip_norm": limit, "steps": 8, "speculate": speculate}
    seen, counters = counted(
        made(MODELS[model], DTYPES[dtype]), MODES[mode](), speculation=Speculation(limit, PLENTY), **options
    )
    other = mode if mode == "shard_offload" and microbatches > 1 else "none"
    assert_same(seen, expected(model, dtype, microbatches, limit, other))
    if model == "regular" and speculate == "on":
        assert 0 < counters.undone_parameters <= counters.speculated_parameters
        assert counters.undo_ms > 0


@pytest.mark.parametrize("pace", [sleepy, eager])
@pytest.mark.parametrize("device_share", [0, 2000])
def test_the_pace_of_the_worker_changes_no_number(pace, device_share: int, monkeypatch: pytest.MonkeyPatch):
    limit = some_clipped("regular", "bf16")

    def late(original):
        def call(*arguments):
            time.sleep(0.003)
            return original(*arguments)

        return call

    if pace is sleepy:
        monkeypatch.setattr(Trials, "make", late(Trials.make))
        monkeypatch.setattr(Trials, "settle", late(Trials.settle))
    else:
        eager(monkeypatch)
    options = {"clip_norm": limit, "steps": 8, "speculate": "on", "device_share": device_share}
    seen, counters = counted(
        made(MODELS["regular"], torch.bfloat16), LayerStream(slots=2), speculation=Speculation(limit, PLENTY), **options
    )
    assert_same(seen, expected("regular", "bf16", 1, limit))
    if pace is eager and not device_share:
        assert 0 < counters.undone_parameters < counters.speculated_parameters


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("undo_bytes", [0, 1, UndoLog.nbytes(300) * 3])
def test_a_small_log_stops_speculation_and_changes_no_number(undo_bytes: int):
    limit = some_clipped("regular", "bf16")
    options = {"clip_norm": limit, "steps": 8, "speculate": "on"}
    model = made(MODELS["regular"], torch.bfloat16)
    seen, counters = counted(model, LayerStream(slots=2), speculation=Speculation(limit, undo_bytes), **options)
    assert_same(seen, expected("regular", "bf16", 1, limit))
    assert bool(counters.speculated_parameters) == (undo_bytes > 1)


@pytest.mark.usefixtures("in_time")
def test_speculation_ends_when_the_norm_so_far_passes_the_limit():
    """The update that passes it has been made, and is undone with the others."""
    limit = 1e-6
    model, mode = made(Stack), LayerStream(slots=2)
    with updating(mode, model, early=False, speculation=Speculation(limit, PLENTY), speculate="on") as (
        attached,
        optimizer,
    ):
        for step in range(3):
            one_step(model, attached, step)
            optimizer.step(scale=0.5)
            optimizer.zero_grad()
        optimizer.finish()
        counters = attached.counters()
        largest = max(parameter.numel() for parameter in model.parameters())
        assert 0 < counters.speculated_parameters <= 2 * largest
        assert counters.undone_parameters == counters.speculated_parameters


@pytest.mark.parametrize("format", [{"master": "stochastic"}, {"state_dtype": "int8"}], ids=str)
def test_formats_that_cannot_be_undone_are_refused(format: dict):
    model, mode = made(Stack, torch.bfloat16), LayerStream(slots=2)
    with under(mode, model) as attached, pytest.raises(KnobError, match="speculate"):
        attached.overlap(host_adamw(model, **format), False, 0, Speculation(1.0, PLENTY))


def test_steps_that_follow_at_once_are_made_in_their_order(monkeypatch: pytest.MonkeyPatch):
    """Also where the order of uses has changed in the step, and another unit's update is needed first."""
    gate = held_up(monkeypatch)

    def again(_, optimizer: HostAdamW) -> list[torch.Tensor]:
        optimizer.step()
        gate.set()
        optimizer.finish()
        gate.clear()
        return []

    options = {"steps": 4, "microbatches": 3, "clip_norm": 0.01, "speculate": "on", "after_step": again}
    ours = train(made(Mixed), LayerStream(slots=2), speculation=Speculation(1e9, PLENTY), **options)
    assert_same(ours, train(made(Mixed), Resident(), **options))


@pytest.mark.parametrize("why", ["speculate=off", "no compiler"])
def test_without_speculation_updates_wait_for_the_norm(why: str, monkeypatch: pytest.MonkeyPatch):
    if why == "no compiler":
        monkeypatch.setattr("offload.speculation.updates.undo_library", lambda format: None)
    model, mode = made(Stack), LayerStream(slots=2)
    speculate = "on" if why == "no compiler" else "off"
    options = {"speculation": Speculation(1.0, PLENTY), "speculate": speculate}
    with updating(mode, model, early=False, **options) as (attached, optimizer):
        assert type(optimizer.deferral) is Overlap
        for step in range(3):
            one_step(model, attached, step)
            assert not optimizer.has_begun
            optimizer.step()
            optimizer.zero_grad()

"""A plan chooses the units that stay on the device within a vram_budget, and whether gradients are kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.byte_sizes import parse_bytes
from offload.weights.gradients import ring
from tests.training.helpers.in_process import components_of
from training.errors import UserError
from training.planning.choices import resident_key
from training.planning.machine import machine_of
from training.planning.plan import plan_filled, plan_run
from training.settle.components import Components

MODEL = ("model.num_hidden_layers=6", "model.hidden_size=256", "model.intermediate_size=1024", "seq_len=64")
# Copies bound the step, so that staying on the device pays.
SLOW_BUS = ("hardware=h200", "hardware.bus_gb_s=1", "precision=bf16")


def filled(*overrides: str, has_gpu: bool = True):
    components = components_of(*MODEL, *SLOW_BUS, *overrides)
    components, plan = plan_filled(components, machine_of(components), has_gpu)
    return components.config.offload, plan


@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream"])
@pytest.mark.slow
def test_a_larger_budget_keeps_more_on_the_device_and_is_never_exceeded(mode: str):
    seen = [filled(f"offload={mode}", f"vram_budget={mib}MiB") for mib in (40, 70, 400)]
    amounts = [offload.resident for offload, _ in seen]
    assert 0 == amounts[0] < amounts[1] < amounts[2]
    assert seen[-1][1].host_bytes["weights"] == 0
    assert all(plan.fits["vram_budget"] for _, plan in seen[1:])
    times = [plan.forecast.step_ms for _, plan in seen]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.1 * times[1]


@pytest.mark.slow
def test_what_is_left_of_the_budget_is_for_states():
    offload, plan = filled("offload=layer_stream", "vram_budget=100MiB")
    none = filled(
        "offload=layer_stream", "vram_budget=100MiB", f"offload.resident={offload.resident}", "optimizer.device_share=0"
    )[1]
    assert plan.device_bytes["optimizer"] >= none.device_bytes["optimizer"]
    # One more unit, with its gradient, its states and a margin, would not fit.
    unit = none.host_bytes["weights"] // (6 - offload.resident)
    free = parse_bytes("vram_budget", "100MiB") - none.totals["vram_budget"]
    assert free < 1.2 * (2 * unit + none.host_bytes["optimizer"] // (6 - offload.resident))


@pytest.mark.parametrize("machine", [{"has_gpu": False}, {}])
@pytest.mark.slow
def test_without_a_budget_a_mode_keeps_nothing_that_it_would_move(machine: dict):
    budget = () if not machine else ("vram_budget=400MiB",)
    offload, plan = filled("offload=layer_stream", *budget, **machine)
    assert offload.resident == 0
    assert plan.host_bytes["optimizer"] > 0
    assert plan.device_bytes["weights"] < plan.host_bytes["weights"]


@pytest.mark.slow
def test_the_weights_of_another_mode_fill_the_budget_too():
    offload, _ = filled("offload=layer_stream_swap", "vram_budget=400MiB")
    assert offload.weights.resident == 6


def test_an_amount_that_was_given_stays():
    components = components_of("offload=layer_stream", "offload.resident=25%", "vram_budget=1GiB")
    assert resident_key(components.config) is None
    components, _ = plan_filled(components, machine_of(components), has_gpu=True)
    assert components.config.offload.resident == "25%"


@pytest.mark.slow
def test_the_chosen_mode_is_the_one_that_the_configuration_names():
    components = components_of(*MODEL, *SLOW_BUS, "offload=layer_stream", "vram_budget=100MiB")
    written = components.config
    components, plan = plan_filled(components, machine_of(components), has_gpu=True)
    assert components.config is written
    assert components.mode.resident == written.offload.resident > 0
    again = components_of(
        *MODEL, *SLOW_BUS, "vram_budget=100MiB", "offload=layer_stream", f"offload.resident={written.offload.resident}"
    )
    assert plan_run(again, machine_of(again), True).device_bytes == plan.device_bytes
    assert OmegaConf.select(again.config, "offload.resident") == components.mode.resident


JOB = ("offload=layer_stream", "clip_norm=null", "microbatches=1", "hardware=h200", "seq_len=32", "precision=bf16")


def plan_of(components: Components):
    return plan_filled(components, machine_of(components), has_gpu=True)


@pytest.fixture(autouse=True)
def no_least_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else small models have room for all gradients in the ring."""
    monkeypatch.setattr(ring, "LEAST_RING_BYTES", 0)
    monkeypatch.setattr(ring, "RING_UNITS", 1)


def in_pieces(components: Components) -> Components:
    """Reentrant checkpoints around a block that is used twice."""
    block = components.model.model.layers[1]
    forward = block.forward

    def twice(hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = checkpoint(partial(forward), hidden, *rest, use_reentrant=True)
        return hidden

    block.forward = twice
    return components


def needs_values(components: Components) -> Components:
    components.model.register_forward_pre_hook(lambda *_: nn.Parameter(torch.empty(1, device="meta")).item())
    return components


def test_a_plan_counts_the_ring_and_names_the_choice():
    """With so many tokens the update is shorter than backward."""
    components, plan = plan_of(components_of(*JOB, "batch_size=1024"))
    assert components.gradients.released
    assert plan.chosen["optimizer.gradients"].startswith("release: ")
    assert plan.host_bytes["gradients"] == components.footprint.host_gradient_bytes
    _, kept = plan_of(components_of(*JOB, "clip_norm=1"))
    assert kept.chosen["optimizer.gradients"].startswith("keep: clip_norm=1 needs")


@pytest.mark.parametrize(
    ("change", "why"), [(in_pieces, "is needed after its gradient"), (needs_values, "needs values to run")]
)
def test_auto_keeps_gradients_that_a_dry_run_does_not_show_to_be_final(change, why: str):
    components, plan = plan_of(change(components_of(*JOB)))
    assert not components.gradients.released
    assert not components.mode.releases_gradients
    assert why in components.gradients.why
    assert plan.chosen["optimizer.gradients"].startswith("keep: ")
    assert plan.host_bytes["gradients"] == components.footprint.host_gradient_bytes


@pytest.mark.slow
def test_auto_keeps_gradients_where_that_fits_and_is_faster():
    """With so few tokens the update takes longer than backward."""
    job = (*JOB, "model.hidden_size=1024", "model.num_hidden_layers=16", "offload.resident=0")
    plans = {}
    for name, more in {
        "auto": (),
        "keep": ("optimizer.gradients=keep",),
        "release": ("optimizer.gradients=release",),
    }.items():
        components, plans[name] = plan_of(components_of(*job, *more))
        assert components.mode.releases_gradients == components.gradients.released == (name == "release")
        assert components.footprint.host_gradient_bytes == plans[name].host_bytes["gradients"]
    assert plans["release"].forecast.step_ms > 1.1 * plans["keep"].forecast.step_ms
    assert plans["auto"].forecast == plans["keep"].forecast
    assert plans["auto"].totals["vram_budget"] == plans["keep"].totals["vram_budget"]
    assert plans["auto"].chosen["optimizer.gradients"].startswith("keep: there is room, and the next forward hides")
    # Between the two totals.
    budget = sum(plans[name].totals["host_budget"] for name in ("keep", "release")) // 2
    components, tight = plan_of(components_of(*job, f"host_budget={budget}"))
    assert components.mode.releases_gradients
    assert components.gradients.released
    assert tight.fits["host_budget"]


def test_a_release_that_was_asked_for_is_refused():
    with pytest.raises(UserError, match=r"^optimizer\.gradients=release: \S+ is needed after its gradient: take"):
        plan_of(in_pieces(components_of(*JOB, "optimizer.gradients=release")))


def test_a_release_that_was_asked_for_without_a_dry_run_is_planned():
    components, plan = plan_of(needs_values(components_of(*JOB, "optimizer.gradients=release")))
    assert components.gradients.released
    assert plan.host_bytes["gradients"] == components.footprint.host_gradient_bytes

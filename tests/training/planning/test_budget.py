"""A vram_budget is filled: units that stay on the device, and states beside them."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from models.llama import Llama
from offload.byte_sizes import parse_bytes
from tests.training.helpers.in_process import components_of
from training.planning.budget import resident_key
from training.planning.machine import machine_of
from training.planning.plan import plan_filled, plan_run

MODEL = ("model.num_hidden_layers=6", "model.hidden_size=256", "model.intermediate_size=1024", "seq_len=64")
# Copies bound the step, so that staying on the device pays.
SLOW_BUS = ("hardware=h200", "hardware.h2d_gb_s=1", "hardware.d2h_gb_s=1", "hardware.both_gb_s=1", "precision=bf16")


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


def test_a_model_that_needs_values_runs_under_a_budget_too(monkeypatch: pytest.MonkeyPatch):
    def needs_values(self, *arguments: object) -> None:
        raise RuntimeError("this model needs values")

    monkeypatch.setattr(Llama, "forward", needs_values)
    offload, plan = filled("offload=layer_stream", "vram_budget=400MiB")
    assert offload.resident == 6
    assert "needs values" in plan.notes[0]

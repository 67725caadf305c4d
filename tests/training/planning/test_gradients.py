"""The dry run shows whether gradients are final when they land, and the plan keeps them where one is not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.weights.gradients import ring
from tests.training.helpers.in_process import components_of
from training.errors import UserError
from training.planning.machine import machine_of
from training.planning.plan import plan_filled
from training.settle.components import Components

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

"""The optimizer's part of a plan."""

from __future__ import annotations

import pytest


def test_states_on_the_device_take_work_from_the_host(planned):
    job = ("offload=layer_stream", "offload.resident=0", "precision=bf16", "vram_budget=10GiB")
    none, some, all_that_fit = (planned(*job, f"optimizer.device_share={share}") for share in ("0", "5MiB", "auto"))
    moved = [plan.device_bytes["optimizer"] - none.device_bytes["optimizer"] for plan in (some, all_that_fit)]
    assert moved[1] == pytest.approx(none.host_bytes["optimizer"], rel=1e-3)
    # Whole blocks, of which there are four.
    assert moved[0] == moved[1] // 2 < 5 * 2**20
    assert none.host_bytes["optimizer"] - some.host_bytes["optimizer"] == pytest.approx(moved[0], rel=1e-3)
    assert some.step_bytes["out"] > none.step_bytes["out"]
    alone = [plan.forecast.alone_ms["host optimizer"] for plan in (none, some, all_that_fit)]
    assert alone[0] > alone[1] > alone[2] == 0
    assert all_that_fit.host_bytes["optimizer"] == 0


def test_updates_that_the_step_waits_for_are_noted(planned):
    sizes = (
        "model.hidden_size=2048",
        "model.intermediate_size=8192",
        "precision=bf16",
        "offload=layer_stream",
        "optimizer=adamw",
    )
    (note,) = planned(*sizes).notes
    assert note.startswith("optimizer=host_adamw hides updates")
    assert planned(*sizes, "optimizer=host_adamw", "clip_norm=null").notes == ()
    assert planned(*sizes[:-1]).notes == ()

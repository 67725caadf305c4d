"""A finished plan: budgets, parts and what people read."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("budget", "fits"), [("16GiB", True), ("3MiB", False)])
def test_budgets(planned, budget: str, fits: bool):
    plan = planned("offload=layer_stream", f"vram_budget={budget}", f"host_budget={budget}")
    assert plan.fits == {"vram_budget": fits, "host_budget": fits}
    assert {key: limit.origin for key, limit in plan.limits().items()} == {key: key for key in plan.fits}


def test_a_budget_beyond_the_machine_is_the_machines(planned):
    machine = ("hardware.vram_gib=0.004", "hardware.host_gib=0.003")
    plan = planned(*machine, "offload=layer_stream", "vram_budget=200GiB", "host_budget=1TiB")
    assert plan.fits == {"vram_budget": False, "host_budget": False}
    assert [str(limit) for limit in plan.limits().values()] == ["4.10 MiB (H200)", "3.07 MiB (H200)"]
    assert plan.rows()["host: in all"].endswith("of 3.07 MiB (H200): DOES NOT FIT")
    smaller = planned(*machine, "offload=layer_stream", "vram_budget=1MiB").rows()["device: at its peak"]
    assert smaller.endswith("of 1.00 MiB (vram_budget): DOES NOT FIT")


def test_parts_add_up_to_the_model_and_its_states(planned):
    parameters = 0.8e6
    # Beside two moments in float32, what the weights lack of their masters: 2 bytes of 4.
    for mode in ("none", "layer_stream", "bounce_linear"):
        plan = planned(f"offload={mode}", "precision=bf16")
        both = {part: plan.device_bytes[part] + plan.host_bytes.get(part, 0) for part in ("weights", "optimizer")}
        assert both["weights"] == pytest.approx(2 * parameters, rel=0.1)
        assert both["optimizer"] == pytest.approx(5 * both["weights"], rel=0.01)
    assert sum(plan.host_bytes.values()) == plan.totals["host_budget"]


@pytest.mark.parametrize("mode", ["none", "layer_stream", "shard_offload", "tensor_swap"])
@pytest.mark.slow
def test_no_planned_step_is_shorter_than_its_floor(planned, mode: str, monkeypatch: pytest.MonkeyPatch):
    plan = planned(f"offload={mode}", "precision=bf16", "microbatches=2")
    assert 0 < plan.floor_ms <= plan.forecast.step_ms
    assert plan.summary()["perf/floor_ms"] == plan.as_dict()["floor_ms"] == plan.floor_ms
    # A bus alone, where the peak of the GPU is not known; and nothing where nothing is copied.
    monkeypatch.setattr("training.planning.times.datasheet_flops", lambda name, dtype: None)
    unknown = planned(f"offload={mode}", "precision=bf16", "microbatches=2")
    assert (unknown.floor_ms is None) == (not unknown.step_bytes["in"] and not unknown.step_bytes["out"])


def test_the_cpu_has_no_floor_and_no_rows_of_nothing(planned):
    plan = planned("offload=none", has_gpu=False)
    assert (plan.floor_ms, "perf/floor_ms" in plan.summary()) == (None, False)
    assert not [label for label in plan.rows() if "copied" in label or "shortest" in label]
    assert "copied in a step" in planned("offload=layer_stream").rows()

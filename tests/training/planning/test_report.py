"""A finished plan: budgets, parts and what people read."""

from dataclasses import replace

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


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_brief_plan_is_ten_lines_without_the_words_of_the_engine(planned, has_gpu: bool):
    plan = planned("offload=layer_stream", "adapter=lora", "offload.resident=0", "vram_budget=1GiB", has_gpu=has_gpu)
    brief = plan.brief()
    lines = {label: value for label, value in brief.items() if not label.startswith("note")}
    assert list(lines) == ["hardware", "model", *["device"] * has_gpu, "host", "copies", "step", "speed", "chosen"]
    assert max(len(value) for label, value in lines.items() if label != "chosen") <= 70
    assert lines["model"].endswith("% train; 76% of the weights stream")
    assert "of 1.00 GiB (vram_budget): fits; " in lines.get("device", "of 1.00 GiB (vram_budget): fits; ")
    assert f"for {plan.units:,} tokens" in lines["step"]
    assert "lr 0.0002, weight_decay 0" in lines["chosen"]
    assert not [word for word in ("undo", "final", "speculat") if word in " ".join(brief.values())]


def test_a_plan_has_the_time_of_a_save_where_the_run_saves(planned):
    plan = replace(planned("checkpoint.every=10"), checkpoint_bytes=5 * 2**30)
    assert plan.rows()["a checkpoint"] == "5.00 GiB; training waits 5 s if the disk takes 1 GiB/s"
    assert "a checkpoint" in planned("checkpoint.best=eval/loss", "eval.every=5").rows()
    assert "a checkpoint" not in planned().rows()


def test_speed_and_time_of_a_run_follow_from_the_step(planned):
    plan = planned("offload=none", "steps=1000")
    plan = replace(plan, forecast=replace(plan.forecast, step_ms=12_000.0), units=6000, unit="tokens", microbatches=3)
    assert plan.brief()["speed"] == plan.rows()["speed"] == "500 tokens/s; 1,000 steps take 3.3 hours"
    assert plan.brief()["step"].startswith("12 s for 6,000 tokens in 3 microbatches, bound by ")
    assert replace(plan, steps=None, units=6).brief()["speed"] == "0.5 tokens/s"

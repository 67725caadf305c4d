"""The optimizer's part of a plan."""

from __future__ import annotations

import pytest

from offload.planning import StateFormat
from training.planning.optimizer import speed_of


@pytest.mark.slow
def test_states_on_the_device_take_work_from_the_host(planned):
    job = ("offload=layer_stream", "offload.resident=0", "precision=bf16", "vram_budget=10GiB")
    none, some, all_that_fit = (planned(*job, f"optimizer.device_share={share}") for share in ("0", "5MiB", "auto"))
    moved = [plan.device_bytes["optimizer"] - none.device_bytes["optimizer"] for plan in (some, all_that_fit)]
    # Besides the remainder and two moments, there is a copy of the weight on the device.
    assert moved[1] == pytest.approx(none.host_bytes["optimizer"] * 12 / 10, rel=1e-3)
    # Whole blocks, of which there are four.
    assert moved[0] == moved[1] // 2 < 5 * 2**20
    assert none.host_bytes["optimizer"] - some.host_bytes["optimizer"] == pytest.approx(moved[0] * 10 / 12, rel=1e-3)
    assert some.step_bytes["out"] > none.step_bytes["out"]
    alone = [plan.forecast.alone_ms["host optimizer"] for plan in (none, some, all_that_fit)]
    assert alone[0] > alone[1] > alone[2] == 0
    assert all_that_fit.host_bytes["optimizer"] == 0


@pytest.mark.parametrize(
    ("format", "nbytes"),
    [
        (("optimizer.master=fp32",), 12),
        ((), 10),
        (("optimizer.state_dtype=bf16",), 6),
        (("optimizer.state_dtype=int8",), 4 + 2 / 64),
        (("optimizer.master=stochastic", "optimizer.state_dtype=int8"), 2 + 2 / 64),
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_format_has_its_bytes(planned, format: tuple[str, ...], nbytes: float):
    job = ("offload=layer_stream", "offload.outside=stream", "precision=bf16", "optimizer.device_share=0")
    plan = planned(*job, *format)
    # Blocks of scales that are not full, and steps.
    assert plan.host_bytes["optimizer"] == pytest.approx(plan.parameters * nbytes, rel=1e-2)


def test_only_formats_that_memory_alone_limits_are_planned_to_be_faster():
    wide, compact = StateFormat("fp32"), StateFormat()
    assert speed_of(wide) == 1
    assert speed_of(compact) == pytest.approx(28 / 26)
    assert speed_of(StateFormat(state_dtype="bf16")) == pytest.approx(28 / 18)
    for slow in (("compact", "int8"), ("stochastic", "bf16"), ("compact", "bf16", "stochastic")):
        assert speed_of(StateFormat(*slow)) == speed_of(compact)


@pytest.mark.slow
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

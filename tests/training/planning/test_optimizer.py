"""The optimizer's part of a plan, and the logs of updates that may be undone."""

from __future__ import annotations

import math

import pytest

from offload.planning import StateFormat, bytes_of_logs, log_bytes
from tests.training.helpers.in_process import components_of
from training.planning.optimizer import UNDO_LOG, planned_speculation, speed_of
from training.settle.components import reasons_of


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
    compact = StateFormat()
    assert speed_of(compact) == pytest.approx(28 / 26)
    assert speed_of(StateFormat(state_dtype="bf16")) == pytest.approx(28 / 18)
    for slow in (("compact", "int8"), ("stochastic", "bf16")):
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


JOB = ("offload=layer_stream", "offload.outside=stream", "precision=bf16", "optimizer.device_share=0")


def test_the_plan_counts_the_logs_of_all_updates_and_hides_these(planned):
    speculating, waiting = planned(*JOB, "clip_norm=1"), planned(*JOB, "clip_norm=1", "optimizer.speculate=off")
    components = components_of(*JOB, "clip_norm=1")
    needed = log_bytes(components.model.parameters())
    assert speculating.host_bytes[UNDO_LOG] == needed
    assert UNDO_LOG not in waiting.host_bytes
    assert speculating.totals["host_budget"] - waiting.totals["host_budget"] == pytest.approx(needed, abs=2**26)
    assert speculating.forecast.step_ms <= waiting.forecast.step_ms
    assert waiting.clipped_ms is None
    found = planned_speculation(components, speculating)
    assert (found.limit, found.undo_bytes) == (1.0, needed)
    assert planned_speculation(components_of(*JOB, "optimizer.speculate=off"), waiting) is None


@pytest.mark.slow
def test_a_clipped_step_is_planned_as_one_whose_updates_wait(planned):
    job = ("model=llama1b", "offload=layer_stream")
    speculating, waiting = planned(*job, "clip_norm=1"), planned(*job, "clip_norm=1", "optimizer.speculate=off")
    assert speculating.forecast.step_ms < speculating.clipped_ms == waiting.forecast.step_ms
    assert speculating.rows()["predicted clipped step"] == f"{waiting.forecast.step_ms:,.1f} ms"
    assert speculating.as_dict()["clipped_step_ms"] == waiting.forecast.step_ms
    for plan in (waiting, planned(*job, "clip_norm=null")):
        assert "predicted clipped step" not in plan.rows()


def test_ranks_that_share_homes_have_equal_parts_of_the_logs(planned):
    job = (*JOB, "clip_norm=1", "microbatches=1", "batch_size=2", "devices=2", "parallel.homes=shared")
    plan, components = planned(*job), components_of(*job)
    whole = log_bytes(components.model.parameters())
    found = planned_speculation(components, plan)
    assert plan.host_bytes[UNDO_LOG] == 2 * found.undo_bytes
    # Slices have tables and padding of their own.
    assert whole / 2 <= found.undo_bytes < whole / 2 * 1.1
    for slices in components.footprint.slices:
        assert sum(map(bytes_of_logs, slices)) <= found.undo_bytes
    # Units with states on the devices have none.
    placed = planned(*job, "optimizer.device_share=1GiB")
    assert not placed.host_bytes.get(UNDO_LOG)


def test_the_logs_take_at_most_what_a_host_budget_leaves(planned):
    rest = planned(*JOB, "clip_norm=1", "optimizer.speculate=off").totals["host_budget"]
    plan = planned(*JOB, "clip_norm=1", f"host_budget={rest + 2**29}")
    assert 0 < plan.host_bytes[UNDO_LOG] <= 2**30
    assert plan.fits["host_budget"]
    full = planned(*JOB, "clip_norm=1", "host_budget=1MiB")
    assert full.host_bytes[UNDO_LOG] == 0
    assert planned_speculation(components_of(*JOB, "clip_norm=1"), full) is None


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ((), "updates begin inside backward, and are undone exactly"),
        (("clip_norm=null", "on_nonfinite=skip"), "updates begin inside backward, and are undone exactly"),
        (("optimizer.master=stochastic",), "off, because updates of states with master=stochastic"),
        (("optimizer.state_dtype=int8",), "off, because"),
        (("clip_norm=null",), None),
        (("optimizer.speculate=off",), None),
        (("optimizer=adamw",), None),
        (("devices=2", "parallel.homes=own"), None),
        (("devices=2", "microbatches=1"), "updates begin inside backward, and are undone"),
        (("devices=2", "microbatches=2"), None),
    ],
    ids=str,
)
def test_the_plan_tells_whether_a_run_speculates(overrides: tuple[str, ...], line: str | None):
    components = components_of("offload=layer_stream", *overrides)
    found = reasons_of(components).get("optimizer.speculate")
    assert found.startswith(line) if line else found is None
    assert components.speculates == (line is not None and not line.startswith("off"))
    if "on_nonfinite=skip" in overrides:
        assert components.largest_norm == math.inf

"""The bytes of a plan by part, of one device and of several, and the budgets that they are held to."""

import math

import pytest

from offload.planning import StateFormat, bytes_of_logs, log_bytes
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.machine import machine_of
from training.planning.memory import UNDO_LOG, budgets_of, logits_bytes, planned_speculation, speed_of
from training.settle.components import reasons_of

GIB = 2**30


@pytest.mark.parametrize(
    ("given", "has_gpu", "vram", "host"),
    [
        ((), True, 24, 64),
        ((), False, None, 64),
        (("vram_budget=8GiB", "host_budget=32GiB"), True, 8, 32),
        (("vram_budget=80GiB", "host_budget=320GiB"), True, 24, 64),
        (("vram_budget=8GiB",), False, None, 64),
    ],
)
def test_a_budget_is_what_is_asked_for_and_there(given: tuple[str, ...], has_gpu: bool, vram: int | None, host: int):
    components = components_of(*SMALL_MODEL, "hardware.vram_gib=24", "hardware.host_gib=64", *given)
    budgets = budgets_of(components.config, machine_of(components), has_gpu)
    assert budgets == {"vram_budget": vram and vram * GIB, "host_budget": host * GIB}


def test_logits_are_those_of_the_tokens_that_the_head_takes_at_a_time():
    small = components_of(*SMALL_MODEL, "seq_len=8", "model.vocab_size=512")
    assert logits_bytes(small) == 4 * 4 * 8 * 512
    assert logits_bytes(components_of(*SMALL_MODEL, "seq_len=8", "model.vocab_size=512", "microbatches=2")) == (
        4 * 2 * 8 * 512
    )


def test_without_a_gpu_everything_is_on_the_host_and_nothing_is_locked(planned):
    job = ("offload=layer_stream", "batch_size=2", "seq_len=16")
    cpu, gpu = planned(*job, has_gpu=False), planned(*job)
    assert cpu.host_bytes["device"] == sum(cpu.device_bytes.values()) > 0
    assert "device" not in gpu.host_bytes
    assert (cpu.pinned_bytes, planned(*job, "offload.pin='off'").pinned_bytes) == (0, 0)
    assert gpu.pinned_bytes > 0


def test_what_ranks_share_is_locked_once_on_a_host(planned):
    job = ("offload=layer_stream", "batch_size=2", "seq_len=16", "microbatches=1")
    one, two = planned(*job), planned(*job, "devices=2")
    # What is shared is aligned to 1 KiB.
    assert two.pinned_bytes == pytest.approx(one.pinned_bytes, rel=0.01)
    assert planned(*job, "devices=2", "parallel.homes=own").pinned_bytes == 2 * one.pinned_bytes


def test_the_exchange_of_gradients_counts_where_it_is_larger_than_activations(planned):
    job = ("batch_size=2", "seq_len=2", "microbatches=1")
    assert "exchange" not in planned(*job).device_bytes
    plan = planned(*job, "devices=2")
    assert plan.device_bytes["exchange"] > plan.device_bytes["activations"]


@pytest.mark.parametrize(("homes", "times"), [("own", 2), ("shared", 1)])
@pytest.mark.slow
def test_several_devices_halve_activations_and_double_what_the_host_holds_unless_they_share_it(planned, homes, times):
    job = ("offload=layer_stream", "optimizer=host_adamw", "batch_size=8", "microbatches=1", "clip_norm=null")
    one, two = planned(*job), planned(*job, "devices=2", f"parallel.homes={homes}")
    assert two.device_bytes["activations"] == pytest.approx(one.device_bytes["activations"] / 2, rel=0.1)
    for part in ("weights", "gradients", "optimizer"):
        # Tensors that are shared begin at larger multiples.
        assert one.host_bytes[part] > 0
        assert two.host_bytes[part] == pytest.approx(times * one.host_bytes[part], rel=0.1)
    assert "activations" not in two.host_bytes or not two.host_bytes["activations"]
    share = 2 if homes == "shared" else 1
    for way in ("in", "out"):
        assert two.step_bytes[way] == pytest.approx(one.step_bytes[way] / share, rel=0.2)
    exchanges = two.forecast.alone_ms["exchanges between devices"]
    assert exchanges > 0 if homes == "shared" else exchanges == 0
    assert two.model_flops == one.model_flops
    assert any("2 devices" in note for note in two.notes)
    hosts = planned(*job, "devices=2", "parallel.hosts=2")
    # A rank alone on its host has homes of its own.
    own = planned(*job, "devices=2", "parallel.homes=own")
    assert (hosts.host_bytes["weights"], hosts.device_bytes) == (one.host_bytes["weights"], own.device_bytes)
    assert any("its 1 processes" in note for note in hosts.notes)


@pytest.mark.slow
def test_gradients_of_several_microbatches_have_memory_of_each_rank_besides_that_of_their_sum(planned):
    job = ("offload=layer_stream", "batch_size=8", "microbatches=2", "parallel.homes=shared")
    one, two = planned(*job), planned(*job, "devices=2")
    assert one.host_bytes["gradients"] > 0
    # Gradients that are shared begin at larger multiples.
    assert two.host_bytes["gradients"] == pytest.approx(3 * one.host_bytes["gradients"], rel=0.01)
    assert two.host_bytes["activations"] == 0
    sharded = planned("offload=shard_offload", *job[1:], "devices=2")
    alone = planned("offload=shard_offload", *job[1:])
    assert alone.host_bytes["gradients"] > 0
    assert sharded.host_bytes["gradients"] == pytest.approx(alone.host_bytes["gradients"], rel=0.01)


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


def test_only_formats_that_memory_alone_limits_are_planned_to_be_faster():
    compact = StateFormat()
    assert speed_of(compact) == pytest.approx(28 / 26)
    assert speed_of(StateFormat(state_dtype="bf16")) == pytest.approx(28 / 18)
    assert speed_of(StateFormat("stochastic", "bf16")) == speed_of(compact)
    for master in ("compact", "stochastic"):
        assert speed_of(StateFormat(master, "int8")) == pytest.approx(0.7 * speed_of(compact))


@pytest.mark.slow
def test_updates_that_the_step_waits_for_are_noted(planned):
    sizes = (
        "model.hidden_size=2048", "model.intermediate_size=8192", "precision=bf16", "offload=layer_stream",
        "optimizer=adamw",
    )  # fmt: skip
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


def test_averages_have_memory_and_time_beside_the_update_and_the_weights_are_kept_while_they_are_in_use(planned):
    job = ("offload=layer_stream", "optimizer=host_adamw", "precision=bf16", "batch_size=2", "seq_len=16")
    plain, averaged = planned(*job), planned(*job, "ema=0.999")
    count = plain.trained_parameters
    assert "ema" not in plain.host_bytes
    assert averaged.host_bytes["ema"] == 4 * count
    assert planned(*job, "ema=0.999", "eval.every=1").host_bytes["ema"] == 6 * count
    assert planned(*job, "ema=0.999", "microbatches=1", "devices=2").host_bytes["ema"] == 4 * count
    assert averaged.device_bytes == plain.device_bytes
    streamed, all_on_device = (
        averaged.forecast.alone_ms["host optimizer"] - plain.forecast.alone_ms["host optimizer"],
        planned("precision=bf16", "ema=0.999").forecast.step_ms - planned("precision=bf16").forecast.step_ms,
    )
    # Two bytes of a weight, and eight to read and write its average, at the speed of 28 for an update.
    rate = averaged.machine.update_gparams_s * 28e6
    assert 0 < streamed < 10 * count / rate
    copied = averaged.machine.bandwidth.two_way_ms(0, 2 * count)
    assert all_on_device == pytest.approx(10 * count / rate + copied)

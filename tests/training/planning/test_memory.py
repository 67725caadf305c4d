"""The bytes of a plan by part, of one device and of several, and the budgets that they are held to."""

from __future__ import annotations

import pytest

from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.machine import machine_of
from training.planning.memory import budgets_of, logits_bytes

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


def test_states_that_the_device_has_room_for_leave_the_host(planned):
    job = ("offload=layer_stream", "optimizer=host_adamw", "clip_norm=null", "precision=bf16")
    home, placed = planned(*job), planned(*job, "vram_budget=1GiB")
    assert placed.device_bytes["optimizer"] > home.device_bytes["optimizer"]
    assert placed.host_bytes["optimizer"] < home.host_bytes["optimizer"]


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

"""Plans of several devices: what is on a host once, and what once for each of its ranks."""

from __future__ import annotations

import pytest


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

"""States that visit the device to be updated: the numbers of those that are updated on the host."""

from __future__ import annotations

import copy

import pytest
import torch

from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.optimizer import visiting_states
from tests.offload.helpers.models import Stack, assert_same, attached
from tests.offload.helpers.updates import EARLY, MODES, Mixed, host_adamw, made, make_small, one_step, train


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a parameter; whole vectors of the processor, because kernels round the rest of one otherwise."""
    make_small(monkeypatch)
    monkeypatch.setattr(visiting_states, "PIECE", 64)


@EARLY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_equals_resident(mode: str, share: float, dtype: torch.dtype, early: bool):
    options = {"microbatches": 2, "steps": 5, "clip_norm": None if early else 0.05}
    seen = train(made(Stack, dtype), MODES[mode](), early, visiting_share=share, **options)
    assert_same(seen, train(made(Stack, dtype), Resident(), overlaps=False, **options))


@EARLY
@pytest.mark.parametrize("device_share", [0, 3000])
def test_equals_resident_with_frozen_tied_and_skipped_parameters(device_share: int, early: bool):
    mode = LayerStream(slots=2, outside="stream")
    options = {"steps": 8, "state_dtype": "bf16"}
    seen = train(made(Mixed, torch.bfloat16), mode, early, visiting_share=0.6, device_share=device_share, **options)
    assert_same(seen, train(made(Mixed, torch.bfloat16), Resident(), overlaps=False, **options))


def test_units_are_chosen_evenly_and_the_host_updates_the_others():
    model, mode = made(Stack), LayerStream()
    with attached(mode, model):
        optimizer = host_adamw(model, visiting_share=0.5)
        mode.overlap(optimizer, early=False)
        one_step(model, mode)
        optimizer.step()
        optimizer.finish()
        visits = sorted(unit.name for unit in mode._streamer._visits.units)
        updated = mode.counters().updated_parameters
    assert visits == ["blocks.1", "blocks.3"]
    assert updated == sum(p.numel() for index in (0, 2) for p in model.blocks[index].parameters())


def test_state_dicts_go_from_one_place_to_the_other_and_homes_stay():
    visiting, host = made(Stack, torch.bfloat16), made(Stack, torch.bfloat16)
    modes = LayerStream(), LayerStream()
    with attached(modes[0], visiting), attached(modes[1], host):
        one, other = host_adamw(visiting, visiting_share=1.0), host_adamw(host)
        modes[0].overlap(one, early=False)
        modes[1].overlap(other, early=False)
        for step in range(2):
            one_step(visiting, modes[0], step)
            one.step()
            one.zero_grad()
        state = one.state_dict()
        other.load_state_dict(copy.deepcopy(state))
        homes = [one.state[p]["exp_avg"].data_ptr() for p in visiting.blocks.parameters()]
        one.load_state_dict(copy.deepcopy(state))
        assert homes == [one.state[p]["exp_avg"].data_ptr() for p in visiting.blocks.parameters()]
        host.load_state_dict(visiting.state_dict())
        for model, mode, optimizer in ((visiting, modes[0], one), (host, modes[1], other)):
            one_step(model, mode, 2)
            optimizer.step()
            optimizer.finish()
        assert_same([p.detach() for p in visiting.parameters()], [p.detach() for p in host.parameters()])


def test_states_that_were_there_before_move_into_their_homes():
    def run(moves: bool) -> list[torch.Tensor]:
        model, mode = made(Stack, torch.bfloat16), LayerStream()
        with attached(mode, model):
            optimizer = host_adamw(model, visiting_share=1.0)
            for step in range(4):
                if step == 2 and moves:
                    mode.overlap(optimizer, early=False)
                if step == 3 and moves:
                    mode.place_states(10**9)
                one_step(model, mode, step)
                optimizer.step()
                optimizer.finish()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()]

    assert_same(run(moves=True), run(moves=False))


def test_states_have_their_homes_in_the_arena_and_are_counted():
    model, mode = made(Stack, torch.bfloat16), LayerStream()
    with attached(mode, model):
        before = mode.counters().host_pageable_bytes
        mode.overlap(host_adamw(model, visiting_share=1.0), early=False)
        states = sum(3 * 4 * p.numel() for block in model.blocks for p in block.parameters())
        assert states <= mode.counters().host_pageable_bytes - before <= 1.5 * states


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(share: float):
    with pytest.raises(ValueError, match=r"visiting_share=.*must be between 0 and 1"):
        host_adamw(made(Stack), visiting_share=share)

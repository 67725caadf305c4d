"""The dry run of a run's step, of which many microbatches follow from a few."""

from __future__ import annotations

import pytest

from offload.planning import DryRun
from tests.training.helpers.in_process import components_of
from training.errors import UserError
from training.planning import dry_step as module
from training.planning.dry_step import dry_step, examples_of_rank, without_dry_run


def bytes_of(step: DryRun) -> list[int]:
    return [sum(getattr(phase, name) for phase in step.phases) for name in ("h2d_bytes", "d2h_bytes", "flops")]


@pytest.mark.parametrize("mode", ["layer_stream", "shard_offload"])
def test_many_microbatches_follow_from_those_that_ran(mode: str, monkeypatch: pytest.MonkeyPatch):
    components = components_of(f"offload={mode}", "batch_size=7", "microbatches=5", "seq_len=16")
    derived = dry_step(components, has_gpu=True)
    monkeypatch.setattr(module, "MOST_DRY", 5)
    # At the turn from one microbatch to the next a unit or two are still there.
    assert bytes_of(derived) == pytest.approx(bytes_of(dry_step(components, has_gpu=True)), rel=0.02)


def test_no_rank_computes_more_examples_than_the_first():
    components = components_of("batch_size=7", "microbatches=1")
    assert examples_of_rank(components.config) == 7
    components.config.devices = 2
    assert examples_of_rank(components.config) == 4


def test_without_a_dry_run_the_footprint_bounds_the_copies():
    components = components_of("offload=layer_stream", "microbatches=1")
    assert bytes_of(without_dry_run(components))[0] >= components.footprint.host_weight_bytes


def test_a_knob_of_the_task_is_refused_and_is_no_note_that_the_model_needs_values():
    components = components_of("model=unet_small", "task.null_class=null")
    with pytest.raises(UserError, match=r"^task\.null_class=None: the dataset has labels: give the "):
        dry_step(components, has_gpu=True)

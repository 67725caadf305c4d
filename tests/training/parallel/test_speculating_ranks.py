"""Ranks that share homes update before the norm is known, and save what one device does that waits for it."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.offload.helpers.updates import decides_in_time
from tests.training.helpers.in_process import run_here
from tests.training.helpers.results import content, curve
from tests.training.parallel.conftest import RUN, run_ranks
from training.parallel.ranks import Ranks
from training.run import loop
from training.runs.records import read_metrics

# The logs of the head are full in the first steps, and its update would be the first.
MODES: Mapping[str, tuple[str, ...]] = {
    "layer_stream": (),
    "bounce_linear": ("offload.slots=4", "offload.exclude=[lm_head]"),
    "shard_offload": ("offload.shards=2",),
    "layer_stream_swap": (),
    "bounce_linear_swap": ("offload.weights.slots=4", "offload.weights.exclude=[lm_head]"),
}
STREAMED = ("optimizer=host_adamw", "precision=bf16", "eval.every=null", "checkpoint.every=1")
# The norms of the six steps are 0.355, 0.355, 0.354, 0.349, 0.354 and 0.348. From the third on updates begin early.
CLIPPED = (*STREAMED, "clip_norm=0.351")
TWO = ("parallel.homes=shared", "devices=2", "microbatches=1", "optimizer.speculate=on")


def at(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(autouse=True)
def rank_0_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets rank 0 make the updates that it was offered before it knows whether they count."""
    decides_in_time(monkeypatch)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one device with two microbatches, whose updates wait for the norm."""
    folder = tmp_path_factory.mktemp("speculating") / "one"
    run_here(folder, *RUN, *CLIPPED, "microbatches=2", "optimizer.speculate=off")
    assert [record["train/grad_norm"] > 0.351 for record in read_metrics(folder)] == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    return folder


@pytest.mark.parametrize("mode", ["layer_stream", *(pytest.param(m, marks=pytest.mark.slow) for m in list(MODES)[1:])])
def test_ranks_that_speculate_save_what_one_device_does(
    tmp_path: Path, one: Path, mode: str, monkeypatch: pytest.MonkeyPatch
):
    orders = []

    def watch(ranks: Ranks) -> None:
        tell = ranks.messages.tell
        monkeypatch.setattr(ranks.messages, "tell", lambda *order: (orders.append(order), tell(*order)))

    run_ranks(tmp_path, *CLIPPED, *TWO, f"offload={mode}", *MODES[mode], watch=watch)
    # The other rank has the plan of rank 0.
    speculation = orders[0][-1]
    assert speculation.limit == 0.351
    assert speculation.undo_bytes > 0
    for step in range(1, 7):
        assert content(at(tmp_path, step)) == content(at(one, step))
    assert curve(tmp_path) == curve(one)
    records = read_metrics(tmp_path)
    assert [record.get("optimizer/undone", 0.0) for record in records] == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert all(record["optimizer/speculated"] > 0 for record in records[2:])


class _Spoil(torch.autograd.Function):
    """The weight as it is; the last element of its gradient is infinite."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt[-1, -1] = math.inf
        return spoilt


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", ["null", "0.351"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_undone_on_all(
    tmp_path: Path, clip_norm: str, monkeypatch: pytest.MonkeyPatch
):
    """One element, by the first microbatch of the fourth step, of whose updates none would be clipped."""
    compute, linear = loop.forward_backward, nn.functional.linear

    def spoilt_in_fourth_step(*arguments):
        step, spoilt = arguments[-1], []

        def spoils_once(inputs, weight, bias=None):
            # That of a projection down, in the first block.
            if step == 4 and weight.shape == (16, 32) and not spoilt:
                spoilt.append(weight)
                weight = _Spoil.apply(weight)
            return linear(inputs, weight, bias)

        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "linear", spoils_once)
            return compute(*arguments)

    monkeypatch.setattr(loop, "forward_backward", spoilt_in_fourth_step)
    keys = (*STREAMED, f"clip_norm={clip_norm}", "on_nonfinite=skip")
    one, two = tmp_path / "one", tmp_path / "two"
    run_here(one, *RUN, *keys, "microbatches=2", "optimizer.speculate=off")
    run_ranks(two, *keys, *TWO, "offload=layer_stream")
    assert [record["train/skipped_steps"] for record in read_metrics(one)] == [0, 0, 0, 1, 1, 1]
    for step in range(3, 7):
        assert content(at(two, step)) == content(at(one, step))
    assert read_metrics(two)[3]["optimizer/undone"] == 1.0

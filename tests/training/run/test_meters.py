"""Meters of the steps between two records: speed, traffic, memory."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload import Counters
from offload.modes.none import Resident
from tests.training.helpers.in_process import SMALL_RUN, composed, run_here
from training.data.datasets import SyntheticTokens
from training.metrics.step_timer import StepTimer
from training.parallel.ranks import Ranks
from training.run import meters
from training.run.build import build
from training.run.loop import train
from training.runs import starting
from training.runs.records import read_metrics as metrics
from training.runs.records import read_summary as summary

# For runs in this process.
QUIET = (*SMALL_RUN, "tracking=disabled")


def test_a_peak_is_that_of_the_steps_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    peak, left = 0.0, [8.0, 8.0, 3.0, 2.0]

    def step_and_read(device: torch.device) -> float:
        nonlocal peak
        peak = max(peak, left.pop(0))
        return peak

    def reset(device: torch.device) -> None:
        nonlocal peak
        peak = 0.0

    monkeypatch.setattr(meters, "vram_peak_gib", step_and_read)
    monkeypatch.setattr(meters, "reset_peaks", reset)
    run_here(tmp_path, *QUIET, "steps=4", "log_every=1")
    assert [record["memory/vram_peak_gib"] for record in metrics(tmp_path)] == [8.0, 8.0, 3.0, 2.0]
    assert summary(tmp_path)["memory/vram_peak_gib"] == 8.0


def test_memory_that_is_held_beyond_the_budget_is_a_warning_once(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(meters, "vram_peak_gib", lambda device: 1.5)
    monkeypatch.setattr(meters, "vram_reserved_gib", lambda device: 2.25)
    monkeypatch.setattr(starting, "segments_expand", lambda: False)
    run_here(tmp_path / "more", *QUIET, "steps=3", "log_every=1", "vram_budget=2GiB")
    (line,) = (record.message for record in caplog.records if "allocator" in record.message)
    assert line.startswith("vram_budget=2GiB: torch's allocator holds 2.25 GiB, in which tensors took 1.50 GiB: ")
    caplog.clear()
    assert line.endswith(f", and {starting.ALLOCATOR_ADVICE}")
    run_here(tmp_path / "less", *QUIET, "steps=1", "log_every=1", "vram_budget=2304MiB")
    assert not caplog.records


def test_host_memory_is_that_of_the_ranks_of_one_host():
    assert meters.of_largest_host((0, 0, 0), (1.0, 2.0, 3.0)) == 6.0
    assert meters.of_largest_host((0, 0, 1, 1), (1.0, 2.0, 3.0, 1.5)) == 4.5


def test_memory_of_several_ranks_is_that_of_the_fullest_gpu_and_host(tmp_path: Path, monkeypatch):
    vram, rss = {"memory/vram_peak_gib": 7.0, "memory/vram_reserved_gib": 8.0}, {"memory/rss_gib": 5.0}
    theirs = {**vram, **rss, "memory/host_pinned_gib": 1.0}
    ranks = type("Two", (Ranks,), {"count": 2, "measured": lambda self, values: [values, theirs]})()
    for hosts, expected in (((0, 0), lambda own: own + 5.0), ((0, 1), lambda own: max(own, 5.0))):
        ranks.hosts = hosts
        folder = tmp_path / str(hosts)
        config, invocation = composed(*QUIET, "steps=2", "log_every=2", run_dir=folder)
        folder.mkdir()
        with build(config, invocation, ranks=ranks) as job:
            train(job)
        record, done = metrics(folder)[-1], summary(folder)
        assert (record["memory/vram_peak_gib"], record["memory/vram_reserved_gib"]) == (7.0, 8.0)
        assert record["memory/rss_gib"] == expected(done["rank0/memory/rss_gib"])
        # Of the whole step's batch.
        assert record["perf/tokens_per_s"] == pytest.approx(4 * 64 / record["perf/step_ms"] * 1e3)


def test_a_step_lasts_as_long_as_the_making_of_its_batch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make = SyntheticTokens.batch

    def slowly(self: SyntheticTokens, index: int) -> torch.Tensor:
        time.sleep(0.2)
        return make(self, index)

    monkeypatch.setattr(SyntheticTokens, "batch", slowly)
    run_here(tmp_path, *QUIET, "steps=2", "log_every=1")
    assert all(record["perf/step_ms"] > 200 for record in metrics(tmp_path))
    assert all(record["perf/tokens_per_s"] < 4 * 64 / 0.2 for record in metrics(tmp_path))


def test_a_record_covers_the_steps_since_the_last(tmp_path: Path):
    run_here(tmp_path, *QUIET, "steps=5", "log_every=2", "offload=layer_stream")
    records = metrics(tmp_path)
    assert [record["train/step"] for record in records] == [2, 4, 5]
    # The first record includes copies that only the first step makes.
    assert records[1]["transfer/h2d_gib"] == records[2]["transfer/h2d_gib"] > 0
    assert all(record["transfer/d2h_gib"] > 0 for record in records)


def test_a_record_with_steps_behind_the_warm_up_has_none_of_the_warm_up(tmp_path: Path, monkeypatch):
    make = SyntheticTokens.batch

    def slow_at_first(self: SyntheticTokens, index: int) -> torch.Tensor:
        time.sleep(1.0 if index == 1 else 0.0)
        return make(self, index)

    monkeypatch.setattr(SyntheticTokens, "batch", slow_at_first)
    run_here(tmp_path, *QUIET, "steps=4", "log_every=4", "offload=layer_stream", "warmup_steps=2")
    (record,) = metrics(tmp_path)
    # With the second step it would be more than a quarter of a second.
    assert record["perf/step_ms"] < 250
    assert record["perf/tokens_per_s"] == pytest.approx(4 * 64 / record["perf/step_ms"] * 1e3)
    assert record["train/tokens"] == 4 * 4 * 64
    planned = summary(tmp_path)
    assert record["transfer/h2d_gib"] == planned["planned/transfer/h2d_gib"]


def test_the_speed_of_a_record_is_that_of_the_mean_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    times_ms = [[100.0, 300.0], [40.0, 60.0], [80.0]]
    monkeypatch.setattr(StepTimer, "collect", lambda timer: times_ms.pop(0))
    run_here(tmp_path, *QUIET, "steps=5", "log_every=2", "warmup_steps=0")
    records = metrics(tmp_path)
    assert [record["perf/step_ms"] for record in records] == pytest.approx([200.0, 50.0, 80.0])
    # 4 sequences of 64 tokens a step.
    assert [record["perf/tokens_per_s"] for record in records] == pytest.approx([1280.0, 5120.0, 3200.0])


def test_speed_and_total_count_no_padding_and_survive_a_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = SyntheticTokens.batch

    def padded(self, index: int) -> dict[str, torch.Tensor]:
        tokens = drawn(self, index)
        # 4 rows of 64 positions, of which 4 + 10 * index are tokens.
        lengths = torch.tensor([1, 1, 1, 1 + 10 * index])
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "lengths": lengths}

    monkeypatch.setattr(SyntheticTokens, "batch", padded)
    monkeypatch.setattr(StepTimer, "collect", lambda timer: [timer._steps.clear(), 100.0, 300.0][1:])
    job = (*QUIET, "log_every=2", "checkpoint.every=2", "warmup_steps=0")
    run_here(tmp_path / "run", *job, "steps=4", "checkpoint.keep=9")
    records = metrics(tmp_path / "run")
    assert [record["train/tokens"] for record in records] == [4 + 14, 4 + 14 + 24 + 34]
    assert [record["perf/tokens_per_s"] for record in records] == pytest.approx([18 / 0.4, 58 / 0.4])
    # In another directory, which has no records of the steps before.
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    run_here(tmp_path / "resumed", *job, "steps=4", f"resume={checkpoint}")
    assert [record["train/tokens"] for record in metrics(tmp_path / "resumed")] == [76]


def test_what_a_mode_counts_is_shown_as_the_mean_of_a_step():
    moved = Counters(
        h2d_bytes=8 * 2**30,
        d2h_bytes=6 * 2**30,
        activation_h2d_bytes=4 * 2**30,
        activation_d2h_bytes=2 * 2**30,
        stall_ms=10.0,
        file_bytes=12 * 2**30,
        file_wait_ms=14.0,
        update_ms=40.0,
        update_wait_ms=16.0,
        updated_parameters=80_000_000,
        speculated_parameters=20_000_000,
        undone_parameters=5_000_000,
        undo_ms=18.0,
    )
    assert meters.traffic(moved, 2) == {
        "transfer/h2d_gib": 4.0,
        "transfer/d2h_gib": 3.0,
        "transfer/activations_h2d_gib": 2.0,
        "transfer/activations_d2h_gib": 1.0,
        "transfer/files_gib": 6.0,
        "transfer/files_wait_ms": 7.0,
        "transfer/stall_ms": 5.0,
    }
    assert meters.updates(moved, 2) == {
        "optimizer/host_ms": 20.0,
        "optimizer/wait_ms": 8.0,
        # 80 million in 40 ms.
        "optimizer/gparams_per_s": 2.0,
        "optimizer/speculated": 0.25,
        "optimizer/undone": 0.25,
        "optimizer/undo_ms": 9.0,
    }
    # The worker is still at the updates of the step.
    assert "optimizer/speculated" not in meters.updates(replace(moved, updated_parameters=0), 2)


def test_the_cpu_has_no_floor_no_mfu_and_no_vram(tmp_path: Path):
    run_here(tmp_path, *QUIET, "offload=layer_stream", "steps=1")
    found = metrics(tmp_path)[0].keys() | summary(tmp_path).keys()
    assert not {key for key in found if "floor" in key or "mfu" in key or "vram" in key}
    assert {"memory/rss_gib", "perf/tokens_per_s", "train/tokens"} <= found
    assert "train/epoch" not in found  # random tokens have no end


def test_a_forward_alone_has_no_mfu_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meters, "known_peak_flops", lambda device, dtype: 1e12)
    run_here(tmp_path / "whole", *QUIET, "offload=none", "steps=1")
    assert summary(tmp_path / "whole")["perf/mfu"] > 0
    monkeypatch.setattr(Resident, "lacks", frozenset({"training"}))
    run_here(tmp_path / "forward", *QUIET, "offload=none", "steps=1")
    found = summary(tmp_path / "forward")
    assert found["forward_only"] is True
    assert "perf/mfu" not in found.keys() | metrics(tmp_path / "forward")[0].keys()

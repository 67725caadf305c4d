"""Settings: which runs repeat each other, what names tell them apart, and which run is the reference of which."""

from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

from tests.training.helpers.in_process import composed
from training.comparison.rows import build_rows
from training.comparison.runs import find_runs
from training.comparison.settings import UPDATE_RULE, in_common
from training.config.modes import mode_options
from training.config.schema import SCHEMAS
from training.runs.directory import RunDirectory
from training.runs.records import write_summary

H200 = {"gpu_name": "NVIDIA H200", "h2d_gb_s": 50.0, "d2h_gb_s": 25.0}


def test_names_tell_runs_apart(write_run):
    write_run("none")
    write_run("none", recompute="block")
    write_run("layer_stream", knobs={"slots": 2, "include": []})
    write_run("layer_stream", knobs={"slots": 3, "include": []})
    write_run("tensor_swap", knobs={"budget": 0})
    write_run("layer_stream", knobs={"slots": 3, "include": ["a", "b"]}, top={"batch_size": 4})
    assert list(write_run.by_name()) == [
        "none batch_size=8",
        "none recompute=block batch_size=8",
        "layer_stream slots=2 include=[] batch_size=8",
        "layer_stream slots=3 include=[] batch_size=8",
        "tensor_swap batch_size=8",
        "layer_stream slots=3 include=[a,b] batch_size=4",
    ]


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "host_adamw"])
def test_runs_that_differ_in_their_seed_alone_repeat_each_other(tmp_path: Path, optimizer: str):
    """With the configurations of real runs, in which keys may follow the seed."""
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        config, invocation = composed("offload=layer_stream", f"optimizer={optimizer}", f"seed={seed}", run_dir=folder)
        RunDirectory(folder).write_config(config, invocation)
    (row,) = build_rows(find_runs([tmp_path]))
    assert (row.name, row.seeds) == ("layer_stream", "0, 1")


def test_runs_with_and_without_recompute_are_two_rows_each_with_its_reference(tmp_path: Path):
    """With the configurations of real runs."""
    for number, (mode, recompute) in enumerate(product(("none", "layer_stream"), ("none", "block"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        config, invocation = composed(f"offload={mode}", f"recompute={recompute}", run_dir=folder)
        RunDirectory(folder).write_config(config, invocation)
        write_summary(folder, {"status": "ok", "perf/step_ms": 1.0 + number})
    rows = build_rows(find_runs([tmp_path]))
    assert {row.name: row.ratio for row in rows} == {
        "none": 1.0,
        "none recompute=block": 1.0,
        "layer_stream": 3.0,
        "layer_stream recompute=block": 2.0,
    }


@pytest.mark.parametrize("optimizer", ["adamw", "host_adamw"])
def test_every_mode_is_compared_with_the_resident_run_under_the_optimizer_that_it_brings(
    tmp_path: Path, optimizer: str
):
    """With the configurations of real runs: a key that only one of the optimizers has must not part them."""
    for number, mode in enumerate(["none", *sorted({*mode_options()} - {"none"})]):
        folder = tmp_path / str(number)
        folder.mkdir()
        given = [f"optimizer={optimizer}"] if mode == "none" else []
        config, invocation = composed(f"offload={mode}", *given, run_dir=folder)
        RunDirectory(folder).write_config(config, invocation)
        write_summary(folder, {"status": "ok", "perf/step_ms": 1.0})
    rows = build_rows(find_runs([tmp_path]))
    assert {row.name: row.ratio for row in rows} == dict.fromkeys(mode_options(), 1.0)


def test_the_update_rule_of_adamw_has_the_keys_that_the_resident_one_has():
    keys = {entry.name for entry in fields(SCHEMAS["optimizer"]["adamw"]) if not entry.name.startswith("_")}
    assert {f"optimizer.{key}" for key in keys} == {*UPDATE_RULE}


def test_names_leave_out_keys_that_other_runs_do_not_have(write_run):
    write_run("none", top={"new_key": 3})
    write_run("layer_stream")
    lost = write_run("none", status="failed", reason="exit status 4", losses=None)
    for name in ("choices.yaml", "config.yaml"):
        (lost / name).unlink()
    assert list(write_run.by_name()) == ["none", "layer_stream", "2"]


def test_names_leave_out_keys_that_are_null_or_false(write_run):
    write_run("none", top={"vram_budget": None, "plan": False, "clip_norm": None})
    write_run("none", top={"vram_budget": "22GiB", "plan": True, "clip_norm": 1.0})
    assert list(write_run.by_name()) == ["none", "none vram_budget=22GiB plan=true clip_norm=1.0"]


def test_the_reference_has_the_same_settings_except_for_the_mode(write_run):
    write_run("none", step_ms=100.0)
    write_run("none", step_ms=150.0, recompute="block")
    write_run("none", step_ms=400.0, top={"batch_size": 32})
    write_run("layer_stream", step_ms=300.0, recompute="block", top={"log_every": 5}, knobs={"slots": 4})
    write_run("layer_stream", step_ms=300.0, top={"batch_size": 64})
    *_, with_recompute, alone = write_run.by_name().values()
    assert with_recompute.ratio == 2.0
    assert (alone.ratio, alone.floor_ratio, alone.curve) == (None, None, None)


def test_resident_runs_on_several_devices_are_compared_with_the_one_on_the_fewest(write_run):
    for devices, step_ms in ((2, 60.0), (1, 100.0), (4, 30.0)):
        write_run("none", step_ms=step_ms, top={"devices": devices, "microbatches": 8 // devices})
    write_run("none", step_ms=90.0, top={"devices": 1, "microbatches": 2})
    write_run("layer_stream", step_ms=120.0, top={"devices": 2, "microbatches": 4})
    write_run("layer_stream", step_ms=50.0, top={"devices": 8, "microbatches": 1})
    found = {(row.devices, row.runs[0].config["microbatches"], row.name[:4]): row for row in write_run.rows()}
    assert {key: row.ratio for key, row in found.items()} == {
        (2, "4", "none"): 0.6,
        (1, "8", "none"): 1.0,
        (4, "2", "none"): pytest.approx(1 / 3),
        (1, "2", "none"): 1.0,
        (2, "4", "laye"): 2.0,
        (8, "1", "laye"): 0.5,
    }


@pytest.mark.parametrize(("recompute", "ratio"), [(("none", "block"), 2.0), (("none",), 3.0)])
@pytest.mark.parametrize("asked", ["none", "block"])
def test_a_mode_that_recomputes_by_itself_has_a_reference_that_recomputes_if_there_is_one(
    write_run, recompute: tuple[str, ...], ratio: float, asked: str
):
    for choice in recompute:
        write_run("none", recompute=choice, step_ms=100.0 if choice == "none" else 150.0)
    write_run("shard_offload", step_ms=300.0, recompute=asked)
    assert write_run.by_name()["shard_offload"].ratio == ratio


def test_a_mode_that_recomputes_by_itself_is_one_row_with_and_without_recompute(write_run):
    write_run("shard_offload", recompute="none")
    write_run("shard_offload", recompute="block")
    assert len(write_run.by_name()["shard_offload"].runs) == 2


def test_a_run_with_host_adamw_is_compared_with_adamw_if_no_resident_run_has_host_adamw(write_run):
    write_run("none", step_ms=100.0)
    write_run("layer_stream", optimizer="host_adamw", step_ms=200.0)
    assert write_run.by_name()["layer_stream"].ratio == 2.0
    write_run("none", optimizer="host_adamw", step_ms=400.0)
    assert write_run.by_name()["layer_stream"].ratio == 0.5


def test_a_resident_run_that_failed_is_no_reference(write_run):
    write_run("none", status="out_of_memory", reason="the GPU is full")
    write_run("layer_stream")
    assert write_run.by_name()["layer_stream"].ratio is None


def test_runs_on_another_device_are_neither_repetitions_nor_references(write_run):
    asked = {"device": "auto"}
    write_run("none", seed=0, hardware={"device": "cpu"}, step_ms=900.0, top=asked)
    write_run("none", seed=1, hardware=H200, step_ms=10.0, top=asked)
    write_run("layer_stream", hardware={"device": "cpu"}, step_ms=990.0, top=asked)
    write_run("tensor_swap", hardware=H200, step_ms=15.0, top=asked)
    found = write_run.by_name()
    assert {name: row.ratio for name, row in found.items()} == {
        "none device=cpu": 1.0,
        "none device=NVIDIA H200": 1.0,
        "layer_stream device=cpu": pytest.approx(1.1),
        "tensor_swap device=NVIDIA H200": 1.5,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_run_without_hardware_joins_the_others_if_they_used_one_device(write_run, device: str):
    write_run("none", seed=0, hardware={"device": device})
    write_run("none", seed=1, status="failed", reason="lr", losses=None)
    assert [len(row.runs) for row in write_run.by_name().values()] == [2]


def test_what_is_the_same_in_all_runs_has_the_source_of_the_model(write_run):
    for slots in (2, 3):
        write_run("layer_stream", knobs={"slots": slots}, top={"model": {"source": "Qwen/Qwen3-8B"}})
    found = in_common(find_runs([write_run.folder]))
    assert {"model=tiny", "model.source=Qwen/Qwen3-8B", "batch_size=8"} <= {*found}
    assert not any(text.startswith(("offload", "optimizer.")) for text in found)

"""The machine that a plan is made for: given by hand, kept by the probe, or measured in short."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.training.helpers.in_process import components_of
from training.config.cards import ESTIMATED, PRESETS
from training.errors import UserError
from training.planning import machine as machine_module
from training.planning.machine import (
    BOTH_SHARE,
    Machine,
    block_work,
    disk_gb_s,
    keep,
    kept,
    kept_path,
    machine_of,
    preset,
)

CPU = torch.device("cpu")
KEPT = {
    "name": "this one",
    "host_gib": 8.0,
    "h2d_gb_s": 10.0,
    "d2h_gb_s": 11.0,
    "both_gb_s": 6.0,
    "update_gparams_s": 1.5,
    "fp32_tflops": 0.5,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept of any machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_hardware_measured_is_refused_if_nothing_was_measured():
    with pytest.raises(UserError, match=r"hardware=measured: nothing is kept of .*: run python scripts/probe\.py"):
        machine_of(components_of("hardware=measured"))


def block_rate(machine: Machine, kind: str, dtype: torch.dtype) -> float:
    """Returns the rate of the block that the probe measures, by the rates of its products and of its other parts."""
    work = block_work(kind, dtype)
    flops = work.flops + (machine.rates["costs"].get("attention", 1) - 1) * work.attention_flops
    return work.flops / (flops / machine.flops_per_s(dtype) + work.memory_bytes / machine.rates["memory_gb_s"] / 1e9)


def test_products_keep_a_share_where_figures_contradict():
    machine = preset("h200", {"device_gb_s": 1.0})
    assert machine.flops_per_s(torch.bfloat16) == pytest.approx(2 * 566e12)


def test_products_of_experts_cost_what_the_probe_measured():
    machine = preset("h200", {"grouped_tflops": 400.0})
    assert machine.rates["costs"]["grouped"] == machine.flops_per_s(torch.bfloat16) / 400e12 > 1
    assert "grouped" not in preset("h200").rates["costs"]


def test_attention_costs_what_the_probe_measured_or_a_share():
    for given in (300.0, None):
        machine = preset("h200", {"attention_tflops": given})
        rate = (given or 0.75 * machine.flops_per_s(torch.bfloat16) / 1e12) * 1e12
        assert machine.rates["costs"]["attention"] == pytest.approx(machine.flops_per_s(torch.bfloat16) / rate)
    assert "attention" not in Machine("a CPU", 1, 1, 1, 1, 1, bf16_tflops=1, fp32_tflops=1).rates["costs"]


def test_attention_over_very_long_rows_costs_more(planned):
    machine = preset("h200")
    for tokens, slowdown in ((16_384, 1), (65_536, 1), (524_288, 1 / 0.925)):
        costs = machine.over_rows(tokens).rates["costs"]
        assert costs["attention"] == pytest.approx(slowdown * machine.rates["costs"]["attention"])
        assert machine.over_rows(tokens).flops_per_s(torch.bfloat16) == machine.flops_per_s(torch.bfloat16)
    assert planned("seq_len=262144", "batch_size=1").machine.attention_slowdown == pytest.approx(1 / 0.95)


def test_products_of_experts_have_no_rate_beside_one_that_is_given():
    keep(CPU, KEPT | {"grouped_tflops": 0.1, "bf16_tflops": 0.2})
    assert machine_of(components_of()).grouped_tflops == 0.1
    assert machine_of(components_of("hardware.tflops=1")).grouped_tflops is None


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_values_given_by_hand_replace_those_of_a_preset(precision: str):
    given = ("hardware.host_gib=1", "hardware.bus_gb_s=10", "hardware.tflops=100", f"precision={precision}")
    machine = machine_of(components_of("hardware=a100", *given))
    assert (machine.name, machine.host_gib, machine.vram_gib) == ("A100 80GB", 1, 79)
    assert (machine.h2d_gb_s, machine.d2h_gb_s, machine.both_gb_s) == (10, 10, 10 * BOTH_SHARE)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert block_rate(machine, "cuda", dtype) == pytest.approx(100e12)


@pytest.mark.parametrize("hardware", ["auto", "measured"])
def test_values_that_the_probe_kept_are_used(hardware: str):
    keep(CPU, KEPT)
    machine = machine_of(components_of(f"hardware={hardware}", "hardware.host_gib=4"))
    assert (machine.name, machine.source) == ("this one", "kept by the probe; given: host_gib")
    assert machine.host_gib == 4.0
    assert block_rate(machine, "cpu", torch.float32) == pytest.approx(0.5e12)
    assert (machine.bandwidth.h2d, machine.bandwidth.d2h, machine.bandwidth.both) == (10.0, 11.0, 6.0)


@pytest.mark.parametrize("other", [{"name": "old", "h2d_gb_s": 1.0}, KEPT | {"of_another_version": 1.0}])
def test_values_of_another_version_are_measured_again(other: dict):
    keep(CPU, other)
    assert machine_of(components_of()).source == "measured in short"


@pytest.mark.parametrize("option", PRESETS)
def test_of_a_preset_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, option: str):
    monkeypatch.setattr(machine_module, "measured_in_short", lambda components: pytest.fail("measured"))
    machine = machine_of(components_of(f"hardware={option}"))
    assert (machine.source, machine.name) == (PRESETS[option]["source"], PRESETS[option]["name"])
    assert 30 < machine.bf16_tflops < 600
    assert machine.fp32_tflops < machine.bf16_tflops
    assert 10 < machine.both_gb_s < machine.h2d_gb_s < 60


def test_what_is_given_is_named_beside_the_figures_of_a_preset():
    machine = machine_of(components_of("hardware=rtx3090", "hardware.vram_gib=11.5"))
    assert (machine.vram_gib, machine.source) == (11.5, f"{ESTIMATED}; given: vram_gib")


def test_a_large_file_is_measured_and_a_small_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_module, "PIECE_BYTES", 64 * 2**10)
    (tmp_path / "large").write_bytes(bytes(2**20))
    (tmp_path / "small").write_bytes(bytes(1000))
    assert disk_gb_s(tmp_path / "large") is None or disk_gb_s(tmp_path / "large") > 0
    assert disk_gb_s(tmp_path / "small") is None
    assert disk_gb_s(tmp_path / "none") is None


def test_values_are_kept_by_the_name_of_the_device(cache: Path):
    assert kept(CPU) is None
    path = keep(CPU, {"name": "this one", "host_gib": 2})
    assert path == kept_path(CPU)
    assert (path.parent, path.name[:6]) == (cache / "lightering", "probe-")
    assert kept(CPU) == {"name": "this one", "host_gib": 2}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "{}", '{"nam', '{"name": "x", "both_gb_s": "9"}', '{"name": "x", "both_gb_s": -1}', '{"name": 3}'],
)
def test_a_damaged_file_counts_as_none(content: str):
    keep(CPU, {"name": "x"}).write_text(content)
    assert kept(CPU) is None


def test_without_a_home_directory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert kept(CPU) is None
    with pytest.raises(UserError, match=r"HOME is not set.*: set XDG_CACHE_HOME to"):
        keep(CPU, {"name": "x"})


@pytest.mark.slow
def test_the_script_keeps_what_a_plan_then_takes(tmp_path: Path):
    script = subprocess.run(
        [sys.executable, "scripts/probe.py", "--device=cpu"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert script.returncode == 0, script.stderr
    values = kept(CPU)
    machine = Machine(**values)
    assert machine.vram_gib is None
    assert min(machine.h2d_gb_s, machine.both_gb_s, machine.host_gib) > 0.05
    assert 1e-3 < machine.fp32_tflops < 100
    assert 1e-3 < machine.update_gparams_s < 100
    assert f"update_gparams_s   {values['update_gparams_s']:g}" in script.stdout
    assert str(kept_path(CPU)) in script.stdout
    command = [sys.executable, "train.py", "plan=true", "hardware=measured", "device=cpu", "seq_len=16"]
    plan = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert plan.returncode == 0, plan.stderr
    assert f"{values['name']} (kept by the probe)" in plan.stdout
    assert "no GPU here" in plan.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_products_of_experts_of_a_gpu_are_in_what_the_probe_keeps():
    values = machine_module.probe(torch.device("cuda"))
    assert values["grouped_tflops"] > 0.2 * values["bf16_tflops"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_that_is_measured_in_short_has_the_rate_of_its_memory_and_keeps_none():
    components = components_of("offload=none", "hardware=auto", device="cuda")
    reserved_bytes = torch.cuda.memory_reserved()
    assert machine_module.measured_in_short(components)["device_gb_s"] > 100
    # cuBLAS retains a workspace of some MiB.
    assert torch.cuda.memory_reserved() <= reserved_bytes + 64 * 2**20

"""The chosen device, the facts that are recorded about it, and its peak rates."""

import functools
import json
import mmap
import os
import subprocess
import time
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload.planning.simulated_streams import Bandwidth
from training.errors import UserError
from training.profiling import hardware

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def pretend_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [("cpu", 2, "cpu"), ("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_resolve_device(monkeypatch, name, count, expected):
    pretend_gpus(monkeypatch, count)
    assert str(hardware.resolve_device(name)) == expected


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "mps", "", "cuda:1:2"])
def test_an_unknown_device_names_the_choices(name):
    with pytest.raises(UserError, match=f"device={name}: unknown device; choose auto, cuda, cuda:N"):
        hardware.resolve_device(name)


def test_an_absent_index_names_the_present_gpus(monkeypatch):
    pretend_gpus(monkeypatch, 2)
    with pytest.raises(UserError, match=r"device=cuda:2: .*cuda:0 \(Card 0\), cuda:1 \(Card 1\)"):
        hardware.resolve_device("cuda:2")


def test_an_absent_gpu_names_the_cause(monkeypatch):
    pretend_gpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"device=cuda: .*nvidia-smi.*device=cpu"):
        hardware.resolve_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES is ''"):
        hardware.resolve_device("cuda")


def test_a_torch_without_cuda_is_reported(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UserError, match=r"device=cuda:0: this torch \(.*\) was built without CUDA"):
        hardware.resolve_device("cuda:0")


def test_the_cpu_is_described():
    facts = hardware.describe_device(CPU)
    assert facts["device"] == "cpu"
    assert facts["cpu_cores"] >= 1
    assert facts["cpu_name"]
    assert 0.1 < facts["host_memory_gib"] < 100_000
    assert json.loads(json.dumps(facts)) == facts


def test_the_hosts_memory_is_what_this_process_may_use(monkeypatch):
    monkeypatch.setattr(hardware, "usable_host_bytes", lambda: 3 * 2**30)
    assert hardware.describe_device(CPU)["host_memory_gib"] == 3.0
    # Neither /proc nor control groups, as on macOS.
    monkeypatch.setattr(hardware, "usable_host_bytes", lambda: None)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: SimpleNamespace(total=5 * 2**30))
    assert hardware.describe_device(CPU)["host_memory_gib"] == 5.0


def test_the_record_of_a_gpu_has_its_bus(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_bandwidths", {CPU: Bandwidth(50.5, 40.25, 30.0)})
    bus = {"h2d_gb_s": 50.5, "d2h_gb_s": 40.25, "both_gb_s": 30.0}
    facts = hardware.record_hardware(SimpleNamespace(device=CPU, asynchronous=True), tmp_path)
    assert facts == hardware.describe_device(CPU) | bus
    written = json.loads((tmp_path / "hardware.json").read_text())
    assert written == facts | {key: written[key] for key in ("date", "commit") if key in written}
    assert "date" in written
    without_bus = hardware.record_hardware(SimpleNamespace(device=CPU, asynchronous=False), tmp_path)
    assert without_bus == hardware.describe_device(CPU)


@pytest.mark.parametrize(
    ("output", "facts"),
    [
        ("570.86, 5, 16\n", {"driver": "570.86", "pcie_generation": 5, "pcie_width": 16}),
        ("570.86, [N/A], [N/A]\n", {"driver": "570.86"}),
        ("No devices were found\n", {}),
    ],
)
def test_answers_of_nvidia_smi(tmp_path, monkeypatch, output, facts):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{output.strip()}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert hardware._nvidia_smi_facts("GPU-0") == facts


@pytest.mark.parametrize(
    ("gpu_name", "bf16_tflops", "fp32_tflops"),
    [
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H200 NVL", 835.5, 60.0),
        ("NVIDIA H100 PCIe", 756.0, 51.2),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA GeForce RTX 3090", 71.0, 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0, 40.0),
    ],
)
def test_datasheet_peaks(gpu_name, bf16_tflops, fp32_tflops):
    assert hardware.datasheet_flops(gpu_name, torch.bfloat16) == bf16_tflops * 1e12
    assert hardware.datasheet_flops(gpu_name, torch.float32) == fp32_tflops * 1e12


@pytest.mark.parametrize(
    "gpu_name",
    [
        "NVIDIA H20",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "Tesla V100-SXM2-16GB",
    ],
)
def test_a_gpu_outside_the_table_is_not_mistaken_for_another(gpu_name):
    assert hardware.datasheet_flops(gpu_name, torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_the_cpu_is_measured_once_and_keeps_the_random_state(dtype):
    hardware.peak_flops.cache_clear()
    state = torch.get_rng_state()
    peak = hardware.peak_flops(CPU, dtype)
    assert 1e8 < peak < 1e14
    assert hardware.peak_flops(CPU, dtype) == peak  # a second measurement would give another value
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_on_the_cpu():
    before_gib = hardware.rss_gib()
    # Of the system, because an allocator may have as much in hand. Some systems count a moment later.
    with mmap.mmap(-1, 64 * 2**20) as held:
        held.write(b"1" * len(held))
        deadline = time.monotonic() + 300
        while hardware.rss_gib() - before_gib <= 0.03 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert hardware.rss_gib() - before_gib > 0.03
    hardware.reset_peaks(CPU)
    assert hardware.vram_peak_gib(CPU) == hardware.vram_reserved_gib(CPU) == 0.0


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_of_memory_that_processes_share_each_has_its_part():
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, 64 * 2**20)
    with mmap.mmap(descriptor, 64 * 2**20, mmap.MAP_SHARED) as held:
        held.write(b"1" * len(held))
        whole, part = hardware.rss_gib(), hardware.rss_gib(sharers=4)
    os.close(descriptor)
    assert whole - part == pytest.approx(0.75 * 64 / 2**10, rel=0.2)


@pytest.mark.gpu
@needs_gpu
def test_the_gpu_is_described_and_its_peaks_are_counted():
    device = hardware.resolve_device("cuda")
    facts = hardware.describe_device(device)
    assert facts["gpu_name"] == torch.cuda.get_device_name(device)
    assert facts["gpu_memory_gib"] > 1
    assert json.loads(json.dumps(facts)) == facts

    torch.cuda.empty_cache()
    hardware.reset_peaks(device)
    start_gib = hardware.vram_peak_gib(device)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    del held
    assert hardware.vram_peak_gib(device) - start_gib == pytest.approx(0.25, abs=0.01)
    assert hardware.vram_reserved_gib(device) >= hardware.vram_peak_gib(device)
    torch.cuda.empty_cache()
    hardware.reset_peaks(device)
    assert hardware.vram_peak_gib(device) == pytest.approx(start_gib, abs=0.01)


def test_a_library_that_loads_with_the_first_product_of_a_size_slows_no_rate(monkeypatch: pytest.MonkeyPatch):
    loaded: set[int] = set()
    now = [0.0]

    def seconds_of(call: functools.partial, device: torch.device) -> float:
        size = len(call.args[0])
        # A launch takes a millisecond.
        seconds = 2 * size**3 / 1e11 + 1e-3 if size in loaded else 5.0
        loaded.add(size)
        now[0] += seconds
        return seconds

    monkeypatch.setattr(hardware, "seconds_of", seconds_of)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now[0])
    assert hardware._measured_flops(torch.device("cpu"), torch.float32) == pytest.approx(1e11, rel=0.1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measured_gpu_stays_below_its_datasheet_and_frees_its_memory(dtype):
    device = hardware.resolve_device("cuda")
    reserved_bytes = torch.cuda.memory_reserved(device)
    measured = hardware._measured_flops(device, dtype)
    datasheet = hardware.datasheet_flops(torch.cuda.get_device_name(device), dtype)
    if datasheet is not None:
        assert measured < 1.05 * datasheet
        # Other tests on the same card take its time.
        if "PYTEST_XDIST_WORKER" not in os.environ:
            assert measured > 0.4 * datasheet
    # cuBLAS retains a workspace of some MiB.
    assert torch.cuda.memory_reserved(device) <= reserved_bytes + 64 * 2**20


def test_the_versions_and_the_date():
    facts = hardware.provenance()
    assert facts["torch"] == torch.__version__
    age = datetime.now().astimezone() - datetime.fromisoformat(facts["date"])
    assert timedelta(0) <= age < timedelta(minutes=5)


def test_the_commit_is_that_of_the_source_alone(tmp_path: Path):
    assert hardware.commit(tmp_path) is None
    source = tmp_path / "checkout"
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q", str(source)], check=True, timeout=300)
    (source / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True, timeout=300)
    subprocess.run([*git, "commit", "-qm", "first"], check=True, timeout=300)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True, timeout=300).stdout
    (source / "file").write_text("2")
    known = hardware.commit(source)
    assert known == f"{head[:10]}-dirty"
    (source / "below").mkdir()
    assert hardware.commit(source / "below") is None

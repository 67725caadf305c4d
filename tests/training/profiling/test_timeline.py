"""The intervals of a timeline, read from a profiler's trace, and their sums and picture."""

import gzip
import json
import os
import subprocess
from pathlib import Path
from threading import Thread

import pytest
import torch
from matplotlib import image
from omegaconf import OmegaConf

from offload.streams import registry
from offload.streams.transfer import profiled
from tests.training.helpers.in_process import command_here
from tests.training.helpers.wandb_files import records_of, summary_of, wandb_runs
from training.profiling.hardware import resolve_device
from training.profiling.timeline import (
    Timeline,
    Tracer,
    draw_chart,
    merge,
    read_timeline,
    step_to_trace,
    subtract,
    tracing,
)
from training.runs.records import read_metrics, read_summary

COMPUTE, IN, OUT = 7, 13, 17


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


GPU = [
    event("cpu_op", "aten::mm", 0.0, 5000.0),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.0, 900.0, stream=IN),
    event("kernel", "gemm", 1000.0, 500.0, stream=COMPUTE),
    event("kernel", "add", 1502.0, 98.0, stream=COMPUTE),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1600.0, 700.0, stream=OUT),
    event("kernel", "norm of a gradient", 1700.0, 100.0, stream=OUT),
    event("kernel", "gemm", 2000.0, 300.0, stream=COMPUTE),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2300.0, 10.0, stream=COMPUTE),
    event("user_annotation", "update layers.0", 1900.0, 600.0, tid=2),
    event("user_annotation", "copy in layers.0", 0.0, 5.0),
    {"name": "a marker without a category", "ts": 1.0},
    {"cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 0.0, "dur": 9000.0, "tid": 0},
]
CPU = [
    event("cpu_op", "evaluate_function", 0.0, 1000.0),
    event("user_annotation", "copy in layers.0", 200.0, 300.0),
    event("cpu_op", "aten::copy_", 210.0, 280.0),
    event("user_annotation", "copy out gradient of layers.0", 700.0, 100.0),
    event("user_annotation", "update layers.0", 600.0, 500.0, tid=2),
    event("cpu_op", "aten::addcdiv_", 610.0, 480.0, tid=2),
    event("user_annotation", "Optimizer.step#AdamW.step", 1000.0, 200.0),
    event("user_annotation", "somebody else's range", 0.0, 4000.0),
]


def write(path: Path, events: list[dict]) -> Path:
    content = json.dumps({"traceEvents": events[::-1]}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def gpu(tmp_path: Path) -> Timeline:
    return read_timeline(write(tmp_path / "trace.json.gz", GPU))


def test_device_work_is_sorted_into_lanes(gpu: Timeline):
    assert gpu.overlaps
    assert [(work.lane, work.start_us) for work in gpu.intervals] == [
        ("copy in", 0.0), ("compute", 1000.0), ("compute", 1502.0), ("copy out", 1600.0), ("kernels beside", 1700.0),
        ("host update", 1900.0), ("compute", 2000.0), ("compute", 2300.0),
    ]  # fmt: skip


def test_busy_times_merge(gpu: Timeline):
    assert gpu.busy("compute") == [(1000.0, 1500.0), (1502.0, 1600.0), (2000.0, 2310.0)]
    assert gpu.busy("compute", bridge_us=5.0) == [(1000.0, 1600.0), (2000.0, 2310.0)]


def test_stalls_are_the_gaps_of_compute(gpu: Timeline):
    assert gpu.stalls() == [(0.0, 1000.0), (1600.0, 2000.0), (2310.0, 2500.0)]
    assert gpu.summary() == (
        "step 2.5 ms; busy ms: copy in 0.9, compute 0.9, copy out 0.7, kernels beside 0.1, host update 0.6, stall 1.6"
    )


def test_kernels_on_a_compute_stream_that_also_copies_are_compute(tmp_path: Path):
    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.0, 1.0, stream=COMPUTE),
        event("kernel", "gemm", 1.0, 500.0, stream=COMPUTE),
    ]
    assert read_timeline(write(tmp_path / "t.json", events)).busy("compute") == [(1.0, 501.0)]


def test_on_a_cpu_operations_outside_the_engines_ranges_are_compute(tmp_path: Path):
    timeline = read_timeline(write(tmp_path / "trace.json", CPU))
    assert not timeline.overlaps
    assert timeline.busy("compute") == [(0.0, 200.0), (500.0, 700.0), (800.0, 1000.0)]
    assert timeline.busy("copy in") == [(200.0, 500.0)]
    assert timeline.busy("copy out") == [(700.0, 800.0)]
    assert timeline.busy("host update") == [(600.0, 1200.0)]
    assert timeline.stalls() == [(200.0, 500.0), (700.0, 800.0), (1000.0, 1200.0)]


def test_a_trace_without_work_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="contains no work"):
        read_timeline(write(tmp_path / "trace.json", [event("user_annotation", "somebody's", 0.0, 1.0)]))


@pytest.mark.parametrize(
    ("periods", "holes", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(-5, 2), (4, 6), (9, 12)], [(2, 4), (6, 9)]),
        ([(0, 3), (5, 8)], [(2, 6)], [(0, 2), (6, 8)]),
        ([(5, 8)], [(0, 1), (6, 7), (9, 10)], [(5, 6), (7, 8)]),
        ([(0, 2), (3, 4)], [(1, 10)], [(0, 1)]),
    ],
)
def test_holes_are_subtracted(periods: list, holes: list, left: list):
    assert subtract(periods, holes) == left


def test_merge_accepts_any_order_and_nesting():
    assert merge([(5, 6), (0, 4), (1, 2), (3, 4.5)]) == [(0, 4.5), (5, 6)]


@pytest.mark.parametrize("events", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.slow
def test_the_chart_is_a_picture_in_the_lanes_colours(tmp_path: Path, events: list[dict]):
    draw_chart(read_timeline(write(tmp_path / "t.json", events)), tmp_path / "step.png", "tiny-layer_stream-0, step 6")
    pixels = (image.imread(tmp_path / "step.png")[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[1] == 1599
    colours = {tuple(pixel) for pixel in pixels.reshape(-1, 3)}
    assert {(0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73), (0xE6, 0x9F, 0x00), (0xCC, 0x79, 0xA7)} <= colours


SMALL = (
    "model.intermediate_size=64", "model.num_hidden_layers=2", "batch_size=2", "seq_len=32",
    "dataset=synthetic", "hardware=h200", "device=cpu", "warmup_steps=1", "log_every=1", "tracking=offline",
)  # fmt: skip


def train(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            patch.delenv(key)
        return command_here(*SMALL, *overrides, f"hydra.run.dir={run_dir}")


def config(trace: bool = True, warmup_steps: int = 5, steps: int = 20):
    return OmegaConf.create({"trace": trace, "warmup_steps": warmup_steps, "steps": steps})


@pytest.fixture
def streams():
    streams = registry.acquire("cpu")
    yield streams
    registry.release(streams)


@pytest.fixture
def tracer(streams, tmp_path: Path) -> Tracer:
    return Tracer(config(warmup_steps=1), tmp_path, streams, "tiny-none-0")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """The directory of a run of three steps, of which the second was traced."""
    run_dir = tmp_path_factory.mktemp("traced")
    job = ("model.hidden_size=32", "offload=layer_stream", "optimizer=host_adamw", "clip_norm=null", "steps=3")
    result = train(run_dir, *job, "trace=true")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"trace: step 2 in {run_dir}/trace/step-2.json.gz; open it in https://ui.perfetto.dev" in result.stderr
    return run_dir


@pytest.mark.slow
def test_a_trace_has_every_lane_and_a_picture(run_dir: Path):
    assert sorted(path.name for path in (run_dir / "trace").iterdir()) == ["step-2.json.gz", "step-2.png"]
    lanes = {work.lane for work in read_timeline(run_dir / "trace" / "step-2.json.gz").intervals}
    assert lanes == {"copy in", "compute", "copy out", "host update"}


def test_a_traced_step_records_its_loss_but_no_speed(run_dir: Path):
    first, traced, last = read_metrics(run_dir)
    speed = {key for key in first if key.startswith(("perf/", "transfer/", "optimizer/"))}
    assert set(first) - set(traced) == speed
    assert set(last) == set(first)
    assert last["transfer/h2d_gib"] == first["transfer/h2d_gib"]
    assert read_summary(run_dir)["perf/step_ms"] == last["perf/step_ms"]


def test_wandb_shows_the_picture_at_its_step_and_keeps_the_trace(run_dir: Path):
    (wandb_run,) = wandb_runs(run_dir)
    shown = summary_of(wandb_run)["summary"]["trace/timeline"]
    assert shown["_type"] == "image-file"
    assert (wandb_run / "files" / shown["path"]).read_bytes() == (run_dir / "trace" / "step-2.png").read_bytes()
    history = [line["item"] for line in records_of(wandb_run, "history")]
    assert [item["train/step"] for item in history] == [1, 2, 3]  # the picture is in the row of its step
    assert history[1]["trace/timeline.path"] == shown["path"]
    kept = wandb_run / "files" / "trace" / "step-2.json.gz"
    assert not kept.is_symlink()  # a link would break when the run's directory is moved
    assert kept.read_bytes() == (run_dir / "trace" / "step-2.json.gz").read_bytes()


def test_wandb_records_configuration_and_machine(run_dir: Path):
    (wandb_run,) = wandb_runs(run_dir)
    recorded = summary_of(wandb_run)
    hardware = json.loads((run_dir / "hardware.json").read_text())
    # Not these two, so that a resumed run does not change its configuration in wandb.
    assert recorded["config"]["machine"] == {k: v for k, v in hardware.items() if k not in ("commit", "date")}
    assert hardware["device"] == "cpu"
    assert recorded["config"]["choices"]["offload"] == "layer_stream"
    assert recorded["config"]["offload"]["slots"] == 3
    assert {"offload=layer_stream", "precision=fp32"} <= set(recorded["tags"])
    assert records_of(wandb_run, "run")[0]["job_type"] == "train"
    summary = {key: value for key, value in read_summary(run_dir).items() if value is not None}
    assert {key: recorded["summary"][key] for key in summary} == summary


@pytest.mark.parametrize(
    ("hidden", "override", "status", "reason"),
    [
        (2**20, "force=true", "out_of_memory", "the host is out of memory"),
        (32, "optimizer.lr=1e30", "failed", "on_nonfinite=stop"),
    ],
    ids=["before the first step", "in a step"],
)
@pytest.mark.slow
def test_a_failed_run_is_marked_in_wandb(tmp_path: Path, hidden: int, override: str, status: str, reason: str):
    result = train(tmp_path, f"model.hidden_size={hidden}", "offload=layer_stream", override, "steps=9")
    assert result.returncode == 1
    (wandb_run,) = wandb_runs(tmp_path)
    recorded = summary_of(wandb_run)
    summary = read_summary(tmp_path)
    assert {key: recorded["summary"][key] for key in summary} == summary
    assert summary["status"] == status
    assert reason in summary["reason"]
    assert recorded["exit_code"] == 1


def test_the_traced_step_is_the_first_after_the_warm_up():
    assert step_to_trace(config()) == 6
    assert step_to_trace(config(trace=False)) is None
    assert step_to_trace(config(warmup_steps=30)) == 20
    assert step_to_trace(config(), steps_done=10) == 16


def test_only_the_chosen_step_is_traced(tracer: Tracer):
    assert [tracer.start(step) for step in (1, 2)] == [False, True]
    torch.ones(2, 2) @ torch.ones(2, 2)
    trace = tracer.stop()
    assert trace.step == 2
    assert trace.picture.exists()
    assert read_timeline(trace.trace).busy("compute")
    assert not tracer.start(3)


def test_other_threads_are_traced(streams, tmp_path: Path):
    def work() -> None:
        with profiled("update layers.0"):
            torch.ones(2, 2) @ torch.ones(2, 2)

    with tracing(tmp_path / "t.json", streams):
        thread = Thread(target=work)
        thread.start()
        thread.join(300)
    assert read_timeline(tmp_path / "t.json").busy("host update")


def test_a_trace_that_cannot_start_is_a_warning(tracer: Tracer, tmp_path: Path, caplog):
    (tmp_path / "trace").touch()
    assert not tracer.start(2)
    (record,) = caplog.records
    assert "tracing step 2 failed" in record.getMessage()


@pytest.mark.parametrize(("broken", "left"), [("read_timeline", ["step-2.json.gz"]), ("export", [])])
def test_a_trace_that_cannot_end_is_a_warning(tracer: Tracer, tmp_path: Path, monkeypatch, caplog, broken, left):
    def fail(*_: object) -> None:
        raise RuntimeError("no trace today\nat all")

    assert tracer.start(2)
    if broken == "export":
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    else:
        torch.ones(2, 2) @ torch.ones(2, 2)
        monkeypatch.setattr(f"training.profiling.timeline.{broken}", fail)
    trace = tracer.stop()
    assert (trace is None) == (broken == "export")
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.getMessage().endswith(("(no trace today); the run continues", "(no trace today)"))
    assert [path.name for path in (tmp_path / "trace").iterdir()] == left


def test_a_step_that_fails_leaves_no_trace_and_no_profiler(tracer: Tracer, streams, tmp_path: Path):
    assert tracer.start(2)
    tracer.close()
    assert list((tmp_path / "trace").iterdir()) == []
    with tracing(tmp_path / "t.json", streams):  # fails if the first profiler still runs
        torch.ones(2, 2) @ torch.ones(2, 2)
    tracer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_lanes_are_its_own_work(tmp_path: Path):
    streams = registry.acquire(resolve_device("cuda"))
    host, there = torch.ones(2**24).pin_memory(), torch.ones(2**24, device=streams.device)
    with tracing(tmp_path / "t.json.gz", streams):
        there.copy_(host)
        (there.view(4096, 4096) @ there.view(4096, 4096)).sum().item()
        Thread(target=lambda: there.mul_(2)).start()
    registry.release(streams)
    timeline = read_timeline(tmp_path / "t.json.gz")
    assert timeline.overlaps
    assert {"copy in", "compute", "copy out"} <= {work.lane for work in timeline.intervals}

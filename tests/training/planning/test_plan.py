"""plan=true as a user runs it, and the plan of a run beside what it measured."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.adapters import root_of
from models.llama import Llama
from offload.knobs import GIB
from offload.modes import tensor_swap
from offload.weights.gradients import offloader
from tests.test_any_model import GPT2
from tests.training.helpers.in_process import ROOT, command_here, components_of
from training.errors import UserError
from training.planning.machine import machine_of
from training.planning.plan import draw_timeline, plan_filled, plan_run, resident_key
from training.settle.components import Components


def run(folder: Path, *overrides: str, status: int = 0) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        result = command_here(*overrides, f"hydra.run.dir={folder}")
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("given", [(), ("recompute=block",), ("microbatches=2",), ("precision=fp32",)])
def test_flops_of_a_library_model_are_three_of_its_forward_though_the_head_computes_gradients_in_it(planned, given):
    job = (*GPT2, "dataset=synthetic", "batch_size=4", "precision=bf16", *given)
    # A token's products with the weights of two blocks and of the head, and attention over half of 64 positions.
    forward = 4 * 64 * (2 * (2 * 12 * 32**2 + 300 * 32) + 2 * 4 * 32 * 64 / 2)
    assert planned(*job).model_flops == 3 * forward
    adapted = planned(*job, "adapter=lora", "adapter.rank=1")
    share = adapted.trained_parameters / adapted.parameters
    assert adapted.model_flops == pytest.approx((2 + share) * forward, rel=0.05)


def test_products_of_experts_take_the_time_that_the_probe_measured():
    job = ("model=mixtral_small", "hardware=h200", "dataset=synthetic", "precision=bf16", "seq_len=64", "batch_size=1")
    components = components_of(*job, "model.overrides={num_hidden_layers:1}")
    machine = machine_of(components)
    as_others, slower = (
        plan_run(components, each, has_gpu=True) for each in (machine, replace(machine, grouped_tflops=100.0))
    )
    # Of 64 tokens, two of eight experts each: three products of a gated layer, in forward and twice in backward.
    sizes = root_of(components.model).config
    flops = 6 * 3 * 2 * 64 * sizes.hidden_size * sizes.intermediate_size
    longer_ms = flops * (1 / 100e12 - 1 / machine.flops_per_s(torch.bfloat16)) * 1e3
    assert slower.forecast.step_ms - as_others.forecast.step_ms == pytest.approx(longer_ms)
    assert "the rate of the products of experts is that of others" in as_others.notes
    assert "the rate of the products of experts is 100 TFLOP/s, as measured" in slower.notes


def test_experts_that_values_choose_are_named_where_a_plan_lacks_their_activations():
    job = ("model=mixtral_small", "hardware=h200", "dataset=synthetic", "precision=bf16", "seq_len=64", "batch_size=1")
    components = components_of(*job, "model.overrides={num_hidden_layers:1,experts_implementation:eager}")
    note = "activations are not in the plan: model.overrides.experts_implementation=eager computes those experts"
    assert any(each.startswith(note) for each in plan_run(components, machine_of(components), has_gpu=True).notes)


@pytest.mark.slow
def test_a_model_of_any_size_in_seconds_and_without_memory(tmp_path: Path):
    # VmHWM, because the peak that getrusage tells begins with that of the process that started this one.
    program = (
        "import atexit, re, runpy, sys; sys.argv[0] = 'train.py';"
        "atexit.register(lambda: print('peak', re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]));"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    arguments = ["plan=true", "offload=layer_stream", "model=llama70b", "batch_size=8", "seq_len=256"]
    arguments += ["hardware=h200", f"hydra.run.dir={tmp_path}"]
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1, result.stderr
    assert time.perf_counter() - start < 120, "some ten seconds on an idle machine"
    assert int(result.stdout.split("peak")[-1]) < 2 * 2**20, "KiB: 68.9 B parameters would take 64 times that"
    plan = read(tmp_path, "plan.json")
    assert plan["fits"] == {"vram_budget": True, "host_budget": False}
    assert 127 < plan["host_bytes"]["weights"] / GIB < 128
    # Two moments in float32 and the remainder of the compact master, beside 2 bytes of weight.
    assert plan["host_bytes"]["optimizer"] / plan["host_bytes"]["weights"] == pytest.approx(5, rel=0.01)
    assert plan["bound"] == "host optimizer"
    summary = read(tmp_path, "summary.json")
    assert summary["status"] == "planned"
    assert summary["reason"].startswith("host_budget: ")
    assert summary["planned/perf/step_ms"] == plan["step_ms"] > plan["alone_ms"]["compute"] > 0
    assert "DOES NOT FIT" in result.stdout


@pytest.mark.slow
def test_a_summary_has_planned_values_beside_measured_ones(tmp_path: Path):
    overrides = ("offload=bounce_linear", "optimizer=host_adamw", "batch_size=4", "microbatches=2", "seq_len=32")
    output = run(tmp_path, *overrides, "steps=4", "log_every=2", "warmup_steps=2", "device=cpu")
    summary = read(tmp_path, "summary.json")
    for key in ("transfer/h2d_gib", "transfer/d2h_gib"):
        assert summary[f"planned/{key}"] == summary[key] > 0
    assert summary["planned/memory/rss_gib"] == pytest.approx(summary["memory/rss_gib"], rel=0.3)
    assert summary["planned/perf/step_ms"] > 0
    (titles,) = (line for line in output.splitlines() if "metric" in line and "unit" in line)
    assert titles.index("ratio") > titles.index("planned") > titles.index("value")
    assert read(tmp_path, "plan.json")["fits"]["vram_budget"] is None


@pytest.mark.usefixtures("small_activations")
def test_an_automatic_budget_keeps_what_copies_would_not_hide(planned, monkeypatch: pytest.MonkeyPatch):
    # Else all would be back before backward uses it.
    monkeypatch.setattr(tensor_swap, "PREFETCH_BYTES", 2**14)
    job = ("offload=tensor_swap",)
    everything, slow = planned(*job), planned(*job, "offload.budget=auto", "hardware.bus_gb_s=0.001")
    assert everything.step_bytes["activations out"] > 0.9 * everything.host_bytes["activations"] > 0
    assert slow.step_bytes["activations out"] < 0.1 * everything.step_bytes["activations out"]
    assert slow.device_bytes["activations"] > everything.device_bytes["activations"]
    assert "hidden behind compute" in slow.notes[0]


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.slow
def test_the_picture_of_a_plan_shows_the_whole_step_or_says_which_part(
    planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    drawn = []
    monkeypatch.setattr("training.planning.plan.draw_chart", lambda *arguments: drawn.append(arguments))
    plan = planned("offload=layer_stream", f"microbatches={count}")
    draw_timeline(plan, count, tmp_path / "plan.png", "planned: layer_stream")
    ((timeline, _, title),) = drawn
    assert timeline.busy_ms()["host update"] == pytest.approx(plan.forecast.alone_ms["host optimizer"])
    assert timeline.busy_ms()["device update"] > 0
    if count == 1:
        assert title == "planned: layer_stream; step"
        assert timeline.end_us / 1e3 == pytest.approx(plan.forecast.step_ms)
    else:
        step_ms = f"{plan.forecast.step_ms:,.1f} ms"
        assert title == f"planned: layer_stream; step of {step_ms}, the first 2 of 6 microbatches"


def test_a_model_without_a_dry_run_is_planned_by_bounds(planned, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Llama, "forward", lambda self, ids, labels: ids.sum().item())
    plan = planned("offload=layer_stream")
    assert "activations are not in the plan" in plan.notes[0]
    assert plan.device_bytes["activations"] == 0
    assert min(plan.step_bytes["out"], plan.forecast.step_ms) > 0


def test_a_dry_run_that_ends_early_gives_neither_a_timeline_nor_a_time(planned, monkeypatch: pytest.MonkeyPatch):
    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, ids, labels: forward(self, ids, labels).item())
    plan = planned("offload=layer_stream")
    assert plan.timeline == ()
    assert plan.forecast.step_ms >= sum(plan.forecast.phases_ms)


@pytest.mark.parametrize("mode", ["none", "layer_stream", "shard_offload"])
@pytest.mark.slow
def test_a_frozen_base_has_neither_gradients_nor_states(planned, mode: str):
    small = ("adapter=lora", "adapter.rank=2", "adapter.targets=[q_proj]", f"offload={mode}", "precision=bf16")
    plan = planned(*small)
    # Four layers of two matrices, [2, 128] and [128, 2].
    trained = 4 * 2 * 2 * 128
    assert plan.trained_parameters == trained < plan.parameters / 100
    # At the peak of activations not all of them are there.
    assert plan.device_bytes["gradients"] <= 2 * trained
    # Two moments, what the weight lacks of its master, and the steps.
    assert plan.device_bytes["optimizer"] == 10 * trained + 4 * 8
    assert (plan.host_bytes["gradients"], plan.host_bytes["optimizer"]) == (0, 0)
    assert plan.step_bytes["out"] == plan.step_bytes["activations out"]
    assert plan.rows()["parameters that train"].startswith(f"{trained:,} of {plan.parameters:,}, ")
    whole = planned(f"offload={mode}", "precision=bf16")
    assert 0.6 * whole.model_flops < plan.model_flops < 0.75 * whole.model_flops
    assert plan.summary()["model/trained_parameters"] == trained
    assert "parameters that train" not in whole.rows()


def test_a_plan_of_chats_tells_what_is_in_the_files(tmp_path: Path):
    answers = ["4", "four", "a long answer " * 20]
    rows = [{"prompt": "2 + 2?", "completion": answer} for answer in answers]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = ("dataset=chat", f"dataset.files={tmp_path}/chats.jsonl", "seq_len=64")

    printed = run(tmp_path / "plan", "plan=true", *keys)

    facts = read(tmp_path / "plan", "plan.json")["data"]
    assert facts["chats to train on"] == "2; 0 to evaluate on"
    assert facts["left out"] == "1 are longer than seq_len + 1 = 65 tokens"
    assert "data: chats to train on" in printed
    refused = run(tmp_path / "refused", "plan=true", *keys, "model.vocab_size=64", status=1)
    assert "has 257 ids, and the model 64: take model.vocab_size=257" in refused


MODEL = ("model.num_hidden_layers=6", "model.hidden_size=256", "model.intermediate_size=1024", "seq_len=64")
# Copies bound the step, so that staying on the device pays.
SLOW_BUS = ("hardware=h200", "hardware.bus_gb_s=1", "precision=bf16")


def filled(*overrides: str, has_gpu: bool = True):
    components = components_of(*MODEL, *SLOW_BUS, *overrides)
    components, plan = plan_filled(components, machine_of(components), has_gpu)
    return components.config.offload, plan


@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream"])
@pytest.mark.slow
def test_a_larger_budget_keeps_more_on_the_device_and_is_never_exceeded(mode: str):
    seen = [filled(f"offload={mode}", f"vram_budget={mib}MiB") for mib in (40, 70, 400)]
    amounts = [offload.resident for offload, _ in seen]
    assert 0 == amounts[0] < amounts[1] < amounts[2]
    assert seen[-1][1].host_bytes["weights"] == 0
    assert all(plan.fits["vram_budget"] for _, plan in seen[1:])
    times = [plan.forecast.step_ms for _, plan in seen]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.1 * times[1]


@pytest.mark.slow
def test_the_weights_of_another_mode_fill_the_budget_too():
    offload, _ = filled("offload=layer_stream_swap", "vram_budget=400MiB")
    assert offload.weights.resident == 6


def test_an_amount_that_was_given_stays():
    components = components_of("offload=layer_stream", "offload.resident=25%", "vram_budget=1GiB")
    assert resident_key(components.config) is None
    components, _ = plan_filled(components, machine_of(components), has_gpu=True)
    assert components.config.offload.resident == "25%"


@pytest.mark.slow
def test_the_chosen_mode_is_the_one_that_the_configuration_names():
    components = components_of(*MODEL, *SLOW_BUS, "offload=layer_stream", "vram_budget=100MiB")
    written = components.config
    components, plan = plan_filled(components, machine_of(components), has_gpu=True)
    assert components.config is written
    assert components.mode.resident == written.offload.resident > 0
    again = components_of(
        *MODEL, *SLOW_BUS, "vram_budget=100MiB", "offload=layer_stream", f"offload.resident={written.offload.resident}"
    )
    assert plan_run(again, machine_of(again), True).device_bytes == plan.device_bytes
    assert OmegaConf.select(again.config, "offload.resident") == components.mode.resident


JOB = ("offload=layer_stream", "clip_norm=null", "microbatches=1", "hardware=h200", "seq_len=32", "precision=bf16")


def plan_of(components: Components):
    return plan_filled(components, machine_of(components), has_gpu=True)


@pytest.fixture(autouse=True)
def no_least_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else small models have room for all gradients in the ring."""
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)
    monkeypatch.setattr(offloader, "RING_UNITS", 1)


def in_pieces(components: Components) -> Components:
    """Reentrant checkpoints around a block that is used twice."""
    block = components.model.model.layers[1]
    forward = block.forward

    def twice(hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = checkpoint(partial(forward), hidden, *rest, use_reentrant=True)
        return hidden

    block.forward = twice
    return components


def needs_values(components: Components) -> Components:
    components.model.register_forward_pre_hook(lambda *_: nn.Parameter(torch.empty(1, device="meta")).item())
    return components


def test_a_plan_counts_the_ring_and_names_the_choice():
    """With so many tokens the update is shorter than backward."""
    components, plan = plan_of(components_of(*JOB, "batch_size=1024"))
    assert components.gradients.released
    assert plan.chosen["optimizer.gradients"].startswith("release: ")
    assert plan.host_bytes["gradients"] == components.footprint.host_gradient_bytes
    _, kept = plan_of(components_of(*JOB, "clip_norm=1"))
    assert kept.chosen["optimizer.gradients"].startswith("keep: clip_norm=1 needs")


@pytest.mark.parametrize(
    ("change", "why"), [(in_pieces, "is needed after its gradient"), (needs_values, "needs values to run")]
)
def test_auto_keeps_gradients_that_a_dry_run_does_not_show_to_be_final(change, why: str):
    components, plan = plan_of(change(components_of(*JOB)))
    assert not components.gradients.released
    assert not components.options.release_gradients
    assert why in components.gradients.why
    assert plan.chosen["optimizer.gradients"].startswith("keep: ")
    assert plan.host_bytes["gradients"] == components.footprint.host_gradient_bytes


@pytest.mark.slow
def test_auto_keeps_gradients_where_that_fits_and_is_faster():
    """With so few tokens the update takes longer than backward."""
    job = (*JOB, "model.hidden_size=1024", "model.num_hidden_layers=16", "offload.resident=0")
    plans = {}
    for name, more in {
        "auto": (),
        "keep": ("optimizer.gradients=keep",),
        "release": ("optimizer.gradients=release",),
    }.items():
        components, plans[name] = plan_of(components_of(*job, *more))
        assert components.options.release_gradients == components.gradients.released == (name == "release")
        assert components.footprint.host_gradient_bytes == plans[name].host_bytes["gradients"]
    assert plans["release"].forecast.step_ms > 1.1 * plans["keep"].forecast.step_ms
    assert plans["auto"].forecast == plans["keep"].forecast
    assert plans["auto"].totals["vram_budget"] == plans["keep"].totals["vram_budget"]
    assert plans["auto"].chosen["optimizer.gradients"].startswith("keep: there is room, and the next forward hides")
    # Between the two totals.
    budget = sum(plans[name].totals["host_budget"] for name in ("keep", "release")) // 2
    components, tight = plan_of(components_of(*job, f"host_budget={budget}"))
    assert components.options.release_gradients
    assert components.gradients.released
    assert tight.fits["host_budget"]


def test_a_release_that_was_asked_for_is_refused():
    with pytest.raises(UserError, match=r"^optimizer\.gradients=release: \S+ is needed after its gradient: take"):
        plan_of(in_pieces(components_of(*JOB, "optimizer.gradients=release")))


def test_a_release_that_was_asked_for_without_a_dry_run_is_planned():
    components, plan = plan_of(needs_values(components_of(*JOB, "optimizer.gradients=release")))
    assert components.gradients.released
    assert plan.host_bytes["gradients"] == components.footprint.host_gradient_bytes

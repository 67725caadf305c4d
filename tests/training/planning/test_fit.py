"""A run that does not fit is refused before it writes or allocates; one that runs out of memory explains it."""

import errno
import json
import logging
from pathlib import Path

import pytest
import torch

from offload.knobs import GIB, format_bytes
from offload.modes import tensor_swap
from tests.training.helpers.in_process import SMALL_MODEL, TINY_RUN, command_here, components_of
from training.planning import fit, memory
from training.planning.fit import (
    MisfitError,
    OutOfMemoryError,
    exceeded,
    memory_explained,
    refuse_misfit,
)
from training.planning.machine import machine_of
from training.planning.plan import plan_filled, plan_run
from training.planning.report import RunPlan
from training.runs import starting
from training.runs.files import PLAN_FILE, SUMMARY_FILE
from training.settle.components import Components

MISTRAL = (
    "model=hf", "model.source=mistral", "model.overrides={hidden_size:32,intermediate_size:32,num_hidden_layers:1,"
    "num_attention_heads:2,num_key_value_heads:1,vocab_size:512,sliding_window:512}",
)  # fmt: skip
RUN = (*TINY_RUN, "dataset=synthetic", "steps=1", "warmup_steps=0")


def planned(*overrides: str, has_gpu: bool = False) -> tuple[Components, RunPlan]:
    components = components_of(*RUN, *overrides)
    return plan_filled(components, machine_of(components), has_gpu)


@pytest.fixture
def process_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests may have grown beyond the machines that they plan for."""
    monkeypatch.setattr(memory, "rss_gib", lambda: 0.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets the memory of the machine in bytes: the GPU's, and what is free of the host's."""

    def machine(gpu: int = GIB, host: int | None = GIB) -> None:
        monkeypatch.setattr(fit, "vram_bytes", lambda device: gpu)
        monkeypatch.setattr(fit, "free_host_bytes", lambda: host)
        monkeypatch.setattr(fit, "rss_gib", lambda: 0.0)

    return machine


@pytest.mark.slow
def test_a_run_that_exceeds_a_budget_is_refused_and_leaves_earlier_results(tmp_path: Path):
    command = (*RUN, "host_budget=1MiB", f"hydra.run.dir={tmp_path}")
    refused = command_here(*command)
    assert refused.returncode == 1
    assert "DOES NOT FIT" in refused.stdout
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: the run does not fit: host_budget: ")
    assert "1.00 MiB (host_budget) available: take " in line
    assert line.endswith("; force=true starts it anyway")
    summary = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert summary == {"status": "refused", "reason": line.removeprefix("error: ")}
    forced = command_here(*command, "force=true")
    assert forced.returncode == 0, forced.stderr
    (warning,) = (line for line in forced.stderr.splitlines() if "force=true" in line)
    assert warning.startswith("force=true starts a run that does not fit: host_budget: ")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert tmp_path / PLAN_FILE in before
    assert command_here(*command, "resume=auto").returncode == 1
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("process_without_memory")
def test_a_run_is_held_to_its_own_machine_and_not_to_the_one_it_is_planned_for(machine):
    components, plan = planned("offload=layer_stream", "hardware.vram_gib=1e-6", "hardware.host_gib=1e-6", has_gpu=True)
    assert set(plan.limits()) == {"vram_budget", "host_budget"}
    machine(gpu=GIB, host=GIB)
    assert exceeded(components, plan) == {}
    machine(gpu=2**10, host=2**10)
    assert set(exceeded(components, plan)) == {"vram_budget", "host_budget"}
    machine(gpu=GIB, host=None)
    assert exceeded(components, plan) == {}


@pytest.mark.usefixtures("process_without_memory")
@pytest.mark.parametrize("key", ["vram_budget", "host_budget"])
@pytest.mark.slow
def test_the_machines_memory_is_not_held_to_the_error_of_the_plan_and_a_budget_is(machine, key: str):
    # The logs of speculative updates take only what the host has left.
    components, plan = planned("offload=layer_stream", "optimizer.speculate=off", has_gpu=True)
    total, tolerance = plan.totals[key], fit.TOLERANCE[key]
    memory = {"vram_budget": "gpu", "host_budget": "host"}[key]
    machine(**{memory: int(total / (1 + tolerance)) + 2})
    refuse_misfit(components, plan)
    components.config[key] = total - 1
    with pytest.raises(MisfitError, match=f"{key}: "):
        refuse_misfit(components, plan)
    components.config[key] = None
    machine(**{memory: int(total / (1 + tolerance)) - 2})
    with pytest.raises(MisfitError, match=r"needed, .* available: take "):
        refuse_misfit(components, plan)


@pytest.mark.usefixtures("process_without_memory", "small_activations")
def test_what_an_automatic_budget_would_keep_counts_against_a_budget_alone(machine, monkeypatch: pytest.MonkeyPatch):
    # Else all would be back before backward uses it.
    monkeypatch.setattr(tensor_swap, "PREFETCH_BYTES", 2**14)
    job = ("offload=tensor_swap", "offload.budget=auto", "hardware.bus_gb_s=0.001")
    components, plan = planned(*job, has_gpu=True)
    total = plan.totals["vram_budget"]
    assert 0 < plan.kept_bytes < total
    machine(gpu=total - plan.kept_bytes)
    assert exceeded(components, plan) == {}
    components.config.vram_budget = total - plan.kept_bytes
    assert set(exceeded(components, plan)) == {"vram_budget"}


def test_a_forced_run_is_warned_once(machine, caplog: pytest.LogCaptureFixture):
    components, plan = planned("force=true")
    machine(host=2**20)
    with caplog.at_level(logging.WARNING):
        refuse_misfit(components, plan)
    assert "free now" in caplog.text
    assert "vram_budget" not in caplog.text
    assert len(caplog.records) == 1


SMALL = (*SMALL_MODEL, "seq_len=32", "dataset=synthetic")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of"


def explained(*overrides: str, error: BaseException | None = None, has_gpu: bool = False) -> tuple[str, RunPlan]:
    """The message of an error that a run with `overrides` meets, and its plan."""
    components = components_of(*SMALL, *overrides)
    plan = plan_run(components, machine_of(components), has_gpu)
    with pytest.raises(OutOfMemoryError) as caught, memory_explained(components, plan):
        raise error or torch.OutOfMemoryError(OUT_OF_MEMORY)
    assert caught.value.status == "out_of_memory"
    return str(caught.value), plan


@pytest.mark.parametrize("expand", [False, True])
def test_the_message_names_the_allocators_setting_where_it_is_not_made(monkeypatch: pytest.MonkeyPatch, expand: bool):
    monkeypatch.setattr(starting, "segments_expand", lambda: expand)
    message, _ = explained()
    assert message.endswith(f"; {starting.ALLOCATOR_ADVICE}") is not expand
    assert ("expandable_segments" in message) is not expand


def test_the_message_has_the_numbers_of_the_plan():
    message, plan = explained("offload=layer_stream", "vram_budget=2GiB", has_gpu=True)
    planned = f"planned were {format_bytes(plan.totals['vram_budget'])} of {format_bytes(2**31)} ("
    assert message.startswith(f"the GPU is out of memory (2.50 GiB more needed): {planned}")
    assert ": take " in message
    for part in ("slots", "activations"):
        assert f"{part} {format_bytes(plan.device_bytes[part])}" in message


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (MemoryError("9 GiB are needed, 8 GiB are free"), "the host is out of memory (9 GiB are needed, 8 GiB are"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the host is out of memory: planned were "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "the host is out of memory: planned were "),
    ],
)
@pytest.mark.slow
def test_the_host_has_its_own_numbers(error: Exception, start: str):
    message, plan = explained(error=error)
    assert message.startswith(start)
    assert f"device {format_bytes(plan.host_bytes['device'])}" in message


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: misaligned address"), ValueError("out of memory")])
def test_other_errors_pass(error: Exception):
    components = components_of(*SMALL)
    plan = plan_run(components, machine_of(components), has_gpu=False)
    with pytest.raises(type(error)) as caught, memory_explained(components, plan):
        raise error
    assert caught.value is error


@pytest.mark.usefixtures("process_without_memory")
def test_masks_that_do_not_fit_are_named():
    others = (key for key in RUN if not key.startswith("model."))
    components = components_of(*others, *MISTRAL, "seq_len=8192", "batch_size=1", "host_budget=256MiB")
    plan = plan_run(components, machine_of(components), has_gpu=False)
    named = "0.25 GiB (host_budget) available (masks and scores of all pairs of tokens take 0.31 GiB of the activations"
    with pytest.raises(MisfitError, match="masks of sliding_window=512 of mistral; precision=bf16 on a GPU") as error:
        refuse_misfit(components, plan)
    assert named in str(error.value)
    with pytest.raises(OutOfMemoryError, match="masks of sliding_window=512"), memory_explained(components, plan):
        raise MemoryError

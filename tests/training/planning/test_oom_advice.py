"""Memory that runs out in a run: the error has the plan's numbers and what to change."""

from __future__ import annotations

import errno

import pytest
import torch

from offload.byte_sizes import format_bytes
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.machine import machine_of
from training.planning.oom_advice import OutOfMemoryError, memory_explained
from training.planning.plan import plan_run
from training.planning.report import RunPlan
from training.runs import allocator

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
    monkeypatch.setattr(allocator, "segments_expand", lambda: expand)
    message, _ = explained()
    assert message.endswith(f"; {allocator.ADVICE}") is not expand
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

"""A GPU that is out of memory: the error has the plan's numbers and keys to change."""

from __future__ import annotations

import pytest
import torch

from offload.runtime.byte_sizes import format_bytes
from tests.training.helpers.in_process import SMALL_MODEL, components_of
from training.planning.machine import machine_of
from training.planning.oom_advice import DeviceMemoryError, device_memory_explained
from training.planning.plan import plan_run
from training.planning.report import RunPlan

SMALL = (*SMALL_MODEL, "seq_len=32", "dataset=synthetic")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of"


def explained(*overrides: str, error: BaseException | None = None, has_gpu: bool = False) -> tuple[str, RunPlan]:
    """The message of an error that a run with `overrides` meets, and its plan."""
    components = components_of(*SMALL, *overrides)
    plan = plan_run(components, machine_of(components), has_gpu)
    with pytest.raises(DeviceMemoryError) as caught, device_memory_explained(components, plan):
        raise error or torch.OutOfMemoryError(OUT_OF_MEMORY)
    assert caught.value.status == "out_of_memory"
    return str(caught.value), plan


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (("seq_len=256", "microbatches=3"), "microbatches=4, recompute=block or batch_size=2"),
        (("seq_len=256", "batch_size=1"), "recompute=block, a seq_len below 256 or a smaller model"),
        (("model.intermediate_size=2048", "batch_size=1"), "offload=layer_stream, precision=bf16 or recompute=block"),
        (
            (
                "model.intermediate_size=2048",
                "batch_size=1",
                "seq_len=16",
                "offload=bounce_linear_swap",
                "offload.weights.resident=50%",
            ),
            "offload.weights.resident=0, offload.weights.slots=3 or recompute=block",
        ),
        (
            ("model.intermediate_size=2048", "batch_size=1", "offload=tensor_swap"),
            "offload=layer_stream_swap, precision=bf16 or recompute=block",
        ),
    ],
)
def test_what_to_change_depends_on_what_takes_the_memory(overrides: tuple[str, ...], advice: str):
    message, _ = explained(*overrides)
    assert message.endswith(f": take {advice}")


def test_the_message_has_the_numbers_of_the_plan():
    message, plan = explained("offload=layer_stream", "vram_budget=2GiB", has_gpu=True)
    planned = f"planned were {format_bytes(plan.totals['vram_budget'])} of {format_bytes(2**31)} ("
    assert message.startswith(f"the GPU is out of memory (2.50 GiB more needed): {planned}")
    for part in ("slots", "activations"):
        assert f"{part} {format_bytes(plan.device_bytes[part])}" in message


def test_states_on_the_device_are_named_where_weights_take_the_memory():
    large = ("model.intermediate_size=2048", "batch_size=1", "seq_len=16", "precision=bf16")
    host_adamw = ("offload=layer_stream", "offload.slots=1", "optimizer=host_adamw", "optimizer.device_share=1GiB")
    message, _ = explained(*large, *host_adamw)
    assert "optimizer.device_share=0" in message


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: misaligned address"), ValueError("out of memory")])
def test_other_errors_pass(error: Exception):
    components = components_of(*SMALL)
    plan = plan_run(components, machine_of(components), has_gpu=False)
    with pytest.raises(type(error)) as caught, device_memory_explained(components, plan):
        raise error
    assert caught.value is error

"""Whole runs on a GPU: the resident model's losses, resuming bit for bit, and too little memory."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from training.planning.fit import OutOfMemoryError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = {
    "none": (),
    "bounce_linear": ("offload.slots=3",),
    "layer_stream": (),
    "shard_offload": ("offload.shards=2",),
    "tensor_swap": (),
    "layer_stream_swap": (),
}
UPDATES = {
    "torch's": ("optimizer=adamw",),
    "early": ("optimizer=host_adamw", "precision=bf16", "clip_norm=null", "ema=0.9"),
    "clipped, some on the device": (
        "optimizer=host_adamw",
        "precision=bf16",
        "optimizer.device_share=16KiB",
        "ema=0.9",
    ),
}
RUN = ("device=cuda", "steps=4", "log_every=1", "checkpoint.every=1", "checkpoint.keep=4", "microbatches=2")


@pytest.fixture(autouse=True)
def repeatable(small_activations: None) -> Iterator[None]:
    """Makes kernels repeat bit for bit, and small activations leave the device."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def first_losses() -> dict[str, float]:
    """The first loss of a run for each kind of update, from the mode that ran first."""
    return {}


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("offload", MODES)
def test_a_run_resumes_bit_for_bit(
    tmp_path: Path, run_here, at, content, curve, first_losses: dict[str, float], offload: str, updates: str
):
    overrides = (*RUN, f"offload={offload}", *MODES[offload], *UPDATES[updates])
    run_here(tmp_path / "whole", *overrides)
    run_here(tmp_path / "rest", *overrides, f"resume={at(tmp_path / 'whole', 2)}")
    assert curve(tmp_path / "rest") == curve(tmp_path / "whole")[2:]
    for step in (3, 4):
        assert content(at(tmp_path / "rest", step)) == content(at(tmp_path / "whole", step))
    # Until the first update every mode runs the same kernels on the same weights.
    first = curve(tmp_path / "whole")[0]["train/loss"]
    assert first == first_losses.setdefault(updates, first)


def test_a_gpu_that_runs_out_of_memory_in_a_step(tmp_path: Path, run_here):
    large = ("device=cuda", "model.hidden_size=256", "model.intermediate_size=1024", "batch_size=64", "seq_len=1024")
    # Afterwards libraries have allocated what they keep for themselves.
    run_here(tmp_path / "before", "device=cuda", "steps=2")
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((before + 2**30) / total)
    try:
        with pytest.raises(
            OutOfMemoryError, match=r"the GPU is out of memory.*planned were .*: take .*microbatches=\d"
        ):
            run_here(tmp_path / "run", *large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert run_here(tmp_path / "next", "device=cuda", "steps=2")["status"] == "ok"

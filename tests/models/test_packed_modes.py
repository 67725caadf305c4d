"""Packed rows and the loss of each token under every mode: two steps are the bits of the resident model."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models import hf
from models.initialise import initialise
from models.llama import Llama
from offload import BounceLinear, LayerStream, Mode, Resident, ShardOffload, TensorSwap
from offload.planning import dry_run
from tests.models.helpers.hf_models import tiny
from tests.models.helpers.hugging_face import SIZES
from tests.models.helpers.packed import SEGMENTS, counted, far_from_uniform, packed_batch
from tests.offload.helpers.foreign import assert_alike, run_steps
from tests.offload.helpers.models import under

# Read when cuBLAS starts: without it its kernels do not repeat.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
MODES: dict[str, Callable[[], Mode]] = {
    "bounce_linear": lambda: BounceLinear(slots=8),
    "layer_stream": lambda: LayerStream(slots=2),
    "layer_stream_all": lambda: LayerStream(outside="stream", slots=4),
    "shard_offload": lambda: ShardOffload(shard_bytes="16KiB"),
    "layer_stream_swap": lambda: TensorSwap(LayerStream(slots=2)),
}
SLOW = pytest.mark.slow


def made(name: str) -> nn.Module:
    if name != "llama":
        return far_from_uniform(tiny(name))
    model = Llama(**SIZES)
    initialise(model, seed=0)
    return far_from_uniform(model)


def calls() -> list[tuple[tuple, dict]]:
    """Four microbatches: both rows, one after another, each with each token's loss."""
    ids, labels = packed_batch()
    parts = [(row, row + 1) for row in (0, 1)] * 2
    return [((ids[a:b], labels[a:b]), {"segments": SEGMENTS[a:b].clone(), "reduction": "none"}) for a, b in parts]


def steps(name: str, mode: Mode) -> list[dict[str, object]]:
    model = made(name)
    with under(mode, model) as attached:
        return run_steps(model, calls(), attached, microbatches=2)


@pytest.mark.parametrize("mode", [mode if mode == "layer_stream" else pytest.param(mode, marks=SLOW) for mode in MODES])
@pytest.mark.parametrize(
    ("name", "by_starts"),
    [("llama", False), pytest.param("qwen3_tied", False, marks=SLOW), pytest.param("gemma3_text", True, marks=SLOW)],
)
@pytest.mark.usefixtures("small_activations")
def test_two_steps_are_those_of_the_resident_model(name: str, by_starts: bool, mode: str, monkeypatch):
    if by_starts:
        monkeypatch.setattr(hf, "starts_for", lambda segments, dtype: counted(segments).starts)
    found = steps(name, MODES[mode]())
    assert_alike(found, steps(name, Resident()))
    losses: list[Tensor] = found[1]["outputs"][0]
    assert losses[0].shape == (1, 12)
    assert all(gradient.any() for gradient in found[1]["gradients"].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_a_plan_needs_no_values(name: str, dtype: torch.dtype):
    with torch.device("meta"):
        # The kernel has heads of a multiple of 8.
        model = (Llama(**SIZES) if name == "llama" else tiny(name, "meta", head_dim=8)).to(dtype)
    ids, labels, segments = (tensor.to("meta") for tensor in (*packed_batch(), SEGMENTS))
    planned = dry_run(
        LayerStream(slots=2), model, [lambda: model(ids, labels, segments=segments, reduction="none").sum()]
    )
    plain = dry_run(LayerStream(slots=2), model, [lambda: model(ids, labels, reduction="none").sum()])
    assert planned.total("h2d_bytes") == plain.total("h2d_bytes") > 0
    if dtype == torch.bfloat16:
        # Tables of rotations are one for each row.
        assert planned.total("flops") == pytest.approx(plain.total("flops"), rel=1e-3)


class Counted(nn.Module):
    """A model that is given its rows as a run gives them: with where their samples begin."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(ids, labels, segments=counted(SEGMENTS, ids.device), reduction="none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_the_kernel_of_gpus_has_the_bits_of_the_resident_model(name: str, mode: str):
    def trained(mode: Mode) -> list[dict[str, object]]:
        model = Counted(made(name).to("cuda", torch.bfloat16).train())
        with under(mode, model, "cuda") as attached:
            return run_steps(model, [(packed_batch(), {})] * 4, attached, microbatches=2, device="cuda")

    torch.use_deterministic_algorithms(True)
    try:
        assert_alike(trained(MODES[mode]()), trained(Resident()))
    finally:
        torch.use_deterministic_algorithms(False)

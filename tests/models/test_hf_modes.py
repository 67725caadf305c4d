"""Models of transformers under every mode, from the meta device on: two steps are the bits of the resident model."""

import functools
from collections.abc import Callable

import pytest

from models.hf_initialise import initialise_hf
from offload import BounceLinear, Counters, LayerStream, Mode, Resident, ShardOffload, TensorSwap, find_blocks
from offload.planning import dry_run
from tests.models.helpers.hf_models import batch, tiny
from tests.offload.helpers.foreign import assert_alike, run_steps
from tests.offload.helpers.models import under

pytestmark = pytest.mark.slow

MODES: dict[str, tuple[Callable[[], Mode], int | None]] = {
    "bounce_linear": (lambda: BounceLinear(slots=8), None),
    "layer_stream": (lambda: LayerStream(slots=2), None),
    "layer_stream_all": (lambda: LayerStream(outside="stream", slots=4), None),
    "shard_offload": (lambda: ShardOffload(shard_bytes="16KiB"), 1),
    "tensor_swap": (lambda: TensorSwap(Resident()), None),
    "layer_stream_swap": (lambda: TensorSwap(LayerStream(slots=2)), None),
}
# A tied head; experts with their auxiliary loss, and logits that are stored; weights that other modules read; images;
# buffers that change.
NAMES = ["qwen3_tied", "mixtral_balanced", "mamba", "vit", "resnet"]
# Also a softmax that is capped, a convolution of states, several kinds of positions and experts, a mask of ones, and
# parameters that torch makes on the CPU.
PLANNED = [*NAMES, "bart", "diffllama", "gpt2", "gemma2", "qwen3_next", "deepseek_v3", "convnext"]


def trained(name: str, mode: Mode, microbatches: int | None) -> tuple[list[dict[str, object]], Counters]:
    """Returns what two steps left, and what the second copied."""
    model = tiny(name, "meta").train()
    with under(mode, model) as attached:
        initialise_hf(model, seed=1)
        model.fill_buffers()
        records = run_steps(model, [(batch(name, 0), {})], attached, microbatches)
        before = attached.counters()
        records += run_steps(model, [(batch(name, 1), {})], attached, microbatches)
        return records, attached.counters() - before


@functools.cache
def of_the_resident_model(name: str, microbatches: int | None) -> list[dict[str, object]]:
    return trained(name, Resident(), microbatches)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("small_activations")
def test_two_steps_are_those_of_the_resident_model(name: str, mode: str):
    make, microbatches = MODES[mode]
    found, counters = trained(name, make(), microbatches)
    assert_alike(found, of_the_resident_model(name, microbatches))
    assert counters.h2d_bytes
    assert counters.d2h_bytes
    assert any(gradient is not None and gradient.any() for gradient in found[1]["gradients"].values())


@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream", "shard_offload"])
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_counts_the_bytes_of_a_step(name: str, mode: str):
    """Without values: a forward that reads some, or that needs its batch on the host, could not be planned."""
    make, _ = MODES[mode]
    model = tiny(name, "meta").train()
    arguments = [argument.to("meta") for argument in batch(name)]
    planned = dry_run(make(), model, [lambda: model(*arguments).float().sum()], on_gpu=False)
    counters = trained(name, make(), 1)[1]
    assert planned.total("flops") > 0
    assert planned.total("h2d_bytes") == counters.h2d_bytes
    assert planned.total("d2h_bytes") == counters.d2h_bytes
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_found(name: str):
    assert len(find_blocks(tiny(name, "meta"))) >= 2

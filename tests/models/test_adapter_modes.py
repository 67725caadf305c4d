"""Adapters under every mode, from the meta device on: three steps are the bits of the resident model."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models.adapters import Dora, Lora, RsLora, initialise_adapters, inject
from models.diffusion import build_diffusion
from models.llama import Llama
from offload import BounceLinear, LayerStream, Mode, Resident, ShardOffload, TensorSwap, find_blocks, recompute
from tests.models.helpers.adapted import fill_base
from tests.models.helpers.hf_models import tiny
from tests.models.test_adapters import UNET
from tests.offload.helpers.models import under

KINDS = {"lora": Lora, "dora": Dora, "rslora": RsLora}
DEVICE = {"trained": "device"}
MODES: dict[str, Callable[[], Mode]] = {
    "bounce_linear": lambda: BounceLinear(**DEVICE),
    "bounce_linear_all": lambda: BounceLinear(outside="stream", **DEVICE),
    "layer_stream": lambda: LayerStream(slots=2, **DEVICE),
    "layer_stream_trained_too": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=2, **DEVICE),
    "tensor_swap": lambda: TensorSwap(Resident()),
    "layer_stream_swap": lambda: TensorSwap(LayerStream(slots=2, **DEVICE)),
}
STEPS, MICROBATCHES = 3, 2
# DoRA computes what LoRA does, and reads the base's weights besides.
pytestmark = pytest.mark.usefixtures("small_activations")
OTHERS = ("bounce_linear", "layer_stream", "shard_offload", "tensor_swap")
CASES = [("llama", kind, mode) for kind in KINDS for mode in MODES]
CASES += [(name, "dora", mode) for name in ("hf", "unet") for mode in OTHERS]


def llama() -> nn.Module:
    with torch.device("meta"):
        return Llama(40, 16, 32, 2, 2, 2)


def unet() -> nn.Module:
    with torch.device("meta"):
        return build_diffusion("UNet2DModel", UNET)


def text(seed: int) -> tuple[Tensor, ...]:
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def images(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, 8, 8, generator=generator), torch.rand(2, generator=generator)


MODELS = {"llama": (llama, text), "hf": (lambda: tiny("gpt2", "meta"), text), "unet": (unet, images)}


def trained(name: str, kind: str, mode: Mode, again: bool = False) -> list[Tensor]:
    """The losses of each step, with dropout in the adapters, and what trains in the end; `again`: blocks recompute."""
    build, batch = MODELS[name]
    model = build().train()
    inject(model, KINDS[kind](4, 8, dropout=0.2), torch.float32)

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(*batch(seed)).float().square().mean()

    seen = []
    with under(mode, model) as attached:
        fill_base(model)
        initialise_adapters(model, 0)
        undo = recompute([block for _, block in find_blocks(model)] if again else [])
        found = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(found, lr=0.01, foreach=False)
        for step in range(STEPS):
            with attached.step():
                numbers = [MICROBATCHES * step + index for index in range(MICROBATCHES)]
                seen += [one.clone() for one in attached.accumulate([functools.partial(loss, n) for n in numbers])]
            optimizer.step()
            optimizer.zero_grad()
        undo()
        return seen + [parameter.detach().clone() for parameter in found]


@functools.cache
def of_the_resident_model(name: str, kind: str) -> list[Tensor]:
    return trained(name, kind, Resident())


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [pytest.param(*case, marks=[] if case[0] == "llama" else [pytest.mark.slow]) for case in CASES],
)
@pytest.mark.sampled
def test_three_steps_are_those_of_the_resident_model(name: str, kind: str, mode: str):
    expected = of_the_resident_model(name, kind)
    found = trained(name, kind, MODES[mode]())
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mode", ["none", "layer_stream"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_recompute_drops_what_forward_dropped(kind: str, mode: str):
    made = Resident() if mode == "none" else MODES[mode]()
    assert all(map(torch.equal, trained("llama", kind, made, again=True), of_the_resident_model("llama", kind)))


def test_the_adapter_stays_on_the_device_and_nothing_goes_home():
    model = llama()
    inject(model, Lora(4, 8), torch.float32)
    small = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    for mode in (LayerStream, BounceLinear, ShardOffload):
        stays, streams = mode(**DEVICE).footprint(model), mode().footprint(model)
        assert (stays.d2h_bytes, stays.host_gradient_bytes, stays.resident_gradient_bytes) == (0, 0, small)
        assert stays.resident_bytes == streams.resident_bytes + small
        assert streams.d2h_bytes >= small

"""Quantisation-aware training of torch.ao: observers whose buffers a kernel writes, also in eval(), and resizes."""

import functools

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

from offload.modes import shard_offload
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.models import under

WIDTH = 16
MODES = {
    "bounce_linear": BounceLinear,
    "layer_stream": functools.partial(LayerStream, slots=2),
    "shard_offload": functools.partial(ShardOffload, shards=2),
    "outside": functools.partial(ShardOffload, shards=2, outside="stream"),
}


class Residual(nn.Module):
    """Blocks behind a layer that is in none of them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.stem(rows)
        for block in self.blocks:
            rows = rows + block(rows)
        return rows


def trained(mode, microbatches: int) -> dict[str, torch.Tensor]:
    """Two steps of training, and a forward in eval() that calibrates; returns losses, gradients and all buffers."""
    torch.manual_seed(0)
    model = Residual().train()
    # Its scales have one element for each channel after the first forward, and one before.
    model.qconfig = get_default_qat_qconfig("fbgemm")
    prepare_qat(model, inplace=True)

    def loss_of(seed: int) -> torch.Tensor:
        rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        return model(rows).square().mean() / microbatches

    found = {}
    with under(mode, model) as attached:
        for step in range(2):
            with attached.step():
                losses = attached.accumulate([functools.partial(loss_of, 10 * step + k) for k in range(microbatches)])
            found |= {f"loss {step} {k}": loss.detach().clone() for k, loss in enumerate(losses)}
        model.eval()
        with torch.no_grad():
            found["eval"] = loss_of(100)
        model.train()
        with attached.inference():
            found["inference"] = loss_of(101).clone()
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found | {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_observers_see_what_they_see_in_the_resident_model(
    mode: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_offload, "MIN_BOUNDARY_BYTES", 1 << 20)
    expected, found = trained(Resident(), microbatches), trained(MODES[mode](), microbatches)
    assert {name for name in expected if not torch.equal(expected[name], found[name])} == set()
    assert expected["stem.weight_fake_quant.scale"].shape == (WIDTH,)

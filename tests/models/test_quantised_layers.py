"""Quantised weights of layers that are no nn.Linear: transformers' Conv1D, and experts that are one tensor."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from models.hf_initialise import initialise_hf
from models.quantise import QuantisedWeight, quantisable, quantise
from models.quantise_formats import Float8, Format, Int4, Int8, Nf4
from offload import BounceLinear, LayerStream, Mode, Resident, ShardOffload, find_blocks
from offload.planning import DryRun, dry_run
from tests.models.helpers.hf_models import batch, tiny
from tests.offload.helpers.foreign import assert_alike, loss_of, run_steps
from tests.offload.helpers.models import under

EACH = pytest.mark.parametrize("format", [Int8(), Float8(), Int4(group=16), Nf4()], ids=lambda format: format.name)
# The layers of a block, and those that are no nn.Linear.
LAYERS = {
    "gpt2": (4, {"c_attn", "c_proj", "c_fc"}),
    "mixtral": (6, {"gate_up_proj", "down_proj"}),
    "deepseek_v3": (None, {"gate_up_proj", "down_proj"}),
    # Its experts are [in, out], with biases.
    "gpt_oss": (6, {"gate_up_proj", "down_proj"}),
}


def quantised(name: str, format: Format) -> nn.Module:
    model = tiny(name, "meta").train()
    blocks = [path for path, _ in find_blocks(model, None)]
    quantise(model, quantisable(model, blocks, (), ()), format)
    return model


def fill(model: nn.Module) -> None:
    initialise_hf(model, seed=1)
    model.fill_buffers()


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    loss_of(model(*inputs)).backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def with_plain_weights(model: nn.Module) -> nn.Module:
    """Puts the matrices that the quantised weights stand for in their places, frozen."""
    for module in model.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, QuantisedWeight):
                setattr(module, own, nn.Parameter(parameter.dequantised(), requires_grad=False))
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_they_are_chosen(name: str):
    model = tiny(name, "meta")
    names = quantisable(model, [path for path, _ in find_blocks(model, None)], (), ())
    count, others = LAYERS[name]
    last = [each for each in names if ".1." in each]
    assert count is None or len(last) == count
    assert others <= {part for each in last for part in each.split(".")}
    narrower = quantisable(model, [path for path, _ in find_blocks(model, None)], ["*.down_proj", "*.c_fc"], ())
    assert narrower
    assert all(each.removesuffix(".weight").endswith(("down_proj", "c_fc")) for each in narrower)


@pytest.mark.parametrize(
    ("name", "format"),
    [("gpt2", Int8()), ("mixtral", Float8()), ("mixtral", Nf4()), ("deepseek_v3", Nf4()), ("gpt_oss", Int4(group=16))],
)
def test_gradients_are_those_of_the_matrices_that_they_stand_for(name: str, format: Format):
    model = quantised(name, format)
    with under(Resident(), model):
        fill(model)
        found = gradients(model, batch(name))
        expected = gradients(with_plain_weights(model), batch(name))
    assert found.keys() == expected.keys()
    assert len(found) > 5
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@EACH
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_of_experts_saves_the_quantised_tensors(format: Format, turned: bool):
    weight = QuantisedWeight.empty(format, torch.empty(4, 64, 32))
    with torch.no_grad():
        weight.copy_(torch.randn(4, 64, 32))
    inputs = torch.randn(6, 64 if turned else 32, requires_grad=True)
    ends = torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    saved: list[Tensor] = []

    def product(matrices: Tensor) -> Tensor:
        return F.grouped_mm(inputs, matrices if turned else matrices.transpose(-2, -1), offs=ends)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = product(weight)
    assert sum(each.nbytes for each in saved if each.shape != inputs.shape) <= weight.nbytes + ends.nbytes
    (found,) = torch.autograd.grad(result.square().sum(), inputs)
    plain = product(weight.dequantised())
    assert torch.equal(result, plain)
    assert torch.equal(found, torch.autograd.grad(plain.square().sum(), inputs)[0])


@EACH
def test_a_turned_weight_and_one_of_several_are_quantised_weights(format: Format):
    weight = QuantisedWeight.empty(format, torch.empty(3, 128, 128))
    with torch.no_grad():
        weight.copy_(torch.randn(3, 128, 128))
    matrices = weight.dequantised()
    for view, plain in (
        (weight.transpose(1, 2), matrices.transpose(1, 2)),
        (weight.transpose(-1, -2).transpose(1, 2), matrices),
        (weight[1], matrices[1]),
        (weight[-1].t(), matrices[-1].t()),
        (weight.transpose(1, 2)[torch.tensor(2)], matrices[2].t()),
    ):
        assert isinstance(view, QuantisedWeight)
        assert view.shape == plain.shape
        assert torch.equal(view.dequantised(), plain)
    inputs = torch.randn(2, 128)
    for index in (0, 2):
        assert torch.equal(F.linear(inputs, weight[index]), F.linear(inputs, matrices[index]))
        assert torch.equal(inputs @ weight[index], inputs @ matrices[index])
        assert torch.equal(F.linear(inputs, weight[index].t()), F.linear(inputs, matrices[index].t()))
    assert torch.equal(weight.transpose(0, 1), matrices.transpose(0, 1))
    assert torch.equal(weight[:, 0], matrices[:, 0])
    with pytest.raises(IndexError):
        weight[3]
    with pytest.raises(RuntimeError, match="would write into a weight quantised"), torch.no_grad():
        weight.transpose(1, 2).copy_(matrices)


MODES = {
    "bounce_linear": lambda: BounceLinear(slots=1),
    "layer_stream": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shard_bytes="16KiB"),
}


def trained(name: str, format: Format, mode: Mode) -> list[dict[str, object]]:
    model = quantised(name, format)
    with under(mode, model) as attached:
        fill(model)
        records = run_steps(model, [(batch(name, 0), {})], attached, 1)
        return records + run_steps(model, [(batch(name, 1), {})], attached, 1)


@functools.cache
def of_the_resident_model(name: str, format: Format) -> list[dict[str, object]]:
    return trained(name, format, Resident())


@pytest.mark.parametrize(
    ("name", "format", "mode"),
    [
        ("gpt2", Int8(), "bounce_linear"),
        ("mixtral", Nf4(), "layer_stream"),
        ("mixtral", Nf4(), "bounce_linear"),
        ("gpt_oss", Int4(group=16), "shard_offload"),
    ],
)
def test_two_steps_are_those_of_the_resident_model(name: str, format: Format, mode: str):
    assert_alike(trained(name, format, MODES[mode]()), of_the_resident_model(name, format))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_dry_run_counts_their_products_and_bytes(name: str):
    inputs = [each.to("meta") for each in batch(name)]

    def run(model: nn.Module) -> DryRun:
        return dry_run(LayerStream(slots=2), model, [lambda: loss_of(model(*inputs))])

    plain = run(tiny(name, "meta").train())
    model = quantised(name, Int8())
    made = run(model)
    forward, plain_forward = made.phases[0], plain.phases[0]
    assert forward.flops == plain_forward.flops
    assert made.phases[1].flops < plain.phases[1].flops
    assert forward.h2d_bytes < 0.7 * plain_forward.h2d_bytes

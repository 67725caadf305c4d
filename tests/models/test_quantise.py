"""Quantised weights: products, gradients, what is saved for backward, and how values get in."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from models.hf import build_hf
from models.hf_source import CAUSAL_LM
from models.initialise import initialise
from models.quantise import (
    QuantisedWeight,
    _spare,
    is_quantised,
    kept_memory,
    quantisable,
    quantise,
    settled,
    stored_tensors,
    values_of,
)
from models.quantise_formats import Float8, Format, Int4, Int8, Nf4
from tests.models.helpers.hugging_face import SIZES
from tests.models.helpers.saving import save_hf
from tests.offload.helpers.models import Stack, assert_same

SHAPE = SIZES | {"head_dim": 8}
EACH = pytest.mark.parametrize("format", [Int8(), Float8(), Int4(group=16), Nf4()], ids=lambda format: format.name)


def quantised(format: Format, rows: int = 12, columns: int = 20) -> tuple[nn.Linear, torch.Tensor]:
    """Returns a layer, and the matrix that its weight was made from."""
    layer = nn.Linear(columns, rows)
    given = layer.weight.detach().clone()
    quantise(layer, ["weight"], format)
    with torch.no_grad():
        layer.weight.copy_(given)
    return layer, given


@EACH
def test_a_product_and_its_gradients_are_those_of_the_matrix_that_it_stands_for(format: Format):
    layer, given = quantised(format)
    matrix = layer.weight.dequantised()
    assert not torch.equal(matrix, given)
    results = []
    for weight in (layer.weight, matrix):
        rows = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
        bias = layer.bias.detach().clone().requires_grad_()
        F.linear(rows, weight, bias).square().sum().backward()
        results.append((rows.grad, bias.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1])
    assert not layer.weight.requires_grad


@EACH
def test_only_quantised_tensors_are_saved_for_backward(format: Format):
    layer, _ = quantised(format)
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(3, 20, requires_grad=True))
    assert sum(tensor.nbytes for tensor in saved) == layer.weight.nbytes
    assert layer.weight.nbytes == sum(tensor.nbytes for tensor in layer.weight.inner.values())


@EACH
def test_hooks_on_saved_tensors_may_give_back_the_matrix(format: Format):
    """torch's save_on_cpu does where it page-locks its copies."""
    layer, _ = quantised(format)
    gradients = []
    for changed in (lambda tensor: tensor, lambda tensor: torch.empty(tensor.shape).copy_(tensor)):
        rows = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with saved_tensors_hooks(changed, lambda tensor: tensor):
            layer(rows).sum().backward()
        gradients.append(rows.grad)
    assert torch.equal(*gradients)


@EACH
def test_it_is_a_parameter_of_the_shape_and_dtype_of_its_matrix(format: Format):
    layer, _ = quantised(format)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.numel()) == ((12, 20), torch.float32, 240)
    other = copy.deepcopy(layer)
    assert_same(list(other.weight.inner.values()), list(weight.inner.values()))
    assert other.weight.inner["qdata"].data_ptr() != weight.inner["qdata"].data_ptr()
    assert copy.deepcopy(layer).to("meta").weight.is_meta
    assert torch.equal(weight + 1, weight.dequantised() + 1)
    assert torch.linalg.norm(weight, dim=1).shape == (12,)
    assert torch.equal(torch.zeros(12, 20).copy_(weight.detach()), weight.dequantised())
    halved = copy.deepcopy(layer).to(torch.bfloat16)
    assert halved(torch.randn(3, 20, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=f"would write into a weight quantised as {format.name}"), torch.no_grad():
        weight.mul_(2)


@EACH
def test_values_get_in_one_weight_at_a_time(format: Format):
    layer, given = quantised(format)
    expected = layer.weight.dequantised()
    quantise(layer, ["weight"], format)
    with values_of(layer.weight) as values:
        values[:5].copy_(given[:5])
        values[5:].copy_(given[5:])
    assert torch.equal(layer.weight.dequantised(), expected)
    with settled([layer.weight]), values_of(layer.weight) as values:
        values.fill_(7)
    assert torch.equal(layer.weight.dequantised(), expected)
    with values_of(layer.bias) as values:
        values.fill_(7)
    assert layer.bias.tolist() == [7.0] * 12
    with torch.no_grad():
        layer.weight.fill_(0.5)
    assert torch.allclose(layer.weight.dequantised(), torch.full((12, 20), 0.5), rtol=0.01)


def test_a_gpu_without_room_for_the_largest_weight_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch):
    layer, _ = quantised(Int8())
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (2**30, 2**40))
    with kept_memory(layer, torch.device("cuda:1")), values_of(layer.weight) as values:
        assert (values.device.type, asked) == ("cpu", [torch.device("cuda:1")])
        values.fill_(1.0)


def test_values_of_one_weight_after_the_other_take_the_same_memory():
    """But for a larger one, and for two at once."""
    small, large = quantised(Int8())[0].weight, quantised(Int8(), rows=24)[0].weight

    def filled(weight: nn.Parameter, value: float) -> int:
        with values_of(weight) as values:
            values.fill_(value)
            return values.data_ptr()

    with kept_memory(nn.ModuleList(), torch.device("cpu")):
        first = filled(large, 1.0)
        with values_of(small) as values:
            assert values.data_ptr() == first
            assert filled(large, 3.0) != first
            values.fill_(2.0)
        assert filled(small, 4.0) == first
        assert torch.allclose(large.dequantised(), torch.full((24, 20), 3.0), rtol=0.01)
    assert torch.allclose(small.dequantised(), torch.full((12, 20), 4.0), rtol=0.01)
    assert not _spare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_initial_values_are_those_of_the_seed_quantised(dtype: torch.dtype):
    plain = Stack().to(dtype)
    initialise(plain, 1)
    for device in (None, "cpu"):
        model = Stack().to(dtype)
        quantise(model, quantisable(model, ["blocks.0", "blocks.1"], (), ()), Int8())
        initialise(model, 1, device)
        assert is_quantised(model)
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name)
            if isinstance(parameter, QuantisedWeight):
                made = Int8().quantise(expected.detach())
                assert_same(list(parameter.inner.values()), list(made.values()))
            else:
                assert torch.equal(parameter, expected)
    assert not is_quantised(plain)


def test_the_linear_layers_of_blocks_are_chosen_by_patterns():
    model = Stack(depth=2)
    blocks = ["blocks.0", "blocks.1"]
    assert quantisable(model, blocks, (), ()) == [
        f"blocks.{n}.{name}.weight" for n in (0, 1) for name in ("up", "down")
    ]
    assert quantisable(model, blocks, ["*.up"], ["blocks.1.*"]) == ["blocks.0.up.weight"]
    # One of a block that is used outside, and one of a name that only begins alike.
    model.head.weight = model.blocks[0].up.weight
    assert "blocks.0.up.weight" not in quantisable(model, blocks, (), ())
    assert quantisable(model, ["block"], (), ()) == []


def test_a_weight_that_two_layers_share_stays_shared():
    model = Stack(depth=2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    names = quantisable(model, ["blocks.0", "blocks.1"], (), ())
    quantise(model, names, Int8())
    assert model.blocks[1].up.weight is model.blocks[0].up.weight


def test_a_file_has_the_tensors_of_the_format():
    layer, _ = quantised(Int8())
    assert set(stored_tensors("a.weight", layer.weight)) == {"a.weight.qdata", "a.weight.scale"}
    assert set(stored_tensors("a.bias", layer.bias)) == {"a.bias"}


def test_models_of_transformers_are_filled_and_loaded_as_theirs_quantised(tmp_path: Path):
    build = functools.partial(build_hf, "qwen3", CAUSAL_LM, SHAPE)
    plain = build()
    plain.initialise(3)
    save_hf(plain, tmp_path)
    made, loaded, left = build(), build(), build()
    for model in (made, loaded, left):
        names = quantisable(model, [f"hf.model.layers.{n}" for n in range(2)], (), ())
        assert len(names) == 14
        quantise(model, names, Int8())
    made.initialise(3)
    loaded.load(tmp_path)
    with settled(each for each in left.parameters() if isinstance(each, QuantisedWeight)):
        left.load(tmp_path)
    for name, parameter in made.named_parameters():
        values, other = plain.get_parameter(name), loaded.get_parameter(name)
        if isinstance(parameter, QuantisedWeight):
            expected = list(Int8().quantise(values.detach()).values())
            assert_same(list(parameter.inner.values()), expected)
            assert_same(list(other.inner.values()), expected)
        else:
            assert torch.equal(parameter, values)
            assert torch.equal(other, values)
            assert torch.equal(left.get_parameter(name), values)

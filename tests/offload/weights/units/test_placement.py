"""Parameters and buffers that get other memory, and the device where they stay."""

import pytest
import torch
from torch import nn

from offload.memory.host_memory import ALIGNMENT_BYTES
from offload.torch_private.tensor_parts import parts
from offload.weights.units import placement
from offload.weights.units.placement import (
    DevicePlacement,
    Layout,
    ModuleAttribute,
    check_frozen,
    move_into,
    move_to,
    over,
)
from offload.weights.units.unfilled import unfilled
from tests.offload.helpers.quantised import Nested


def test_an_attribute_assigns_to_its_module_and_to_the_list_of_a_recurrent_layer():
    layer = nn.GRU(3, 4)
    attribute = ModuleAttribute(layer, "weight_hh_l0", False)
    replacement = nn.Parameter(torch.zeros_like(attribute.tensor))
    attribute.assign(replacement)
    assert layer.weight_hh_l0 is attribute.tensor is replacement
    assert any(weight is replacement for weight in layer._flat_weights)


def test_resident_tensors_are_memory_on_the_device_and_keep_what_was_written_there():
    real, meta = nn.BatchNorm1d(3), nn.BatchNorm1d(3, device="meta")
    weight = real.weight
    weight.grad = torch.ones(3)
    resident = [(module.weight, [ModuleAttribute(module, "weight", False)]) for module in (real, meta)]
    resident += [(module.running_mean, [ModuleAttribute(module, "running_mean", True)]) for module in (real, meta)]
    placed = DevicePlacement(resident, torch.device("cpu"))
    assert not meta.weight.is_meta
    assert unfilled(meta) == ["weight", "running_mean"]
    assert not unfilled(real)
    with torch.no_grad():
        meta.weight.fill_(2.0)
    # A module may replace its buffer.
    meta.running_mean = torch.full((3,), 5.0)
    placed.restore()
    assert real.weight is weight
    assert weight.grad.tolist() == [1.0] * 3
    assert isinstance(meta.weight, nn.Parameter)
    assert (meta.weight.tolist(), meta.running_mean.tolist()) == ([2.0] * 3, [5.0] * 3)


def test_a_gradient_moves_after_the_data(monkeypatch: pytest.MonkeyPatch):
    """torch refuses a gradient on another device than the data. The meta device stands for a GPU here."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    # torch moves no parameter's data between the CPU and the meta device.
    monkeypatch.setattr(placement, "give_memory", lambda tensor, memory, attributes: nn.Parameter(memory[0]))
    moved = move_to(parameter, torch.device("meta"), [])
    assert moved.is_meta
    assert moved.grad.is_meta


@pytest.mark.parametrize("fails", [False, True])
def test_resident_tensors_are_put_back_as_they_were_found(fails: bool, monkeypatch: pytest.MonkeyPatch):
    model = nn.BatchNorm1d(3, device="meta")
    found = [model.weight, model.bias]
    resident = [(getattr(model, name), [ModuleAttribute(model, name, False)]) for name in ("weight", "bias")]
    if fails:
        made = []

        def empty_like(tensor: torch.Tensor, **options: object) -> torch.Tensor:
            made.append(tensor)
            if len(made) > 1:
                raise MemoryError
            return torch.zeros(tensor.shape)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        with pytest.raises(MemoryError):
            DevicePlacement(resident, torch.device("cpu"))
    else:
        DevicePlacement(resident, torch.device("cpu")).put_back()
    assert all(one is other for one, other in zip(model.parameters(), found, strict=True))


def test_a_buffer_that_is_gone_is_not_restored():
    model = nn.BatchNorm1d(3)
    resident = [(model.running_mean, [ModuleAttribute(model, "running_mean", True)])]
    placed = DevicePlacement(resident, torch.device("cpu"))
    model.running_mean = None
    placed.restore()
    assert model.running_mean is None


def test_a_tensor_that_wraps_others_is_replaced_and_keeps_its_attributes():
    model = nn.Linear(4, 4, bias=False)
    found = model.weight = nn.Parameter(Nested.of(model.weight.detach()), requires_grad=False)
    found.note = "mine"
    attribute = ModuleAttribute(model, "weight", False)
    memory = [torch.empty_like(part) for part in parts(found)]
    new = move_into(memory, found, [attribute])
    assert new is model.weight
    assert isinstance(new, nn.Parameter)
    assert not new.requires_grad
    assert new.note == "mine"
    assert [part.data_ptr() for part in parts(new)] == [part.data_ptr() for part in memory]
    assert torch.equal(new.dequantize(), found.dequantize())
    assert move_to(new, torch.device("meta"), [attribute]).is_meta
    assert model.weight.is_meta
    DevicePlacement([(model.weight, [attribute])], torch.device("cpu"))
    assert not model.weight.is_meta
    assert unfilled(model) == ["weight"]
    with torch.no_grad():
        for part, value in zip(parts(model.weight), parts(found), strict=True):
            part.copy_(value)
    assert unfilled(model) == []


@pytest.mark.parametrize(
    "tensor", [torch.randn(3, 5), torch.randn(3, 5).t(), torch.randn(6, 5)[::2], torch.randn(0, 4), torch.randn(())]
)
def test_a_plain_tensor_is_one_piece_with_its_strides_if_it_is_dense(tensor: torch.Tensor):
    layout = Layout(tensor)
    assert layout.nbytes == tensor.nbytes
    flat = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    (view,) = layout.views(lambda offset, nbytes: flat[offset : offset + nbytes])
    view.copy_(tensor)
    assert torch.equal(over(tensor, [view]), tensor)
    assert view.stride() == (tensor.stride() if tensor.shape != (3, 5) or tensor.stride() != (10, 1) else (5, 1))


def test_a_tensor_that_wraps_others_has_a_piece_for_each_that_is_aligned():
    weight = Nested.of(torch.randn(5, 7))
    layout = Layout(weight)
    assert [piece.dtype for piece in layout.pieces] == [torch.int8, torch.float32, torch.float32]
    assert all(piece.offset % ALIGNMENT_BYTES == 0 for piece in layout.pieces)
    ends = [piece.offset + piece.nbytes for piece in layout.pieces]
    assert all(end <= piece.offset for end, piece in zip(ends, layout.pieces[1:], strict=False))
    assert layout.nbytes == ends[-1]
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(lambda offset, nbytes: flat[offset : offset + nbytes])
    for view, part in zip(views, parts(weight), strict=True):
        view.copy_(part)
    assert torch.equal(over(weight, views).dequantize(), weight.dequantize())


def test_only_tensors_of_the_same_parts_fit():
    weight = Nested.of(torch.randn(5, 7))
    layout = Layout(weight)
    assert layout.fits(Nested.of(torch.randn(5, 7)))
    assert not layout.fits(Nested.of(torch.randn(7, 5)))
    assert not layout.fits(weight.codes)
    assert not layout.fits(torch.randn(5, 7))
    assert not Layout(torch.randn(5, 7)).fits(torch.randn(5, 7).double())


def test_a_parameter_that_wraps_others_and_trains_is_refused_in_one_line():
    weight = nn.Parameter(Nested.of(torch.randn(5, 7)), requires_grad=True)
    with pytest.raises(ValueError, match=r"^head\.weight is a Nested that trains: .*frozen") as refused:
        check_frozen("head.weight", weight)
    assert "\n" not in str(refused.value)
    check_frozen("head.weight", weight.requires_grad_(False))
    check_frozen("head.weight", nn.Parameter(torch.ones(2)))

"""Tensors lie in a flat buffer."""

import pytest
import torch
from torch import nn

from offload.memory.host_memory import ALIGNMENT_BYTES
from offload.torch_private.tensor_parts import parts
from offload.weights.units.layouts import Layout, check_frozen, over
from tests.offload.helpers.quantised import Nested


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

"""Tensors are taken apart and put together again."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from offload.torch_private.tensor_parts import (
    TakenApart,
    any_wraps,
    dressed,
    give_state,
    is_as_stored,
    is_compound,
    lies_flat,
    mapped,
    parts,
    replaced_in,
    state_of,
    tensors_in,
    true_bytes,
    version_of,
    wrapped,
    wraps,
)
from tests.offload.helpers.quantised import Codes, Nested


class Packed(nn.Parameter):
    """As the packed parameters of bitsandbytes: `quant_state` has scales, nested ones too, and the module."""


def packed() -> Packed:
    parameter = Packed(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    inner = SimpleNamespace(absmax=torch.ones(3), code=torch.ones(4), blocksize=4)
    module = nn.Linear(2, 2)
    parameter.quant_state = SimpleNamespace(absmax=torch.ones(2), state2=inner, module=module, shape=torch.Size([4, 4]))
    return parameter


def test_a_plain_tensor_is_its_only_part():
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2))):
        assert parts(tensor) == [tensor]
        assert not is_compound(tensor)
        assert true_bytes(tensor) == 8
        assert version_of(tensor.detach().add_(1)) == 1


def test_sparse_and_quantised_tensors_do_not_lie_flat():
    table = torch.eye(4)
    sparse = table.to_sparse()
    # Two indices of eight bytes and a number of four for each of four elements.
    assert true_bytes(sparse) == 4 * (2 * 8 + 4)
    # An index for each number, one for each row or column and one more.
    for rows in (table.to_sparse_csr(), table.to_sparse_csc()):
        assert true_bytes(rows) == 4 * (8 + 4) + 5 * 8
    for blocks in (table.to_sparse_bsr((2, 2)), table.to_sparse_bsc((2, 2))):
        assert true_bytes(blocks) == 2 * (8 + 4 * 4) + 3 * 8
    assert not any(
        map(lies_flat, (sparse, table.to_sparse_csr(), torch.quantize_per_tensor(table, 1.0, 0, torch.qint8)))
    )
    assert lies_flat(table)
    assert lies_flat(nn.Parameter(Nested.of(torch.randn(5, 7)), requires_grad=False))


def test_other_parts_are_noticed_wherever_they_are_assigned():
    weight = nn.Parameter(Nested.of(torch.randn(5, 7)), requires_grad=False)
    other = packed()
    other.quant_state.itself = other.quant_state
    for tensor, holder, name in (
        (weight, weight, weight.__tensor_flatten__()[0][-1]),
        (weight, weight.codes, weight.codes.__tensor_flatten__()[0][0]),
        (other, other.quant_state, "absmax"),
        (other, other.quant_state.state2, "absmax"),
        (other, other, "quant_state"),
    ):
        taken = TakenApart(tensor)
        assert taken.is_current
        assert all(one is part for one, part in zip(taken.parts, parts(tensor), strict=True))
        setattr(holder, name, copy.copy(getattr(holder, name)))
        assert not taken.is_current


def test_a_tensor_that_wraps_others_is_made_anew_over_others_of_its_kind():
    weight = nn.Parameter(Nested.of(torch.randn(5, 7)), requires_grad=False)
    assert wraps(weight)
    assert is_compound(weight)
    assert any_wraps([Nested, torch.Tensor])
    assert not any_wraps([torch.Tensor, nn.Parameter])
    assert [part.shape for part in parts(weight)] == [(5, 7), (1, 1), (5, 1)]
    assert true_bytes(weight) == 35 + 4 + 20 != weight.nbytes
    copies = [part.clone() for part in parts(weight)]
    weight.note = "mine"
    new = dressed(wrapped(weight, copies), weight)
    assert (type(new), type(new.codes)) == (Nested, Codes)
    assert isinstance(new, nn.Parameter)
    assert new.note == "mine"
    assert [part.data_ptr() for part in parts(new)] == [copy.data_ptr() for copy in copies]


def test_a_change_to_a_part_counts_as_a_version():
    weight = Nested.of(torch.randn(5, 7))
    before = version_of(weight)
    weight.codes.integers.add_(1)
    assert version_of(weight) == before + 1
    with torch.inference_mode():
        assert version_of(torch.ones(1)) == 0


def test_the_tensors_of_a_state_are_parts_and_its_modules_are_not():
    parameter = packed()
    state = state_of(parameter)
    assert is_compound(parameter)
    assert not wraps(parameter)
    expected = [parameter, state.absmax, state.state2.absmax, state.state2.code]
    assert all(one is other for one, other in zip(parts(parameter), expected, strict=True))
    new = [torch.zeros_like(part) for part in expected[1:]]
    copied = replaced_in(state, new)
    assert copied is not state
    assert copied.module is state.module
    assert [tensor.sum() for tensor in tensors_in(state)] == [2, 3, 4]
    assert [tensor.sum() for tensor in tensors_in(copied)] == [0, 0, 0]
    give_state(parameter, new)
    assert state_of(parameter) is state
    assert state.state2.code is new[2]


def test_values_are_mapped_wherever_tensors_are_in_them():
    tensor, other = torch.ones(1), torch.zeros(1)
    value = {"list": [1, (tensor, "text")], "object": SimpleNamespace(inner={"key": tensor})}
    new = mapped(value, lambda each: other)
    assert new["list"] == [1, (other, "text")]
    assert new["object"].inner["key"] is other
    assert value["object"].inner["key"] is tensor
    assert mapped(value, lambda each: each) is value
    round_about = SimpleNamespace(tensor=tensor)
    round_about.itself = round_about
    assert list(tensors_in(round_about)) == [tensor]


def test_a_lazy_conjugate_and_a_parameter_are_not_as_stored():
    plain = torch.randn(3, dtype=torch.complex64)
    assert is_as_stored(plain)
    assert is_as_stored(plain.real)
    assert not any(map(is_as_stored, (plain.conj(), plain.conj().imag, nn.Parameter(plain))))

"""The formats of quantised weights: their bytes, their error, and the bits of their libraries."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from models.quantise_formats import FORMATS, Float8, Format, Int4, Int8, Nf4

EACH = pytest.mark.parametrize("format", [Int8(), Float8(), Int4(), Int4(group=32), Nf4(), Nf4(double=False)], ids=str)
# Of the largest element of a matrix of normal numbers.
LARGEST_ERROR = {"int8": 0.005, "float8": 0.05, "int4": 0.1, "nf4": 0.16}


def matrix(rows: int = 24, columns: int = 100, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_matrix_comes_back_nearly_and_as_its_format_says(format: Format, dtype: torch.dtype):
    given = matrix(dtype=dtype)
    made = format.quantise(given)
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == format.tensors(given.shape)
    back = format.dequantise(made, given.shape, dtype)
    assert (back.shape, back.dtype) == (given.shape, dtype)
    error = (back.float() - given.float()).abs().max() / given.float().abs().max()
    assert 0 < error < LARGEST_ERROR[format.name]
    again = format.quantise(given)
    assert all(torch.equal(made[name], again[name]) for name in made)


@EACH
def test_an_empty_one_has_the_bytes_of_a_full_one(format: Format):
    empty = format.empty(torch.Size((24, 100)), torch.device("meta"))
    full = format.quantise(matrix())
    assert {n: t.nbytes for n, t in empty.items()} == {n: t.nbytes for n, t in full.items()}
    assert format.dequantise(empty, torch.Size((24, 100)), torch.float32).shape == (24, 100)


def test_int8_and_float8_are_those_of_torchao():
    library = pytest.importorskip("torchao.quantization")
    given = matrix()
    for format, theirs in (
        (Int8(), library.Int8Tensor.from_hp(given, library.PerRow())),
        (Float8(), library.Float8Tensor.from_hp(given, granularity=library.PerRow())),
    ):
        ours = format.dequantise(format.quantise(given), given.shape, torch.float32)
        assert torch.allclose(ours, theirs.dequantize(), rtol=1e-6, atol=0)


def test_nf4_is_that_of_bitsandbytes():
    library = pytest.importorskip("bitsandbytes.functional")
    given = matrix(64, 128)
    packed, state = library.quantize_4bit(given, blocksize=64, compress_statistics=True, quant_type="nf4")
    format = Nf4()
    assert torch.equal(
        format.dequantise(format.quantise(given), given.shape, torch.float32), library.dequantize_4bit(packed, state)
    )


def test_each_number_of_int4_is_its_own():
    # A group from -7 to 8 has a scale of 1, so that every element is a number.
    given = torch.arange(-7.0, 9.0).repeat(3, 4)
    format = Int4(group=16)
    assert torch.equal(format.dequantise(format.quantise(given), given.shape, torch.float32), given)


@pytest.mark.parametrize("group", [0, 1, 7])
def test_two_columns_share_a_byte(group: int):
    with pytest.raises(ValueError, match=f"^group={group}: must be even"):
        Int4(group=group)


@EACH
def test_a_missing_package_is_one_line_with_the_command(format: Format, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"^{format.package.partition('=')[0]} is missing: pip install") as error:
        format.check_package()
    assert str(error.value).endswith(format.package)


def test_formats_are_found_by_name():
    assert {name: kind.name for name, kind in FORMATS.items()} == {name: name for name in FORMATS}

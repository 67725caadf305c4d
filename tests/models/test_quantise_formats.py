"""The formats of quantised weights: their bytes, their error, and the bits of their libraries."""

import importlib.util

import pytest
import torch

from models import quantise_formats
from models.quantise_formats import Float8, Format, Int4, Int8, Nf4

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


def of_torchao(format: Format, given: torch.Tensor) -> dict[str, torch.Tensor]:
    library = pytest.importorskip("torchao.quantization")
    if isinstance(format, Int8):
        made = library.Int8Tensor.from_hp(given, library.PerRow())
        return {"qdata": made.qdata, "scale": made.scale}
    if isinstance(format, Float8):
        made = library.Float8Tensor.from_hp(given, granularity=library.PerRow())
        return {"qdata": made.qdata, "scale": made.scale}
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    given = torch.nn.functional.pad(given.float(), (0, -given.shape[1] % format.group))
    common = {"block_size": (1, format.group), "quant_min": 0, "quant_max": 15}
    scale, zero = primitives.choose_qparams_affine(
        given, primitives.MappingType.ASYMMETRIC, target_dtype=torch.uint8, zero_point_dtype=torch.uint8, **common
    )
    numbers = primitives.quantize_affine(given, scale=scale, zero_point=zero, output_dtype=torch.uint8, **common)
    return {"qdata": numbers[:, 0::2] | (numbers[:, 1::2] << 4), "scale": scale, "zero": zero}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def odd_matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns matrices of normal numbers, of whole ones that fall on bounds, of one sign, and of tiny numbers."""
    normal = matrix(40, 100)
    whole = torch.randint(-128, 128, (40, 100), generator=torch.Generator().manual_seed(1)).float()
    return [each.to(dtype) for each in (normal, whole, normal.abs(), -normal.abs(), normal * 1e-4)]


@pytest.mark.parametrize("format", [Int8(), Float8(), Int4(), Int4(group=32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bits_are_those_of_torchao(format: Format, dtype: torch.dtype):
    for given in odd_matrices(dtype):
        theirs = of_torchao(format, given)
        for name, made in format.quantise(given).items():
            assert same_bytes(made, theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("double", [False, True])
def test_the_bits_of_nf4_are_those_of_bitsandbytes(dtype: torch.dtype, double: bool):
    library = pytest.importorskip("bitsandbytes.functional")
    format = Nf4(double=double)
    for given in [each[:32] for each in odd_matrices(dtype)]:
        packed, state = library.quantize_4bit(given, blocksize=64, compress_statistics=double, quant_type="nf4")
        made = format.quantise(given)
        assert torch.equal(made["qdata"], packed)
        assert torch.equal(made["code"], state.code)
        if not double:
            assert torch.equal(made["absmax"], state.absmax)
            continue
        # The last bits of theirs depend on the number of threads.
        assert torch.allclose(made["offset"], state.offset, rtol=1e-6)
        assert torch.allclose(made["nested_absmax"], state.state2.absmax, rtol=1e-5)
        assert torch.equal(made["nested_code"], state.state2.code)
        back = format.dequantise(made, given.shape, torch.float32)
        assert torch.allclose(back, library.dequantize_4bit(packed, state).float(), rtol=1e-2, atol=1e-6)


@EACH
def test_pieces_and_threads_do_not_change_the_bits(format: Format, monkeypatch: pytest.MonkeyPatch):
    # More scales than torch adds on one thread.
    given = matrix(53, 40_000, torch.bfloat16)
    whole = format.quantise(given)
    threads = torch.get_num_threads()
    monkeypatch.setattr(quantise_formats, "PIECE_ELEMENTS_PER_THREAD", 2**16)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for name, made in format.quantise(given).items():
                assert same_bytes(made, whole[name]), name
    finally:
        torch.set_num_threads(threads)


@EACH
def test_zeros_stay_zeros_and_what_is_not_finite_does_not_spread(format: Format):
    given = matrix(4, 256)
    given[0] = 0
    assert format.dequantise(format.quantise(given), given.shape, torch.float32)[0].tolist() == [0.0] * 256
    given[2, 5] = torch.nan
    back = format.dequantise(format.quantise(given), given.shape, torch.float32)
    assert back[2].isnan().any()
    if format != Nf4():
        # There, the mean of all scales is in each of them.
        assert back[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("format", [Int8(), Float8(), Int4(), Nf4(double=False), Nf4()], ids=str)
def test_a_matrix_of_several_is_quantised_as_alone_and_can_be_cut_out(format: Format):
    given = matrix(6 * 64, 256).view(6, 64, 256)
    inner = format.quantise(given)
    assert {name: (tuple(t.shape), t.dtype) for name, t in inner.items()} == format.tensors(given.shape)
    together = format.dequantise(inner, given.shape, torch.float32)
    for index in (0, 5):
        part = format.part(inner, given.shape, index)
        assert torch.equal(format.dequantise(part, given.shape[1:], torch.float32), together[index])
        if format != Nf4():
            alone = format.dequantise(format.quantise(given[index]), given.shape[1:], torch.float32)
            assert torch.equal(alone, together[index])
    assert Nf4().part(inner, torch.Size((6, 64, 64)), 1) is None


@pytest.mark.parametrize("double", [False, True])
def test_more_elements_than_a_kernel_counts_come_back_part_by_part(double: bool, monkeypatch: pytest.MonkeyPatch):
    format = Nf4(double=double)
    given = matrix(6 * 64, 256).view(6, 64, 256)
    inner = format.quantise(given)
    at_once = format.dequantise(inner, given.shape, torch.bfloat16)
    monkeypatch.setattr(quantise_formats, "KERNEL_ELEMENTS", given.numel() - 1)
    assert torch.equal(format.dequantise(inner, given.shape, torch.bfloat16), at_once)
    if double:
        with pytest.raises(RuntimeError, match=r"nf4: a weight of shape \(32, 96, 32\) has more .* quantize.exclude"):
            format.dequantise(inner, torch.Size((32, 96, 32)), torch.bfloat16)


def test_each_number_of_int4_is_its_own():
    # A group from -7 to 8 has a scale of 1, so that every element is a number.
    given = torch.arange(-7.0, 9.0).repeat(3, 4)
    format = Int4(group=16)
    assert torch.equal(format.dequantise(format.quantise(given), given.shape, torch.float32), given)


@pytest.mark.parametrize("group", [0, 1, 7])
def test_two_columns_share_a_byte(group: int):
    with pytest.raises(ValueError, match=f"^group={group}: must be even"):
        Int4(group=group)


def test_a_missing_package_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^bitsandbytes is missing: pip install bitsandbytes==") as error:
        Nf4().check_package()
    assert str(error.value).endswith(Nf4.package)
    for format in (Int8(), Float8(), Int4()):
        format.check_package()


def test_a_product_imports_nothing(monkeypatch: pytest.MonkeyPatch):
    """Each layer asks for bitsandbytes twice a step, and an import in silence clears the caches of all loggers."""
    given, format = matrix(), Nf4()
    made = format.quantise(given)
    back = format.dequantise(made, given.shape, given.dtype)
    monkeypatch.setattr(quantise_formats, "without_remarks", None)
    assert torch.equal(format.dequantise(made, given.shape, given.dtype), back)


@pytest.mark.slow
def test_the_mean_of_so_many_scales_that_their_sum_would_not_fit():
    """The experts of one tensor: 2^32 elements have 2^26 scales, and the sum of as many numbers of 38 bits is 2^63."""
    assert quantise_formats._exact_mean(torch.full((2**26,), 1.0)).item() == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@EACH
def test_a_gpu_makes_the_bits_of_a_cpu(format: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantise_formats, "GPU_PIECE_ELEMENTS", 2**18)
    given = matrix(531, 4_096, dtype)
    given[0] = 0
    here, there = format.quantise(given), format.empty(given.shape, torch.device("cuda"))
    format.write(given.cuda(), there)
    on_host = format.empty(given.shape, torch.device("cpu"))
    format.write(given.cuda(), on_host)
    for name, made in here.items():
        assert same_bytes(there[name].cpu(), made), name
        assert same_bytes(on_host[name], made), name

"""The formats of states: names, bytes, and rounding: exact with a remainder, at random with noise, and in 8 bits."""

import pytest
import torch

from offload.knobs import KnobError
from offload.optimizer.formats import (
    BLOCK,
    StateFormat,
    dequantise,
    dynamic_map,
    join,
    noise_key,
    noise_of,
    noise_seed,
    quantise,
    round_stochastically,
    round_weights,
    scales_for,
    split,
)

# Largest error of a number relative to its block's largest: half the widest distance of two entries of the map.
SIGNED_ERROR, UNSIGNED_ERROR = 0.0071, 0.0036


@pytest.mark.parametrize(
    ("format", "traffic"),
    [
        (StateFormat(), 26),
        (StateFormat("compact", "bf16"), 18),
        (StateFormat("compact", "int8"), 14 + 4 / 64),
        (StateFormat("stochastic", "int8"), 10 + 4 / 64),
    ],
    ids=str,
)
def test_traffic_of_an_update(format: StateFormat, traffic: float):
    assert format.update_bytes == traffic


def test_only_bf16_weights_have_another_master_than_a_float32_one():
    for master, dtype in (("compact", torch.int16), ("stochastic", None)):
        format = StateFormat(master)
        assert format.master_dtype(torch.bfloat16) == dtype
        assert format.master_dtype(torch.float16) == torch.float32
        assert format.master_dtype(torch.float32) is None


def test_codes_have_names_that_torchs_adamw_does_not_take_for_moments():
    assert StateFormat().moment_names == ("exp_avg", "exp_avg_sq")
    assert StateFormat(state_dtype="int8").moment_names == ("exp_avg_codes", "exp_avg_sq_codes")


@pytest.mark.parametrize("names", [("bf16",), ("fp32",), ("compact", "fp16")])
def test_unknown_names_are_refused(names: tuple[str, ...]):
    with pytest.raises(KnobError, match="must be"):
        StateFormat(*names)


def patterns(start: int, count: int) -> torch.Tensor:
    """Float32 numbers of the bit patterns start, start + 1, ..."""
    bits = torch.arange(start, start + count, dtype=torch.int64)
    return (((bits + (1 << 31)) % (1 << 32)) - (1 << 31)).to(torch.int32).view(torch.float32)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def check(values: torch.Tensor) -> None:
    weight = torch.empty(values.shape, dtype=torch.bfloat16)
    remainder = torch.empty(values.shape, dtype=torch.int16)
    split(values, weight, remainder)
    back = join(weight, remainder, torch.empty_like(values))
    nan = values.isnan()
    assert torch.equal(bits_of(back)[~nan], bits_of(values)[~nan])
    assert torch.equal(weight.isnan(), nan)
    assert torch.equal(back.isnan(), nan)
    # To nearest: as torch, which differs in ties alone.
    ties = (bits_of(values) & 0xFFFF) == 0x8000
    theirs = values.bfloat16()
    assert torch.equal(weight[~ties & ~nan], theirs[~ties & ~nan])
    away = (bits_of(values) >> 16) + 1
    assert torch.equal(weight.view(torch.int16)[ties & ~nan], away[ties & ~nan].to(torch.int16))


@pytest.mark.parametrize("high", [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF])
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_weight_and_remainder_are_the_master_for_every_low_half(high: int, sign: int):
    """Zeros, denormals, the largest number (which becomes infinity and comes back), infinity and NaN, of both signs."""
    check(patterns((high | sign) << 16, 1 << 16))


def test_weight_and_remainder_are_the_master_for_every_high_half():
    """With the low halves around a carry and a tie."""
    high = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(6)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).repeat(1 << 16)
    bits = (high << 16 | low) - ((high >> 15) << 32)
    check(bits.to(torch.int32).view(torch.float32))


def test_a_weight_that_somebody_set_to_zero_is_zero():
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0]).bfloat16()
    remainder = torch.tensor([-5, -32768, 7, 0], dtype=torch.int16)
    values = join(zeros, remainder, torch.empty(4))
    assert values.abs().max() < 1e-40
    assert torch.equal(values[[0, 1, 3]], torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_other_dtypes_are_rounded_as_torch_does(dtype: torch.dtype):
    values = torch.randn(100)
    weight = torch.empty(100, dtype=dtype)
    round_weights(values, weight)
    assert torch.equal(weight, values.to(dtype))


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    values = torch.tensor([1.0, 1 + 2**-9, -1 - 3 * 2**-10, 2**-130, 3e38]).repeat_interleave(1 << 16)
    noise = noise_of(noise_key(noise_seed(4), torch.tensor(1.0)), 0, len(values))
    rounded = torch.empty(values.shape, dtype=torch.bfloat16)
    round_stochastically(values, noise, rounded)
    below = (bits_of(values) & ~0xFFFF).view(torch.float32)
    above = ((bits_of(values) & ~0xFFFF) + 0x10000).view(torch.float32)
    assert ((rounded == below) | (rounded == above)).all()
    assert torch.equal(rounded[: 1 << 16], values[: 1 << 16].bfloat16())
    means = rounded.double().view(5, -1).mean(1)
    # Five standard deviations of a mean of 2^16 coins.
    width = (above - below).double().view(5, -1)[:, 0].abs()
    assert ((means - values.double().view(5, -1)[:, 0]).abs() <= width * 5 / 2 / 256).all()


def test_stochastic_rounding_keeps_infinity_and_nan():
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    rounded = torch.empty(4, dtype=torch.bfloat16)
    round_stochastically(values, torch.full((4,), 0x1FFFF, dtype=torch.int32), rounded)
    assert torch.equal(rounded.float().nan_to_num(7), values.nan_to_num(7))


def reference_mix(bits: int) -> int:
    """Wellons' lowbias32 on Python's integers."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) % (1 << 32)
    bits = ((bits ^ bits >> 15) * 0x846CA68B) % (1 << 32)
    return bits ^ bits >> 16


def test_noise_is_the_hash_of_its_counter():
    seed, step = noise_seed(5), 700
    assert seed % (1 << 32) == reference_mix(5)
    key = noise_key(seed, torch.tensor(float(step)))
    assert int(key) % (1 << 32) == reference_mix(step ^ seed % (1 << 32))
    start = (1 << 32) - 3
    found = noise_of(key, start, 6).long() % (1 << 32)
    wanted = [reference_mix((start + i) % (1 << 32) ^ int(key) % (1 << 32)) for i in range(6)]
    assert found.tolist() == [number % (1 << 32) for number in wanted]


def test_parameters_and_steps_have_noise_of_their_own():
    keys = {
        int(noise_key(noise_seed(number), torch.tensor(float(step)))) for number in range(8) for step in range(1, 9)
    }
    assert len(keys) == 64


# Moments in 8 bits.

SIGNS = pytest.mark.parametrize("signed", [True, False])


def numbers(count: int, signed: bool) -> torch.Tensor:
    """Numbers over many orders of magnitude."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10 ** (8 * torch.rand(count, generator=generator) - 8)
    return values if signed else values.abs()


def there_and_back(values: torch.Tensor, signed: bool) -> torch.Tensor:
    codes = torch.empty(values.shape, dtype=torch.uint8)
    scales = torch.empty(scales_for(values.numel()))
    quantise(values, codes, scales, signed)
    return dequantise(codes, scales, signed, torch.empty_like(values))


@SIGNS
def test_the_map_is_that_of_bitsandbytes(signed: bool):
    theirs = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(dynamic_map(signed), theirs.create_dynamic_map(signed))


@SIGNS
@pytest.mark.parametrize("count", [1, BLOCK, 10 * BLOCK + 17])
def test_errors_are_within_the_bound(signed: bool, count: int):
    values = numbers(count, signed)
    error = (there_and_back(values, signed) - values).abs()
    largest = torch.stack([block.abs().max() for block in values.split(BLOCK)]).repeat_interleave(BLOCK)[:count]
    assert (error <= (SIGNED_ERROR if signed else UNSIGNED_ERROR) * largest).all()


@SIGNS
def test_each_entry_of_the_map_is_exact(signed: bool):
    # One is in the map, so the scale is the factor.
    values = dynamic_map(signed) * 2.0**-20
    assert torch.equal(there_and_back(values, signed)[1:], values[1:])


def test_a_second_moment_above_zero_stays_above_zero():
    values = torch.tensor([1.0, 1e-12, 0.0, 1e-30])
    back = there_and_back(values, signed=False)
    assert torch.equal(back > 0, values > 0)


@SIGNS
def test_zeros_stay_zero(signed: bool):
    assert torch.equal(there_and_back(torch.zeros(300), signed), torch.zeros(300))


@SIGNS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_in_its_block_and_no_other(signed: bool, bad: float):
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 3] = bad
    back = there_and_back(values, signed)
    assert back[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(back[:BLOCK], values[:BLOCK])
    assert torch.equal(back[2 * BLOCK :], values[2 * BLOCK :])

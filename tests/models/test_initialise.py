"""Initial parameters: their distribution, and that they depend on seed, name and index alone."""

import hashlib

import pytest
import torch
from torch import nn

from models.initialise import Draws, HashNormal, HashUniform, initialise
from models.llama import Llama
from tests.models.helpers.hugging_face import SIZES as SMALL

SIZES = SMALL | {"num_hidden_layers": 3}


def make_model(seed=0, dtype=torch.float32, **changes) -> Llama:
    model = Llama(**{**SIZES, **changes}).to(dtype)
    initialise(model, seed)
    return model


def random_values(key: str, count: int, std=1.0, **options) -> torch.Tensor:
    values = torch.full((count,), float("nan"))
    HashNormal(torch.device("cpu"), **options).fill(values, key, std)
    return values


def split_mix_64(state: int) -> int:
    """Returns the output of SplitMix64 for one state, in Python's unbounded integers."""
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_reference_generator_is_split_mix_64():
    # The first outputs for seed 1234567, as published with the algorithm.
    outputs = [split_mix_64((1234567 + i * 0x9E3779B97F4A7C15) % 2**64) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_values_equal_the_reference_hash():
    digest = int.from_bytes(hashlib.blake2b(b"7/model.layers.0", digest_size=8).digest(), "little")
    expected = []
    for index in range(1000):
        z = split_mix_64((digest + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)
        expected.append(sum(z >> bits & 0xFFFF for bits in (0, 16, 32, 48)) - 131070)
    # Of the sum of four values that are uniform on 0 .. 65535.
    variance = 4 * (65536**2 - 1) / 12
    scale = torch.tensor(0.02 / variance**0.5, dtype=torch.float32)
    expected = torch.tensor(expected, dtype=torch.float32) * scale
    assert torch.equal(random_values("7/model.layers.0", 1000, std=0.02), expected)


def test_distribution_is_close_to_normal():
    values = random_values("0/x", 2**20).double()
    error = 2**-10  # the standard error of the mean of 2^20 values
    assert abs(values.mean()) < 4 * error
    assert abs(values.std() - 1) < 4 * error
    assert abs((values**3).mean()) < 4 * error * 15**0.5
    assert (values**4).mean() - 3 == pytest.approx(-0.3, abs=0.04)
    assert 3.2 < values.abs().max() <= 12**0.5
    within = (values.abs() < 1).double().mean()
    assert within == pytest.approx(0.6827, abs=0.02)


def test_uniform_numbers_are_uniform():
    values = torch.empty(300, 1000)
    HashUniform(torch.device("cpu")).fill(values, "key", bound := 2 * 3**0.5)
    assert values.abs().max() <= bound
    assert values.mean().abs() < 0.02
    assert abs(values.std() - 2) < 0.01
    counts = torch.histc(values, 20, -bound, bound)
    assert (counts - 15_000).abs().max() < 600
    # Whatever the size of the pieces.
    some = torch.empty(10)
    HashUniform(torch.device("cpu"), 4).fill(some, "key", bound)
    assert torch.equal(some, values.view(-1)[:10])


@pytest.mark.parametrize("chunk_elements", [1, 7, 4096])
def test_chunk_size_does_not_matter(chunk_elements):
    assert torch.equal(random_values("0/x", 1000, chunk_elements=chunk_elements), random_values("0/x", 1000))


def test_thread_count_does_not_matter():
    threads = torch.get_num_threads()
    expected = random_values("0/x", 200_000)
    try:
        torch.set_num_threads(1)
        assert torch.equal(random_values("0/x", 200_000), expected)
    finally:
        torch.set_num_threads(threads)


def test_strides_do_not_matter():
    plain = nn.Conv2d(6, 5, 3)
    channels_last = nn.Conv2d(6, 5, 3).to(memory_format=torch.channels_last)
    assert not channels_last.weight.is_contiguous()
    initialise(plain, 3)
    initialise(channels_last, 3)
    assert torch.equal(plain.weight, channels_last.weight)


def test_half_precision_is_the_rounded_float32():
    for half, full in zip(make_model(dtype=torch.bfloat16).parameters(), make_model().parameters(), strict=True):
        assert torch.equal(half, full.bfloat16())


def test_seed_changes_every_matrix_and_nothing_else():
    for (name, a), (_, b) in zip(make_model(0).named_parameters(), make_model(1).named_parameters(), strict=True):
        assert torch.equal(a, b) == ("norm" in name)


def test_values_belong_to_the_name_not_to_the_order():
    two, three = make_model(num_hidden_layers=2), make_model(num_hidden_layers=3)
    # The scale of residual projections depends on depth.
    for name, parameter in two.named_parameters():
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(parameter, three.get_parameter(name))


def test_llama_standard_deviations():
    model = make_model(hidden_size=256, intermediate_size=256)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.02 / (2 * 3) ** 0.5 if residual else 1 if name == "model.embed_tokens.weight" else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_tied_parameter_is_filled_by_its_first_name():
    tied, untied = make_model(tie_word_embeddings=True), make_model()
    # As an output layer it has the smaller values of one.
    embedding = untied.model.embed_tokens.weight
    torch.testing.assert_close(tied.lm_head.weight, embedding * 0.02, rtol=1e-6, atol=0)
    assert not torch.equal(untied.lm_head.weight, embedding * 0.02)


def test_other_modules():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.empty(40, 50))
            self.gate = nn.Parameter(torch.empty(7))
            self.query_bias = nn.Parameter(torch.empty(7))
            self.attention = nn.MultiheadAttention(8, 2)
            self.norms = nn.ModuleList([nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8)])
            self.conv = nn.Conv1d(30, 30, 3)
            self.embedding = nn.Embedding(50, 40)

    model = Gated()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(77)
    initialise(model, seed=0)
    assert model.embedding.weight.std().item() == pytest.approx(1, rel=0.1)
    for matrix in (model.query, model.conv.weight):
        assert matrix.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.attention.in_proj_weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert (model.gate == 1).all()
    for zeros in (model.query_bias, model.conv.bias, model.attention.in_proj_bias, model.attention.out_proj.bias):
        assert (zeros == 0).all()
    for norm in model.norms:
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()
    assert (model.norms[2].running_mean == 0).all()
    assert (model.norms[2].running_var == 1).all()
    assert model.norms[2].num_batches_tracked == 0


def test_meta_parameter_is_refused_before_anything_is_written():
    model = Llama(**SIZES)
    model.lm_head.to("meta")
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(ValueError, match=r"lm_head\.weight is on the meta device"):
        initialise(model, seed=0)
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_integer_parameter_is_refused():
    model = nn.Module()
    model.codes = nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"codes has dtype torch\.int8"):
        initialise(model, seed=0)


def test_global_random_state_is_left_alone():
    model = Llama(**SIZES)
    before = torch.get_rng_state()
    initialise(model, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_makes_the_same_bits(dtype):
    expected = make_model(dtype=dtype, hidden_size=512, vocab_size=20_000)
    made_on_device = Llama(**{**SIZES, "hidden_size": 512, "vocab_size": 20_000}).to(dtype)
    initialise(made_on_device, seed=0, device="cuda")
    living_on_device = Llama(**{**SIZES, "hidden_size": 512, "vocab_size": 20_000}).to("cuda", dtype)
    initialise(living_on_device, seed=0)
    for parameter, host, device in zip(
        expected.parameters(), made_on_device.parameters(), living_on_device.parameters(), strict=True
    ):
        assert host.device.type == "cpu"
        assert torch.equal(parameter, host)
        assert torch.equal(parameter, device.cpu())


def test_draws_depend_on_seed_and_name_and_not_on_the_order_of_tensors():
    expected = {name: random_values(f"3/{name}", 100, std=0.5) for name in ("a", "b")}
    uniform = torch.empty(100)
    HashUniform(torch.device("cpu")).fill(uniform, "3/a", 0.25)
    draws, tensor = Draws(3, "cpu"), torch.empty(100)
    for name in ("b", "a", "b"):
        draws.normal(tensor, name, 0.5)
        assert torch.equal(tensor, expected[name])
        draws.uniform(tensor, "a", 0.25)
        assert torch.equal(tensor, uniform)

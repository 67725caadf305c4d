"""Tokens one by one: as by recomputing the whole sequence, from the likeliest, by the seed alone."""

import pytest
import torch
from torch import Tensor, nn

from models.generation import can_generate, draw, generate
from models.hf import build_hf
from models.initialise import initialise
from models.llama import Llama
from tests.models.helpers.hugging_face import SIZES

PROMPT = (5, 1, 4)


@pytest.fixture(scope="module")
def model() -> Llama:
    made = Llama(**SIZES).eval()
    initialise(made, seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return made


def generated(model: nn.Module, tokens: int = 12, **changes) -> list[int]:
    settings = {"temperature": 1.0, "top_p": 1.0, "seed": 3, "device": torch.device("cpu"), **changes}
    with torch.no_grad():
        return list(generate(model, PROMPT, tokens=tokens, **settings))


def drawn(logits: Tensor, temperature: float, top_p: float, count: int = 200) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {draw(logits, temperature, top_p, generator) for _ in range(count)}


def test_greedy_tokens_are_those_of_recomputing_the_whole_sequence(model: Llama):
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert generated(model, temperature=0) == ids[len(PROMPT) :]
    assert len(set(ids)) > 3


@pytest.mark.parametrize("short", [2, 3, 4, 8, 40])
def test_greedy_tokens_of_longrope_are_those_of_transformers(short: int):
    """Beyond so many tokens it has other angles for all of a text, so what the cache holds is computed again."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.0, 9.0], "rope_theta": 10.0}
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes |= {"original_max_position_embeddings": short, "rope_parameters": longrope}
    made = build_hf("phi3", "causal_lm", sizes).eval()
    made.initialise(0)
    ids = list(PROMPT)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(30 if parameter.ndim > 1 else 1)
        for _ in range(12):
            ids.append(int(made.hf(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generated(made, temperature=0) == ids[len(PROMPT) :]
    assert len(set(ids)) > 3


def test_the_seed_alone_decides_and_other_random_numbers_stay(model: Llama):
    before = torch.get_rng_state()
    first = generated(model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert generated(model) == first
    assert generated(model, seed=4) != first


def test_ids_beyond_the_tokenizer_are_never_drawn(model: Llama):
    assert max(generated(model, temperature=50.0, vocab_size=4)) < 4


def test_the_fewest_likeliest_that_make_up_top_p_are_drawn():
    logits = torch.tensor([0.1, 0.5, 0.0, 0.4]).log()
    assert drawn(logits, 1.0, 0.49) == {1}
    assert drawn(logits, 1.0, 0.51) == {1, 3}
    assert drawn(logits, 1.0, 1e-300) == {1}
    assert drawn(logits[[0, 1, 3]], 1.0, 1.0) == {0, 1, 2}


def test_temperature_sharpens_and_zero_is_greedy():
    logits = torch.tensor([1.0, 3.0, 2.9])
    assert drawn(logits, 0.0, 1.0) == drawn(logits, 1e-310, 1.0) == {1}
    assert drawn(logits, 1.0, 1.0) == {0, 1, 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(value: float):
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        drawn(torch.tensor([1.0, value]), 0.0, 1.0)


def test_only_a_model_with_a_cache_can_generate(model: Llama):
    assert can_generate(model)
    assert not can_generate(nn.Linear(1, 1))

"""Models of transformers whose rows ranks divide compute what one device does, or are refused."""

import pytest
import torch

from tests.models.helpers.divided import check_in_parts
from tests.models.helpers.hf_models import GROUPED, MODELS, build_hf, tiny
from tests.models.helpers.packed import far_from_uniform
from tests.models.test_hf_packed import BY_STARTS, NAMES, VOCABULARY

WINDOWED = {"gemma3_text"}
DIVIDES = sorted(BY_STARTS - WINDOWED)
LENGTH = "depends on the length of the row"
# The frequencies of rows of more than 8 tokens are others.
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "short_factor": [1.0, 1.0],
    "long_factor": [2.0, 3.0],
}  # fmt: skip


@pytest.mark.parametrize("name", [n if n == "qwen3" else pytest.param(n, marks=pytest.mark.slow) for n in DIVIDES])
def test_ranks_compute_the_losses_and_gradients_of_one_device(name: str):
    model = far_from_uniform(tiny(name))
    assert model.why_not_divided(2) is None
    torch.manual_seed(0)
    ids, labels = torch.randint(3, VOCABULARY, (2, 2, 12))
    labels[:, 2:7] = -100
    check_in_parts(model, ids, labels, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(DIVIDES)))
def test_all_others_are_refused_or_are_of_an_architecture_that_divides(name: str):
    model = tiny(name, "meta")
    if model.why_not_divided(2) is None:
        test_ranks_compute_the_losses_and_gradients_of_one_device(name)


@pytest.mark.parametrize(
    ("source", "changes", "why"),
    [
        ("mamba", {}, "takes no positions"),
        ("gemma3_text", {}, "has a window, a mask or scores of its own"),
        ("gemma2", {}, "not that of torch"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, LENGTH),
        ("llama", {"rope_parameters": LONG}, LENGTH),
        ("falcon", {"alibi": True}, "alibi"),
        ("mixtral", {"output_router_logits": True}, "counts the tokens of whole rows"),
        ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1}, "3 attention heads do not divide by 2"),
        ("qwen3", {"num_key_value_heads": 1}, "1 heads of keys and values do not divide by 2"),
    ],
)
def test_what_ranks_cannot_divide_is_refused(source: str, changes: dict, why: str):
    with torch.device("meta"):
        model = build_hf(MODELS[source][0], "causal_lm", {**MODELS[source][1], **changes})
    assert why in model.why_not_divided(2)


def test_dropout_of_attention_is_no_reason():
    with torch.device("meta"):
        model = build_hf("llama", "causal_lm", {**GROUPED, "attention_dropout": 0.5})
    assert model.why_not_divided(2) is None

"""Language modelling: what it counts, and what does not fit it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models.llama import Llama
from tests.training.helpers.in_process import components_of, composed
from training.errors import UserError
from training.tasks.causal_lm import CausalLM


def test_tokens_are_what_it_counts():
    config, _ = composed("batch_size=48", "seq_len=2048")
    task = CausalLM()
    assert (task.unit, task.units(config), task.microbatches(config)) == ("tokens", 98304, 3)
    batch = task.meta_batch(config, 2)
    assert (batch.shape, batch.dtype, batch.device.type) == ((2, 2049), torch.int64, "meta")
    with torch.device("meta"):
        model = Llama(11, 32, 64, 2, 4, 2)
    assert task.flops(model, config) == 98304 * model.flops_per_token(2048)
    assert task.flops(nn.Linear(2, 2), config) is None


def test_a_dataset_without_tokens_and_a_small_vocabulary_are_named():
    config, _ = composed()
    with pytest.raises(UserError, match=r"^task=causal_lm: the dataset has no tokens"):
        CausalLM().check(config, SimpleNamespace(), nn.Identity())
    with pytest.raises(UserError, match=r"^model\.vocab_size=\d+ is smaller than the tokenizer's 99999"):
        CausalLM().check(config, SimpleNamespace(vocab_size=99999), SimpleNamespace(vocab_size=256))
    with pytest.raises(UserError, match=r"^task=causal_lm: Identity has no vocabulary"):
        CausalLM().check_model(config, nn.Identity())


@pytest.mark.parametrize("dataset", ["letters", "synthetic_images", "synthetic_video_latents"])
def test_a_plan_refuses_images_too(dataset: str):
    with pytest.raises(
        UserError, match=r"^task=causal_lm: the dataset has no tokens: take dataset=stdlib, text or hub$"
    ):
        components_of(f"dataset={dataset}")


def test_a_sequence_beyond_the_models_positions_is_refused():
    """On a GPU such a position would end the process."""
    config, _ = composed("seq_len=17")
    CausalLM().check_model(config, SimpleNamespace(vocab_size=256, most_positions=17))
    CausalLM().check_model(config, SimpleNamespace(vocab_size=256, most_positions=None))
    with pytest.raises(UserError, match=r"^seq_len=17: the model has embeddings for 16 positions: take no more$"):
        CausalLM().check_model(config, SimpleNamespace(vocab_size=256, most_positions=16))

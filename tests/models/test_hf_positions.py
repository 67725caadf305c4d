"""A text may have as many tokens as a model has embeddings of positions, and not one more."""

from __future__ import annotations

import pytest
import torch

from models.hf_positions import most_positions
from tests.models.helpers.hf_models import VOCABULARY, tiny

# Tables that begin with the first position, behind two rows, and behind a row for padding; and computed ones.
WITH_TABLES = ["gpt2", "openai-gpt", "opt", "bert", "prophetnet", "gptj", "codegen", "ctrl"]


@pytest.mark.parametrize("name", WITH_TABLES)
def test_one_token_more_is_beyond_the_table(name: str):
    model = tiny(name).eval()
    longest = most_positions(model)
    ids = torch.randint(3, VOCABULARY, (1, longest + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(ids[:, :-1], ids[:, 1:]).isfinite()
        # Some look into a buffer of the positions first, which is as long.
        with pytest.raises((IndexError, RuntimeError)):
            model(ids, ids)


def test_a_table_behind_a_row_of_padding():
    table = torch.nn.Embedding(10, 4, padding_idx=1)
    own = {"position_embeddings": table, "word_embeddings": torch.nn.Embedding(3, 4)}
    other = torch.nn.ModuleDict({"position_embedding": torch.nn.Embedding(5, 4)})
    assert most_positions(torch.nn.ModuleDict({**own, "vision_tower": other})) == 8


@pytest.mark.parametrize("name", ["qwen3", "mamba"])
def test_rotary_embeddings_and_none_have_no_end(name: str):
    assert most_positions(tiny(name, "meta")) is None

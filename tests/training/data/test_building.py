"""The dataset of a configuration, and what it says of its data."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training.helpers.in_process import composed
from training.data.building import build_dataset, facts_of, has_facts
from training.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


def test_chats_have_facts_and_random_tokens_have_none(write, tmp_path: Path) -> None:
    config, _ = composed(
        "dataset=chat", f"dataset.files={write('a.jsonl', json.dumps(CHAT))}", "dataset.tokenizer=null", "seq_len=256"
    )
    dataset = build_dataset(config, SimpleNamespace(vocab_size=300), tmp_path)

    assert has_facts(config)
    assert facts_of(dataset)["chats to train on"] == "1; 0 to evaluate on"

    config, _ = composed("dataset=synthetic", "seq_len=256")
    dataset = build_dataset(config, SimpleNamespace(vocab_size=300), tmp_path)
    assert not has_facts(config)
    assert facts_of(dataset) == {}
    assert dataset.vocab_size == 300


def test_random_tokens_for_a_model_of_images_are_refused(tmp_path: Path) -> None:
    config, _ = composed("dataset=synthetic", "seq_len=256")
    with pytest.raises(UserError, match=r"dataset.vocab_size=null: SimpleNamespace has no vocabulary"):
        build_dataset(config, SimpleNamespace(), tmp_path)

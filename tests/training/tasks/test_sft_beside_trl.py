"""Chats beside TRL's SFTTrainer: the same files, template and order give the same losses, gradients and weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.helpers.pretrained_folder import save_pretrained
from tests.training.tasks.beside_trl import LORA, ROWS, STEPS, adapter_of, assert_alike, ours, records_of, trainer
from training.data.chats.chat import Chats

LENGTH = 200
OURS = ("dataset=chat", f"seq_len={LENGTH}")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}"
    "{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "größer", "猫"]


def chats() -> list[dict[str, Any]]:
    """Conversations of one to three turns, whose answers differ much in length."""
    found = []
    for number in range(40):
        messages = [{"role": "system", "content": "be brief"}] if number % 4 == 1 else []
        for turn in range(1 + number % 3):
            said = " ".join(WORDS[(number + turn) % 7 : (number + turn) % 7 + 1 + number % 4])
            answer = " ".join(WORDS[-1 - (number * 5 + turn) % 11 :])
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found


def pairs() -> list[dict[str, Any]]:
    """The same with all but the last turn given."""
    return [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats()]


GIVEN = {"chats": chats, "pairs": pairs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a template that marks turns, an adapter of it, and files of chats."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = tmp_path_factory.mktemp("sft")
    save_pretrained(made / "model", max_position_embeddings=256)
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made / "model")
    adapter_of(AutoModelForCausalLM.from_pretrained(made / "model")).save_pretrained(made / "adapter")
    for name, rows in GIVEN.items():
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return made


def order(folder: Path, file: str, **keys: Any) -> list[list[list[int]]]:
    """The samples of each row of each step, as this loop has them: none is left out of the file."""
    sizes = {"seed": 0, "seq_len": LENGTH, "batch_size": ROWS}
    data = Chats(str(folder / f"{file}.jsonl"), tokenizer=str(folder / "model"), **sizes, **keys)
    assert len(data._tokens) == len(GIVEN[file]())
    return [[[int(n) for n in data._rows.members(row)] for row in data._rows.rows_of(step)] for step in range(STEPS)]


def theirs(
    folder: Path, run_dir: Path, file: str, steps: Sequence[Sequence[Sequence[int]]], packed: bool = False, **keys: Any
) -> list[dict[str, float]]:
    from datasets import Dataset

    losses: list[float] = []
    keys |= {"output_dir": str(run_dir)}
    given = GIVEN[file]()
    rows = [row for step in steps for row in step]
    made = trainer("SFT", folder, Dataset.from_list([given[number] for row in rows for number in row]), losses, **keys)
    if packed:
        # TRL packs rows of as many tokens, of which ours have one less a sample: so it is given ours.
        samples = iter(made.train_dataset)
        joined = Dataset.from_list([_joined([next(samples) for _ in row]) for row in rows])
        keys |= {"padding_free": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
        made = trainer("SFT", folder, joined, losses, **keys)
    made.train()
    return records_of(made, np.array(losses).reshape(STEPS, -1).sum(axis=1), {"grad_norm": "grad_norm"})


def _joined(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in samples[0] if isinstance(samples[0][name], list)]
    row = {name: [token for sample in samples for token in sample[name]] for name in names}
    return row | {"seq_lengths": [len(sample["input_ids"]) for sample in samples]}


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("file", "train_on", "keys"),
    [
        ("chats", "assistant", {"assistant_only_loss": True}),
        pytest.param("chats", "all", {}, marks=pytest.mark.slow),
        ("pairs", "assistant", {"completion_only_loss": True}),
    ],
)
def test_a_sample_a_row(
    folder: Path, tmp_path: Path, file: str, train_on: str, keys: dict[str, bool], microbatches: int
):
    """Microbatches have unequal numbers of labels; TRL accumulates as many batches."""
    batch = {"per_device_train_batch_size": ROWS // microbatches, "gradient_accumulation_steps": microbatches}
    steps = order(folder, file, train_on=train_on)
    expected = theirs(folder, tmp_path / "theirs", file, steps, **keys, **batch)
    found = ours(folder, tmp_path / "ours", file, *OURS, f"dataset.train_on={train_on}", f"microbatches={microbatches}")
    assert_alike(found, expected)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("train_on", ["assistant", pytest.param("all", marks=pytest.mark.slow)])
def test_packed_rows(folder: Path, tmp_path: Path, train_on: str, microbatches: int):
    batch = {"per_device_train_batch_size": ROWS // microbatches, "gradient_accumulation_steps": microbatches}
    only = {"assistant_only_loss": True} if train_on == "assistant" else {}
    steps = order(folder, "chats", train_on=train_on, packed=True)
    assert max(len(row) for step in steps for row in step) > 2
    expected = theirs(folder, tmp_path / "theirs", "chats", steps, packed=True, **only, **batch)
    keys = *OURS, "dataset.packed=true", f"dataset.train_on={train_on}", f"microbatches={microbatches}"
    assert_alike(ours(folder, tmp_path / "ours", "chats", *keys), expected)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_adapter(folder: Path, tmp_path: Path, packed: bool):
    steps = order(folder, "chats", packed=packed)
    given = {"adapter": "adapter", "packed": packed, "assistant_only_loss": True}
    expected = theirs(folder, tmp_path / "theirs", "chats", steps, **given)
    keys = (*OURS, *LORA, f"adapter.weights={folder / 'adapter'}", f"dataset.packed={packed}")
    assert_alike(ours(folder, tmp_path / "ours", "chats", *keys), expected)

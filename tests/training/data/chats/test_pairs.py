"""Pairs of answers in their layouts, and their tokens, which are TRL's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.data.chats.chat_tokenizers import MARKED, PHI3, QWEN2, QWEN3, R1, chat_tokenizer
from training.data.chats.conversations import Columns
from training.data.chats.pairs import COLUMNS, Pair, PairRenderer, pair_of
from training.errors import UserError

USER = {"role": "user", "content": "What is red?"}
GOOD = {"role": "assistant", "content": "A colour."}
BAD = {"role": "assistant", "content": "A colon, and é🙂"}
EXPLICIT = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}


def pair(row: dict[str, Any], columns: dict | None = None) -> Pair:
    return pair_of(row, Columns(columns, COLUMNS), "row 1")


@pytest.mark.parametrize(
    "row",
    [
        EXPLICIT,
        {"prompt": "What is red?", "chosen": "A colour.", "rejected": BAD["content"]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "What is red?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "chosen": [{"from": "human", "value": "What is red?"}, {"from": "gpt", "value": "A colour."}],
            "rejected": [{"from": "human", "value": "What is red?"}, {"from": "gpt", "value": BAD["content"]}],
        },
    ],
)
def test_layouts(row: dict[str, Any]) -> None:
    found = pair(row)
    assert (found.chosen.messages, found.rejected.messages) == ([USER, GOOD], [USER, BAD])
    assert found.chosen.prompt == found.rejected.prompt == 1
    assert found.where == "row 1"


def test_a_shared_beginning_may_have_turns_of_the_assistant() -> None:
    found = pair({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]})
    assert (found.chosen.prompt, found.rejected.messages) == (3, [USER, GOOD, USER, BAD])


def test_equal_conversations_keep_an_answer() -> None:
    assert pair({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}).chosen.prompt == 1


def test_columns_may_have_other_names_and_more_beside_them() -> None:
    row = {"question": "What is red?", "better": "A colour.", "worse": "No.", "sys": "Be brief."}
    names = {"prompt": "question", "chosen": "better", "rejected": "worse", "system": "sys"}
    found = pair(row, names)
    assert [message["role"] for message in found.rejected.messages] == ["system", "user", "assistant"]
    assert found.chosen.prompt == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "?", "chosen": "a"},
            "row 1: has the columns question, chosen; preferences need chosen and rejected, and prompt where these have"
            " no shared beginning: map yours, as in dataset.columns={chosen: COLUMN, rejected: COLUMN}",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            "row 1: its answers have no shared beginning, and there is no prompt: map dataset.columns.prompt",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "?"}, BAD]},
            "row 1: its answers are whole conversations and begin with different messages: remove the row",
        ),
        (
            {"prompt": "What is blue?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "row 1: its answers are whole conversations that begin otherwise than its prompt: leave that out with"
            " dataset.columns={prompt: null}",
        ),
        ({**EXPLICIT, "rejected": []}, "row 1: an answer without a message: remove the row"),
    ],
)
def test_rows_without_a_pair_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        pair(row)
    assert str(caught.value) == message


def test_the_advice_to_leave_a_prompt_out_works() -> None:
    row = {"prompt": "What is blue?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert pair(row, {"prompt": None}).chosen.messages == [USER, GOOD]


@pytest.mark.parametrize("template", [QWEN2, MARKED, QWEN3, PHI3, R1])
def test_tokens_are_those_of_trl(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    apply = tokenizer.pretrained.apply_chat_template
    # As DPOTrainer._prepare_dataset does it.
    prompt = apply([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    chosen, rejected = (apply([USER, answer], return_dict=True)["input_ids"] for answer in (GOOD, BAD))
    starts = [
        next((n for n, (one, other) in enumerate(zip(prompt, answer, strict=False)) if one != other), len(prompt))
        for answer in (chosen, rejected)
    ]
    (found,) = PairRenderer(tokenizer).samples([pair(EXPLICIT)])
    assert (found.chosen.tolist(), found.rejected.tolist(), found.start) == (chosen, rejected, min(starts))
    assert 0 < found.start <= len(prompt)


def test_many_pairs_are_those_of_each_alone() -> None:
    renderer = PairRenderer(chat_tokenizer())
    pairs = [pair({**EXPLICIT, "chosen": f"It is {number}."}) for number in range(1203)]
    found = list(renderer.samples(pairs))
    assert len(found) == len(pairs)
    for number in (0, 499, 500, 1202):
        (alone,) = renderer.samples(pairs[number : number + 1])
        assert (found[number].chosen.tolist(), found[number].start) == (alone.chosen.tolist(), alone.start)

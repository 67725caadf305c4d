"""The dataset of preferences: its pairs in each layout, their tokens, as TRL has them, its batches and its facts."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.data.chats.chat_tokenizers import MARKED, PHI3, QWEN2, QWEN3, R1, chat_tokenizer
from training.data.chats.conversations import Columns
from training.data.chats.preferences import COLUMNS, Pair, Preferences, pair_of, pair_samples
from training.data.chats.rendering import Renderer
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
    assert found.chosen.where == "row 1"


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
        (
            {**EXPLICIT, "prompt": []},
            "row 1: its answers have no shared beginning, and there is no prompt: map dataset.columns.prompt",
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
    (found,) = pair_samples([pair(EXPLICIT)], Renderer(tokenizer, train_on="all"))
    assert [sample.ids.tolist() for sample in found] == [chosen, rejected]
    assert [sample.trained.argmax() for sample in found] == [min(starts)] * 2
    assert 0 < min(starts) <= len(prompt)


def test_many_pairs_are_those_of_each_alone() -> None:
    renderer = Renderer(chat_tokenizer(), train_on="all")
    pairs = [pair({**EXPLICIT, "chosen": f"It is {number}."}) for number in range(1203)]
    found = list(pair_samples(pairs, renderer))
    assert len(found) == len(pairs)
    for number in (0, 333, 334, 1202):
        (alone,) = pair_samples(pairs[number : number + 1], renderer)
        for one, other in zip(found[number], alone, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            assert one.trained.tolist() == other.trained.tolist()


def test_what_a_template_leaves_out_of_an_answer_is_told(caplog) -> None:
    renderer = Renderer(chat_tokenizer(R1), train_on="all")
    reasoned = {**EXPLICIT, "rejected": [{**BAD, "reasoning_content": "Be wrong"}]}
    with caplog.at_level(logging.WARNING):
        list(pair_samples([pair(reasoned)] * 2, renderer))
    (record,) = caplog.records
    assert record.getMessage().startswith("row 1: message 2: the template leaves out all or part of its reasoning_cont")


KEYS = {"seed": 0, "seq_len": 64, "batch_size": 4}


def row(number: int, length: int = 3) -> dict[str, Any]:
    return {"prompt": f"Say {number}.", "chosen": "yes " * length + str(number), "rejected": f"no {number}"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def dataset(folder: Path, rows: list[dict[str, Any]], **keys: Any) -> Preferences:
    return Preferences(write(folder / "pairs.jsonl", rows), **KEYS | keys)


def texts(batch: dict[str, torch.Tensor]) -> list[tuple[str, str, str]]:
    """Returns of each pair the prompt and the answers, as bytes say them; | is the end of a turn."""

    def text(ids: torch.Tensor) -> str:
        return "".join("|" if number == 256 else chr(number) for number in ids.tolist())

    found = []
    for ids, labels, lengths in zip(batch["input_ids"], batch["labels"], batch["lengths"], strict=True):
        answers = [text(row[row >= 0]) for row in labels]
        trained = int((labels[0] >= 0).sum())
        assert (ids[0, lengths[0] :] == 0).all()
        assert (labels[0, lengths[0] :] == -100).all()
        found.append((text(ids[0, : lengths[0] + 1 - trained]), *answers))
    return found


def test_labels_are_the_answers_alone(tmp_path: Path) -> None:
    batch = dataset(tmp_path, [row(7)], batch_size=1).batch(0)
    assert texts(batch) == [("user\nSay 7.|assistant\n", "yes yes yes 7|", "no 7|")]
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 2, int(batch["lengths"].max()))
    assert batch["index"].tolist() == [0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_held_out_pairs_are_drawn_and_never_trained_on(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(number) for number in range(40)], eval_share=0.25)
    held = torch.cat([batch["index"] for batch in pairs.eval_batches(8)]).tolist()
    trained = torch.cat([pairs.batch(index)["index"] for index in range(8)]).tolist()
    assert (len(held), pairs.num_blocks) == (10, 30)
    assert not set(held) & set(trained)
    assert sorted(held) != list(range(30, 40))
    assert len(pairs.eval_batches(1)) == 1
    every = torch.cat([batch["index"] for batch in pairs.every_sample(7)]).tolist()
    assert sorted(every) == list(range(40))
    assert dataset(tmp_path, [row(number) for number in range(40)]).eval_batches(2) == []


def test_pairs_that_teach_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    same = {"prompt": "Why?", "chosen": "because", "rejected": "because"}
    pairs = dataset(tmp_path, [row(1), same, row(2), row(3, 40)])
    assert pairs.num_samples == 2
    facts = pairs.facts()
    assert facts["left out"] == "1 have equal answers, 1 are longer than seq_len + 1 = 65 tokens"
    assert facts["pairs to train on"] == "2; 0 to evaluate on"
    # Before an answer there are 22 tokens.
    assert facts["tokens"] == f"{2 * (22 + 14 + 22 + 5)}, of which 38 (30%) are trained on"
    assert facts["longest pair"] == f"36 tokens ({tmp_path / 'pairs.jsonl'} line 1)"


def test_pairs_that_are_too_long_are_cut(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(1), row(3, 40)], too_long="truncate", batch_size=2)
    assert pairs.facts()["left out"] == "1 are cut, longer than seq_len + 1 = 65 tokens"
    batch = pairs.batch(0)
    assert batch["input_ids"].shape == (2, 2, 64)
    assert sorted(len(chosen) for _, chosen, _ in texts(batch)) == [14, 65 - 22]
    # Nothing is left of an answer whose prompt alone is too long.
    cut = dataset(tmp_path, [row(1), {**row(2), "prompt": "x" * 99}], too_long="truncate")
    assert cut.facts()["left out"] == "1 have nothing to train on"
    # Answers that differ only in what is cut.
    alike = {"prompt": "?", "chosen": "a" * 99, "rejected": "a" * 98}
    assert dataset(tmp_path, [row(1), alike], too_long="truncate").facts()["left out"] == "1 have equal answers"


def test_pairs_are_shown_with_what_is_trained_on(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(1), row(2), row(3)])
    found = list(pairs.shown(2))
    assert [place.rpartition(" ")[2] for place, _ in found] == ["chosen", "rejected"] * 2
    place, sample = found[1]
    assert place == f"{tmp_path / 'pairs.jsonl'} line 1 rejected"
    assert pairs.text_of(sample.ids[sample.trained]) == "no 1<|endoftext|>"
    assert pairs.text_of(sample.ids[~sample.trained]) == "user\nSay 1.<|endoftext|>assistant\n"


def test_shapes_of_a_plan_are_those_of_the_longest_batch(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(1), row(3, 40)], too_long="truncate", batch_size=2)
    planned = Preferences.meta_tokens(2, 64, files="x", columns=None)
    real = pairs.batch(0)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in planned.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in real.items()
    }
    assert all(tensor.is_meta for tensor in planned.values())

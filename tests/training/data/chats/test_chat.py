"""The dataset of chats: what it reads, drops and holds out, and what it tells of that."""

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.training.data.chats.chat_tokenizers import MARKED, save
from training.data.chats.chat import Chats
from training.errors import UserError


def row(number: int) -> dict:
    answer = f"It is {number}. " * (1 + number % 4)
    return {"messages": [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def files(write) -> str:
    return write("chats.jsonl", "\n".join(json.dumps(row(number)) for number in range(40)))


def chats(files: str | None, **keys) -> Chats:
    return Chats(files, **{"seed": 1, "seq_len": 128, "batch_size": 4, **keys})


def test_answers_and_their_ends_are_trained_on(files: str) -> None:
    dataset = chats(files)
    batch = dataset.batch(0)

    assert dataset.vocab_size == 257
    assert dataset.num_blocks == 40
    for labels, length in zip(batch["labels"], batch["lengths"].tolist(), strict=True):
        trained = labels[labels >= 0].tolist()
        assert trained[-1] == 256
        assert bytes(trained[:-1]).startswith(b"It is ")
        assert labels[length - 1] == 256
        assert labels[length:].eq(-100).all()


def test_a_column_that_no_row_has_is_refused(files: str, write) -> None:
    with pytest.raises(UserError, match=r"^dataset\.columns\.system=sysprompt: no row has this column: name one"):
        chats(files, columns={"system": "sysprompt"})
    other = write("other.jsonl", json.dumps(row(40) | {"sysprompt": "Count."}))
    assert chats([files, other], columns={"system": "sysprompt", "tools": None}).num_blocks == 41


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_held_out_is_not_trained_on(files: str, packed: bool) -> None:
    assert chats(files, packed=packed).eval_batches(8) == []
    dataset = chats(files, packed=packed, eval_share=0.25, batch_size=1)

    held_out = dataset.eval_batches(100)
    training = [dataset.batch(index) for index in range(dataset.num_blocks)]

    def inputs(batches) -> set[tuple[int, ...]]:
        found = set()
        for batch in batches:
            segments = batch.get("segments", torch.zeros_like(batch["input_ids"]))
            for tokens, numbers in zip(batch["input_ids"], segments, strict=True):
                found |= {tuple(tokens[numbers == n].tolist()) for n in numbers.unique().tolist() if n >= 0}
        return found

    assert len(inputs(held_out)) == 10
    assert len(inputs(training)) == 30
    assert not inputs(held_out) & inputs(training)
    assert all(
        torch.equal(one[name], other[name])
        for one, other in zip(held_out, dataset.eval_batches(100), strict=True)
        for name in one
    )


def test_files_to_evaluate_on(files: str, write) -> None:
    others = write("eval.json", json.dumps([row(number) for number in range(100, 103)]))
    dataset = chats(files, eval_files=others, eval_share=0.25)

    assert dataset.num_blocks == 40
    (batch,) = dataset.eval_batches(8)
    assert len(batch["labels"]) == 3
    assert dataset.facts()["chats to train on"] == "40; 3 to evaluate on"
    long = write("long.jsonl", json.dumps({"prompt": "?", "completion": "x" * 200}))
    with pytest.raises(UserError, match=r"^dataset.eval_files: nothing is left of 1 chats: 1 are longer than seq_len"):
        chats(files, eval_files=long)
    with pytest.raises(UserError, match=r"^dataset.eval_files: .*long.jsonl is one of dataset.files, and so"):
        chats([files, long], eval_files=[others, long])


def test_facts(files: str, write) -> None:
    facts = chats(files, seq_len=60, eval_share=0.1).facts()

    assert list(facts) == ["chats to train on", "tokens", "longest chat", "rows", "left out"]
    assert facts["chats to train on"].endswith("; 4 to evaluate on")
    assert 40 < int(facts["longest chat"].split()[0]) <= 61
    assert f"({files} line " in facts["longest chat"]
    assert "of a chat each" in facts["rows"]
    assert facts["left out"].endswith("are longer than seq_len + 1 = 61 tokens")
    assert "packed, " in chats(files, packed=True).facts()["rows"]
    assert "left out" not in chats(files).facts()
    # user, ab, its end, assistant | cd, its end.
    short = chats(write("a.jsonl", json.dumps({"prompt": "ab", "completion": "cd"}))).facts()
    assert short["tokens"] == "21, of which 3 (14%) are trained on"
    more = row(1) | {"weight": 0.5, "system": "Count.", "label": True, "id": 7}
    assert chats(write("b.jsonl", json.dumps(more))).facts()["columns not read"] == "weight, id"


def test_batches_are_named(files: str) -> None:
    dataset = chats(files, batch_size=2)
    batch = dataset.batch(0)

    first, second = dataset.names(0).split(", ")
    lines = [int(name.rpartition(" ")[2]) for name in (first, second)]
    assert first == f"{files} line {lines[0]}"
    for line, tokens in zip(lines, batch["input_ids"], strict=True):
        assert f"What is {line - 1}?".encode() in bytes(token % 256 for token in tokens.tolist())
    assert chats(files, batch_size=12).names(0).endswith(" and 4 more")


def test_the_digest_tells_other_data_and_other_masks(files: str, write) -> None:
    digests = {
        chats(files).data_sha256,
        chats(files, train_on="all").data_sha256,
        chats(files, too_long="truncate", seq_len=60).data_sha256,
        chats(write("b.jsonl", json.dumps(row(1)))).data_sha256,
    }

    assert len(digests) == 4
    assert chats(files).data_sha256 == chats(files, packed=True, batch_size=2).data_sha256


def test_a_tokenizer_with_its_template(files: str, tmp_path: Path) -> None:
    dataset = chats(files, tokenizer=save(tmp_path / "model", MARKED))
    place, sample = next(dataset.shown(1))

    assert place == f"{files} line 1"
    begin = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWhat is 0?"
    assert dataset.text_of(sample.ids).startswith(begin)
    assert dataset.text_of(sample.ids[sample.trained]) == "It is 0. <|im_end|>\n"


def test_a_local_folder_of_the_hubs_layout(write) -> None:
    folder = Path(write("chats/train.jsonl", "\n".join(json.dumps(row(number)) for number in range(4)))).parent

    dataset = chats(None, name=str(folder))

    assert dataset.num_blocks == 4
    assert dataset.names(0).startswith(f"dataset.name={folder} row ")


def test_a_model_that_would_not_learn_to_stop_is_told_of(files: str, write, caplog) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with caplog.at_level(logging.WARNING):
        chats(files)
        assert not caplog.records
        chats(files, template=write("a.jinja", template), train_on="all")

    assert "ends a text ('<|endoftext|>'): the model will not learn to stop" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seq_len": 8}, r"nothing is left to train on of 40 chats: 40 are longer than seq_len \+ 1 = 9 tokens: give"),
        ({"seq_len": 8, "too_long": "truncate"}, "of 40 chats: 40 have nothing to train on: give more chats"),
        ({"seq_len": 60, "too_long": "refuse"}, r"chats.jsonl line \d+: \d+ tokens are more than seq_len \+ 1 = 61"),
        ({"eval_share": 0.7}, r"dataset.eval_share=0.7: must be at least 0 and at most 0.5"),
    ],
)
def test_refusals(files: str, keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        chats(files, **keys)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_the_longest_batch_of_a_plan(files: str, packed: bool) -> None:
    planned = Chats.meta_tokens(2, 16, packed=packed, files="a.jsonl")
    real = chats(files, seq_len=16, batch_size=2, packed=packed, too_long="truncate", train_on="all").batch(0)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in planned.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in real.items()
    }
    assert all(tensor.is_meta for tensor in planned.values())

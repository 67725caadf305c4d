"""The dataset of preferences: its batches, what it leaves out and says about that, and what is held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.data.chats.chat_tokenizers import save
from training.data.chats.preferences import Preferences
from training.errors import UserError

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


def test_each_epoch_has_every_pair_once_in_batches_of_like_length(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(number, 1 + number % 10) for number in range(200)], batch_size=5, seq_len=99)
    assert pairs.num_blocks == pairs.num_samples == 200
    epochs = [[pairs.batch(40 * epoch + index) for index in range(40)] for epoch in (0, 1)]
    orders = [torch.cat([batch["index"] for batch in batches]).tolist() for batches in epochs]
    assert orders[0] != orders[1]
    assert [sorted(order) for order in orders] == [list(range(200))] * 2
    padding = [1 - batch["lengths"].sum(0)[0].item() / batch["input_ids"][:, 0].numel() for batch in epochs[0]]
    assert sum(padding) / 40 < 0.03
    longest = [batch["input_ids"].shape[2] for batch in epochs[0]]
    assert longest != sorted(longest)
    # A pure function of its argument, over the end of an epoch too.
    again = dataset(tmp_path, [row(number, 1 + number % 10) for number in range(200)], batch_size=7, seq_len=99)
    late = again.batch(28)
    assert torch.equal(late["index"], again.batch(28)["index"])
    assert len(late["index"]) == 7


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


def test_files_to_evaluate_on(tmp_path: Path) -> None:
    others = write(tmp_path / "eval.jsonl", [row(90), row(91)])
    pairs = dataset(tmp_path, [row(number) for number in range(4)], eval_files=others, eval_share=0.5)
    (batch,) = pairs.eval_batches(3)
    assert sorted(answer for _, answer, _ in texts(batch)) == ["yes yes yes 90|", "yes yes yes 91|"]
    assert sorted(batch["index"].tolist()) == [4, 5]
    assert (pairs.num_blocks, pairs.num_samples) == (4, 6)


def test_pairs_that_teach_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    same = {"prompt": "Why?", "chosen": "because", "rejected": "because"}
    pairs = dataset(tmp_path, [row(1), same, row(2), row(3, 40)])
    assert pairs.num_samples == 2
    facts = pairs.facts()
    assert facts["left out"] == "1 are too long, 1 have equal answers"
    assert facts["pairs to train on"] == "2; 0 to evaluate on"
    # Before an answer there are 22 tokens.
    assert facts["tokens"] == f"{2 * (22 + 14 + 22 + 5)}, of which 38 (30%) are answers"
    assert facts["longest answer"] == f"36 tokens, with its prompt ({tmp_path / 'pairs.jsonl'} line 1)"


def test_pairs_that_are_too_long_are_cut(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(1), row(3, 40)], too_long="truncate", batch_size=2)
    assert pairs.facts()["left out"] == "1 are cut, too long"
    batch = pairs.batch(0)
    assert batch["input_ids"].shape == (2, 2, 64)
    assert sorted(len(chosen) for _, chosen, _ in texts(batch)) == [14, 65 - 22]
    # Nothing is left of an answer whose prompt alone is too long.
    cut = dataset(tmp_path, [row(1), {**row(2), "prompt": "x" * 99}], too_long="truncate")
    assert cut.facts()["left out"] == "1 have an answer without tokens"
    # Answers that differ only in what is cut.
    alike = {"prompt": "?", "chosen": "a" * 99, "rejected": "a" * 98}
    assert dataset(tmp_path, [row(1), alike], too_long="truncate").facts()["left out"] == "1 have equal answers"


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (
            [row(1), row(2, 40)],
            {"too_long": "refuse"},
            "line 2: 184 tokens are more than seq_len + 1 = 65: give a larger seq_len, or dataset.too_long=drop or"
            " truncate",
        ),
        (
            [row(2, 40)],
            {},
            "dataset: no pair is left to train on: 1 are too long: give more pairs, a larger seq_len, or"
            " dataset.too_long=truncate",
        ),
        ([], {}, "dataset: no pair is left to train on: give more pairs"),
        ([row(1)], {"eval_share": 0.6}, "dataset.eval_share=0.6: must be at least 0 and at most 0.5"),
        ([row(1)], {"too_long": "cut"}, "dataset.too_long=cut: must be drop, truncate or refuse"),
        (
            [row(1)],
            {"name": "a/b"},
            "are both given: give dataset.files=PATH, or dataset.name=OWNER/NAME of the Hub",
        ),
        ([row(1)], {"columns": {"best": "a"}}, "dataset.columns.best=a: unknown: it may map "),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, rows: list, keys: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        dataset(tmp_path, rows, **keys)
    assert message in str(caught.value)


def test_names_tell_file_and_row(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(1)], batch_size=1)
    assert pairs.names(0) == f"{tmp_path / 'pairs.jsonl'} line 1"
    assert dataset(tmp_path, [row(1), row(2), row(3)], batch_size=9).names(0).endswith(" and 1 more")


def test_the_digest_tells_other_pairs_and_another_split(tmp_path: Path) -> None:
    rows = [row(number) for number in range(8)]
    first = dataset(tmp_path, rows).data_sha256
    assert dataset(tmp_path, rows).data_sha256 == first
    assert dataset(tmp_path, [*rows[:7], row(9)]).data_sha256 != first
    assert dataset(tmp_path, rows, eval_share=0.5).data_sha256 != first
    assert (
        dataset(
            tmp_path, [{**each, "chosen": each["rejected"], "rejected": each["chosen"]} for each in rows]
        ).data_sha256
        != first
    )


def test_a_tokenizer_with_a_template(tmp_path: Path) -> None:
    pairs = dataset(tmp_path, [row(1)], tokenizer=save(tmp_path / "model"), batch_size=1, seq_len=200)
    assert pairs.vocab_size > 300
    assert (pairs.batch(0)["labels"] >= 0).sum(-1).min() >= 3


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

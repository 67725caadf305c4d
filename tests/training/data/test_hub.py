"""Text streamed from a repository with the layout of the Hugging Face Hub, and from a stand-in for the Hub."""

import socket
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from tests.training.helpers.elsewhere import run_elsewhere
from tests.training.helpers.hub_server import hub_server
from training.data.datasets import HubText
from training.errors import UserError

SIZES = {"seed": 0, "seq_len": 8, "batch_size": 2}


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """A folder with the layout of a dataset on the Hub: four shards of ten rows."""
    folder = tmp_path / "repository" / "data"
    folder.mkdir(parents=True)
    for shard in range(4):
        rows = [f'{{"n": 1, "text": "shard {shard} row {row}"}}\n' for row in range(10)]
        (folder / f"train-{shard}.jsonl").write_text("".join(rows))
    return str(folder.parent)


def tokens_of(dataset: HubText, num_batches: int) -> list[int]:
    """Returns the stream that the first batches come from; tokens that batches share count once."""
    batches = [dataset.batch(index) for index in range(num_batches)]
    return [int(batches[0][0, 0]), *torch.cat(batches)[:, 1:].flatten().tolist()]


def documents_of(tokens: list[int]) -> list[bytes]:
    return bytes(min(token, 255) for token in tokens).split(b"\xff")


def test_earlier_calls_do_not_change_a_batch(repository: str) -> None:
    sequential = HubText(repository, **SIZES, shuffle_buffer=10)
    expected = [sequential.batch(index) for index in range(60)]
    assert expected[0].shape == (2, 9)
    assert expected[0].dtype == torch.int64
    jumping = HubText(repository, **SIZES, shuffle_buffer=10)
    for index in (7, 8, 50, 3, 3, 59, 0):
        assert torch.equal(jumping.batch(index), expected[index])


def test_batches_follow_one_another_without_a_gap(repository: str) -> None:
    dataset = HubText(repository, **SIZES)
    rows = torch.cat([dataset.batch(index) for index in range(5)])
    assert torch.equal(rows[1:, 0], rows[:-1, -1])


def test_an_epoch_holds_every_row_once_and_the_next_is_in_another_order(repository: str) -> None:
    documents = documents_of(tokens_of(HubText(repository, **SIZES, shuffle_buffer=10), 100))
    first, second = documents[:40], documents[40:80]
    expected = sorted(b"shard %d row %d" % (shard, row) for shard in range(4) for row in range(10))
    assert sorted(first) == sorted(second) == expected
    assert first != second
    assert first != expected
    other_seed = HubText(repository, **(SIZES | {"seed": 1}), shuffle_buffer=10)
    assert documents_of(tokens_of(other_seed, 100))[:40] != first


def test_max_tokens_cuts_the_epoch(repository: str) -> None:
    tokens = tokens_of(HubText(repository, **SIZES, max_tokens=20), 20)
    # A row is 13 characters and a separator, so a cut epoch is one row and the start of another.
    epochs = [documents_of(tokens[start : start + 20]) for start in range(0, 300, 20)]
    assert all(len(documents) == 2 and documents[1].startswith(b"shard") for documents in epochs)
    assert len({documents[0] for documents in epochs}) > 1


def test_held_out_documents_are_in_no_epoch_whatever_its_order(repository: str) -> None:
    options = {**SIZES, "eval_share": 0.3, "shuffle_buffer": 10}
    evaluated = HubText(repository, **options).eval_batches(100)
    dataset = HubText(repository, **(options | {"seed": 5}))
    assert all(map(torch.equal, evaluated, dataset.eval_batches(100)))
    rows = torch.cat(evaluated)
    held_out = documents_of([int(rows[0, 0]), *rows[:, 1:].flatten().tolist()])[:-1]
    assert 5 < len(held_out) < 20
    kept = 40 - len(held_out) - 1
    for seed in (0, 5):
        documents = documents_of(tokens_of(HubText(repository, **(options | {"seed": seed})), 90))
        assert not set(documents[:-1]) & set(held_out)
        assert len(set(documents[:-1])) in (kept, kept + 1)
    assert [len(batch) for batch in dataset.eval_batches(2)] == [2, 2]


def test_a_split_of_its_own_is_evaluated_on_and_all_else_is_trained_on(repository: str) -> None:
    Path(repository, "data", "validation-0.jsonl").write_text('{"n": 1, "text": "other text for evaluation"}\n' * 2)
    dataset = HubText(repository, **SIZES, eval_split="validation", eval_share=0.5)
    assert bytes(torch.cat(dataset.eval_batches(1))[:, 1:].flatten().tolist()) == b"ther text for ev"
    assert torch.equal(dataset.batch(3), HubText(repository, **SIZES).batch(3))
    with pytest.raises(UserError, match=r"dataset\.eval_split=dev: Bad split: dev"):
        HubText(repository, **SIZES, eval_split="dev").eval_batches(1)


def test_an_unknown_split_configuration_or_column_is_refused(repository: str) -> None:
    cases = {
        r"dataset\.name=.* dataset\.split=trian: Bad split: trian": {"split": "trian"},
        r"dataset\.name=.* dataset\.config_name=en .*BuilderConfig 'en' not found": {"config_name": "en"},
        r"dataset\.text_column=body: no such column in .*; it has n, text": {"text_column": "body"},
        r"dataset\.text_column=n: contains int, not text": {"text_column": "n"},
    }
    for message, options in cases.items():
        with pytest.raises(UserError, match=f"^{message}") as refusal:
            HubText(repository, **SIZES, **options).batch(0)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match=r"^dataset\.name is empty"):
        HubText("", **SIZES)


def test_a_repository_without_any_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(
        UserError, match=r"dataset\.text_column=text contains no text; choose another column or dataset$"
    ):
        HubText(str(tmp_path), **SIZES).batch(0)


def test_a_later_read_error_is_one_line(repository: str) -> None:
    dataset = HubText(repository, **SIZES)
    for shard in Path(repository, "data").iterdir():
        shard.unlink()
    with pytest.raises(UserError, match=r"^dataset\.name=.*: reading failed \(.*\); check the network and start again"):
        dataset.batch(0)


def test_no_network_is_one_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # The import takes seconds by itself.
    import datasets  # noqa: F401

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        started = time.monotonic()
        with pytest.raises(
            UserError, match=r"the Hugging Face Hub did not answer \(.*\); check the network, or train on"
        ):
            HubText("owner/name", **SIZES)
        assert time.monotonic() - started < 60
        # Connections are accepted but get no answer, as behind a firewall.
        silent.listen(8)
        monkeypatch.setattr("training.data.hub_client.TIMEOUT_S", 0.5)
        started = time.monotonic()
        with pytest.raises(UserError, match=r"the Hugging Face Hub did not answer \(timed out\)"):
            HubText("owner/name", **SIZES)
        assert time.monotonic() - started < 60


FROM_THE_HUB = """
import torch
from training.data.datasets import HubText
from training.errors import UserError

sizes = {"seed": 0, "seq_len": 32, "batch_size": 2, "cache_dir": "run"}
dataset = HubText("me/tiny", **sizes)
batches = [dataset.batch(index) for index in range(20)]
assert torch.equal(HubText("me/tiny", **sizes).batch(13), batches[13])
text = bytes(torch.cat(batches)[:, 1:].flatten().clamp(max=255).tolist())
assert b"of shard 0\\xffrow " in text and b"of shard 1\\xffrow " in text, text[:500]
for name in ("me/typo", "not a name", "too/many/parts"):
    try:
        HubText(name, **sizes)
    except UserError as error:
        assert str(error).startswith(f"dataset.name={name}: no such dataset on the Hub; check the spelling"), error
    else:
        raise AssertionError(name)
"""


@pytest.mark.slow
def test_reading_from_the_hub_writes_into_the_given_folder_only(tmp_path: Path) -> None:
    with hub_server() as address:
        run_elsewhere(FROM_THE_HUB, tmp_path, HF_ENDPOINT=address)
    written = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {("here", "run")}

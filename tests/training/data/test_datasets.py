"""The datasets of the `dataset` group: their tokens, and batches that depend on seed and index alone."""

import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, models

from tests.training.helpers.elsewhere import run_elsewhere
from tests.training.helpers.hub_server import hub_server
from tests.training.helpers.in_process import composed
from tests.training.helpers.pretrained_folder import small_tokenizer
from training.data import long_documents
from training.data.datasets import HubText, StdlibText, SyntheticTokens, TextFiles, build_dataset, facts_of, has_facts
from training.data.tokenizer import load_tokenizer
from training.errors import UserError

SIZES = {"seed": 0, "seq_len": 8, "batch_size": 2}


def test_stdlib_is_python_source() -> None:
    dataset = StdlibText(seed=0, seq_len=512, batch_size=4)
    text = bytes(dataset._tokens[dataset._tokens != 256].astype(np.uint8)).decode()
    assert "import " in text
    assert dataset.vocab_size == 257
    assert dataset.num_blocks * 512 > 5_000_000
    assert StdlibText(**SIZES, max_tokens=801).num_blocks == 100


def test_text_files_are_bytes_with_an_end_after_each_document(write) -> None:
    files = [write("a.txt", "first é"), write("b.jsonl", '{"text": "second"}')]
    assert TextFiles(files, **SIZES)._tokens.tolist() == [*"first é".encode(), 256, *b"second", 256]


def test_other_files_are_held_out_in_place_of_a_share(write) -> None:
    files, others = write("a.txt", "abcdefghi"), write("b.txt", "vwxyz")
    sizes = {"seed": 0, "seq_len": 2, "batch_size": 8, "eval_share": 0.5}
    dataset = TextFiles(files, eval_files=others, **sizes)

    assert dataset.num_blocks == 4
    (batch,) = dataset.eval_batches(1)
    assert batch.tolist() == [list(b"vwx"), list(b"xyz")]
    with pytest.raises(UserError, match=r"^dataset.eval_files=none.txt: no such file"):
        TextFiles(files, eval_files="none.txt", **sizes)
    both = f"{Path(files).parent}/*.txt"
    with pytest.raises(UserError, match=rf"^dataset.eval_files: {others} is one of dataset.files, and so trained on"):
        TextFiles(both, eval_files=others, **sizes)


def test_max_tokens_stops_reading(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_documents, "CHARACTERS_PER_CALL", 60)
    files = [write("good.txt", "x" * 100), write("bad.jsonl", "never read")]
    assert TextFiles(files, **SIZES, max_tokens=50).num_blocks == 6


def test_synthetic_batches_are_new_random_tokens() -> None:
    dataset = SyntheticTokens(vocab_size=50, seed=0, seq_len=99, batch_size=100)
    first, second = dataset.batch(0), dataset.batch(1)
    assert first.shape == (100, 100)
    assert first.dtype == torch.int64
    counts = torch.bincount(torch.cat([first, second]).flatten(), minlength=50)
    assert len(counts) == 50
    assert (counts - 400).abs().max() < 5 * 20  # five standard deviations of a uniform draw
    assert not torch.equal(first, second)
    assert torch.equal(first, dataset.batch(0))
    evaluated = dataset.eval_batches(2)
    assert len({batch.numpy().tobytes() for batch in (first, second, *evaluated)}) == 4
    assert torch.equal(torch.stack(dataset.eval_batches(2)), torch.stack(evaluated))
    with pytest.raises(UserError, match=r"dataset\.vocab_size=0: must be at least 1"):
        SyntheticTokens(vocab_size=0, **SIZES)


DIGESTS = """
import hashlib, sys
import torch
from tests.training.helpers.pretrained_folder import small_tokenizer
from training.data.datasets import StdlibText, SyntheticTokens, TextFiles
from training.data.tokenizer import load_tokenizer

def digests(corpus, tokenizer, order):
    sizes = {"seed": 3, "seq_len": 16, "batch_size": 4}
    datasets = [
        StdlibText(**sizes, max_tokens=100_000),
        TextFiles(corpus, **sizes),
        TextFiles(corpus, **sizes, tokenizer=tokenizer),
        SyntheticTokens(vocab_size=1000, **sizes),
    ]
    found = {(i, j): datasets[i].batch(j).numpy().tobytes() for i in range(4) for j in order}
    return [hashlib.sha256(found[key]).hexdigest() for key in sorted(found)]
"""


@pytest.fixture
def corpus(write, tmp_path: Path) -> tuple[str, str]:
    """Returns a pattern for some text files, and a tokenizer file that is slow enough to use its threads."""
    for number in range(20):
        write(f"texts/{number}.txt", "".join(f"number {number * line}\n" for line in range(50)))
    tokenizer = Tokenizer(models.BPE({chr(code): code for code in range(128)} | {"nu": 128, "</s>": 129}, [("n", "u")]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "texts" / "*.txt"), str(tmp_path / "tokenizer.json")


@pytest.mark.slow
def test_batches_are_the_same_in_another_process_and_nothing_is_left_behind(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    scope: dict = {}
    exec(DIGESTS, scope)
    expected = scope["digests"](*corpus, range(5))

    call = f"print(digests(*{corpus!r}, [4, 2, 0, 3, 1]))"
    one_thread = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    printed = run_elsewhere(DIGESTS + call, tmp_path / "other", PYTHONHASHSEED="12345", LC_ALL="C", **one_thread)
    assert printed.strip() == str(expected)
    assert sorted(path.name for path in (tmp_path / "other").rglob("*")) == ["here", "home", "tmp"]


def test_keys_say_what_stands_around_documents(tmp_path: Path):
    small_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": "the dog"}\n' * 2)

    def tokens(**keys: str | None) -> list[int]:
        made = TextFiles(
            str(tmp_path / "a.jsonl"), seed=0, seq_len=2, batch_size=1, tokenizer=str(tmp_path), eval_share=0.0, **keys
        )
        return made._tokens.tolist()

    cat, dog = (list(map(int, ids)) for ids in load_tokenizer(tmp_path).encode_batch(["the cat", "the dog"]))
    assert tokens() == [1, *cat, 2, 1, *dog, 2] * 2
    assert tokens(begin=None, end="<end>") == [*cat, 0, *dog, 0] * 2


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
    with pytest.raises(UserError, match=r"^dataset\.eval_split=validation: is trained on, as dataset\.split=train\+"):
        HubText(repository, **SIZES, split="train+validation", eval_split="validation")


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

"""The datasets of the `dataset` group: their tokens, and batches that depend on seed and index alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from tests.training.helpers.elsewhere import run_elsewhere
from tests.training.helpers.pretrained_folder import small_tokenizer
from training.data import packing
from training.data.datasets import StdlibText, SyntheticTokens, TextFiles
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


def test_max_tokens_stops_reading(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHARACTERS_PER_CALL", 60)
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

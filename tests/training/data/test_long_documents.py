"""Documents in pieces have the tokens that the libraries make of the whole text."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from training.data import long_documents
from training.data.library_tokenizer import LibraryTokenizer
from training.data.local_files import stdlib_files
from training.data.long_documents import MARGIN, encoded, windows
from training.data.tokenizer import ByteTokenizer
from training.errors import UserError

SPECIAL = {"special_tokens": ["<unk>", "</s>"], "show_progress": False}


@pytest.fixture(scope="module")
def text() -> str:
    files = [file for file in stdlib_files() if file.name in ("argparse.py", "typing.py", "tarfile.py")]
    return "".join(file.read_text() for file in files) + "\u4e2d\u6587\U0001f600 " * 500


def byte_level(text: str) -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, **SPECIAL))
    return made


def sentence_piece(text: str) -> Tokenizer:
    """As Llama 2's and Gemma's: the whole text is one word, with a space put before it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trainer = trainers.BpeTrainer(vocab_size=900, max_token_length=16, **SPECIAL)
    made.train_from_iterator(text.splitlines(), trainer)
    return made


def unigram(text: str) -> Tokenizer:
    """As T5's."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator([text], trainers.UnigramTrainer(vocab_size=900, unk_token="<unk>", **SPECIAL))
    return made


def word_piece(text: str) -> Tokenizer:
    """As BERT's."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator([text], trainers.WordPieceTrainer(vocab_size=900, **SPECIAL))
    return made


def cut(text: str, size: int) -> list[tuple[str, bool]]:
    return [(text[start : start + size], start + size >= len(text)) for start in range(0, len(text), size)]


def joined(pieces: list[tuple[str, bool]], tokenizer: LibraryTokenizer | ByteTokenizer) -> list[list[int]]:
    """The ids of each document."""
    documents, begins = [], True
    for ids, begins_next in encoded(pieces, tokenizer):
        documents = [*documents, []] if begins else documents
        documents[-1] += ids.tolist()
        begins = begins_next
    return documents


@pytest.mark.parametrize("make", [byte_level, sentence_piece, unigram, word_piece])
def test_pieces_have_the_tokens_of_the_whole(make: Callable[[str], Tokenizer], text: str, monkeypatch) -> None:
    monkeypatch.setattr(long_documents, "CHARACTERS_PER_CALL", 20_000)
    made = make(text[:60_000])
    tokenizer, numbers = LibraryTokenizer("given", made, "</s>"), random.Random(0)
    differ = 0
    for repeated in ("", "", "-" * 7001, "ab" * 4000, "\n" * 9000):
        start = numbers.randrange(len(text) - 40_000)
        document = text[start : start + 30_000] + repeated + text[start + 30_000 : start + 40_000]
        documents = [document, "short", text[-9000:]]
        pieces = [piece for each in documents for piece in cut(each, MARGIN + numbers.randrange(1500))]
        expected = [made.encode(each, add_special_tokens=False).ids for each in documents]
        assert joined(pieces, tokenizer) == expected
        alone = [ids for piece, _ in pieces for ids in made.encode(piece, add_special_tokens=False).ids]
        differ += alone != [ids for each in expected for ids in each]
    assert differ >= 3, "the pieces alone have the same tokens"


def test_a_document_that_does_not_end_is_given_out(text: str) -> None:
    made = byte_level(text[:9000])
    pieces = [(piece, False) for piece, _ in cut(text[:9000], 4000)]
    expected = made.encode(text[:9000], add_special_tokens=False).ids
    assert joined(pieces, LibraryTokenizer("given", made, "</s>")) == [expected]


def test_what_cannot_be_cut_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_documents, "LONGEST", 30_000)
    tokenizer = LibraryTokenizer("given", sentence_piece(text[:9000]), "</s>")
    monkeypatch.setattr(long_documents, "COMMON", 10_000)
    joined(cut("-" * 29_000, 4000), tokenizer)
    with pytest.raises(UserError, match=r"^dataset: a document has 3\d+ characters .*: shorten it where it repeats '-"):
        joined(cut("-" * 40_000, 4000), tokenizer)


def test_long_repetitions_are_cut_where_words_are(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in files of numbers: they have few kinds of tokens."""
    monkeypatch.setattr(long_documents, "LONGEST", 10_000)
    made, document = byte_level(text[:9000]), "0, 1,\n" * 9000
    expected = made.encode(document, add_special_tokens=False).ids
    assert joined(cut(document, 4001), LibraryTokenizer("given", made, "</s>")) == [expected]


def test_bytes_need_no_margins() -> None:
    assert joined(cut("a\u4e2db" * 50, 7), ByteTokenizer()) == [list(("a\u4e2db" * 50).encode())]


@pytest.mark.parametrize("margin", [0, 2, 9])
def test_windows_overlap(margin: int) -> None:
    texts = ["0123456789", "abc", "ABCDEFGHIJK"]
    found = list(windows([piece for each in texts for piece in cut(each, 4)], margin))
    documents = [each for each in texts for _ in cut(each, 4)]
    pieces = [piece for each in texts for piece, _ in cut(each, 4)]
    assert [window.document_begins for window in found] == [
        each.startswith(piece) for each, piece in zip(documents, pieces, strict=True)
    ]
    assert [window.document_ends for window in found] == [
        each.endswith(piece) for each, piece in zip(documents, pieces, strict=True)
    ]
    for window, document, piece in zip(found, documents, pieces, strict=True):
        place = document.index(piece)
        begin, end = max(place - margin, 0), min(place + len(piece) + min(margin, 4), len(document))
        assert (window.text, window.start) == (document[begin:end], begin)

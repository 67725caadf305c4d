"""Ids of bytes, and of tokenizer files as the `tokenizers` library encodes them."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.errors import UserError


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A small byte-level BPE whose post-processor would add a start token to every text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    bpe.train_from_iterator(["the cat and the dog and the cat"] * 3, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    return bpe


def test_bytes_are_the_ids() -> None:
    ids = ByteTokenizer().encode_batch(["aé", "", "z"])
    assert [list(text) for text in ids] == [[97, 0xC3, 0xA9], [], [122]]
    assert (ByteTokenizer.vocab_size, ByteTokenizer.end_of_text_id) == (257, 256)


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert list(ByteTokenizer().encode_batch(["a\ud800"])[0]) == [97, ord("?")]


def test_without_a_path_ids_are_bytes() -> None:
    assert isinstance(load_tokenizer(None), ByteTokenizer)


def test_a_file_encodes_as_the_library_does_without_special_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    texts = ["the cat", "a dog\n"]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [list(ids) for ids in loaded.encode_batch(texts)] == expected
    assert loaded.end_of_text_id == tokenizer.token_to_id("</s>")
    assert loaded.vocab_size == tokenizer.get_vocab_size()


def test_truncation_and_padding_of_the_file_are_off(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    short, long = load_tokenizer(tmp_path / "tokenizer.json").encode_batch(["x", "xyzxyzxyzxyz"])
    assert (len(short), len(long)) == (1, 12)


def test_vocab_size_covers_ids_with_gaps(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "</s>": 9}, unk_token="a")).save(str(tmp_path / "t.json"))
    assert load_tokenizer(tmp_path / "t.json").vocab_size == 10


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=absent\.json: no such file"):
        load_tokenizer("absent.json")


def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=.*t\.json: not a Hugging Face tokenizers"):
        load_tokenizer(tmp_path / "t.json")


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match=r"has no end-of-text token \(looked for .*</s>"):
        load_tokenizer(tmp_path / "t.json")

"""Ids of bytes, and of tokenizer files as the `tokenizers` library encodes them."""

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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


def test_dropout_is_off_and_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "</s>": 3}
    Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], dropout=0.5)).save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert [list(ids) for ids in loaded.encode_batch(["ab" * 50] * 3)] == [[2] * 50] * 3
    assert "its BPE dropout of 0.5 is off here" in caplog.text


def test_without_dropout_nothing_is_said(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.save(str(tmp_path / "t.json"))
    load_tokenizer(tmp_path / "t.json")
    assert not caplog.text


def changed(path: Path, **parts: object) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return path


def test_a_text_that_the_tokenizer_cannot_encode_is_one_line(tmp_path: Path) -> None:
    """One raises an error; the other panics, which is no Exception."""
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=.*t\.json: cannot encode the text \(.*UNK"):
        load_tokenizer(tmp_path / "t.json").encode_batch(["b"])
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    loaded = load_tokenizer(changed(tmp_path / "t.json", pre_tokenizer=pattern))
    with pytest.raises(UserError, match=r"cannot encode the text \(.*limit") as refusal:
        loaded.encode_batch(["a" * 40 + "b"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("table", [b"", b"\x04\0\0\0\xff\xff\xff\x7fabc", b"\0\0\1\0" + bytes(range(256)) * 256])
def test_a_damaged_table_of_a_normalizer_is_one_line(table: bytes, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=.*: its precompiled_charsmap is damaged; download"):
        load_tokenizer(changed(tmp_path / "t.json", normalizer=normalizer))


def test_a_tokenizer_that_ends_its_process_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    changed(tmp_path / "t.json", note={"precompiled_charsmap": ""})
    monkeypatch.setattr("training.data.tokenizer.PROBE", "import os; os.abort()")
    with pytest.raises(UserError, match="precompiled_charsmap is damaged"):
        load_tokenizer(tmp_path / "t.json")


def test_ids_decode_to_their_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for loaded in (ByteTokenizer(), load_tokenizer(tmp_path / "tokenizer.json")):
        (ids,) = loaded.encode_batch(["the dog é\n"])
        assert loaded.decode([*map(int, ids), loaded.end_of_text_id]) == "the dog é\n"
        # A character whose last byte is missing.
        (ids,) = loaded.encode_batch(["a é"])
        assert loaded.decode(list(map(int, ids))[:-1]) == "a \ufffd"

"""Tokenizers of files and folders give the ids of the libraries that read them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from tests.training.helpers.pretrained_folder import small_tokenizer
from training.data.library_tokenizer import files_in, has_tokenizer, token_in, values_of
from training.data.tokenizer import load_tokenizer
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


def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=.*t\.json: not a Hugging Face tokenizers"):
        load_tokenizer(tmp_path / "t.json")


def test_dropout_is_off_and_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "</s>": 3}
    Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], dropout=0.5)).save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert [list(ids) for ids in loaded.encode_batch(["ab" * 50] * 3)] == [[2] * 50] * 3
    assert "its BPE dropout of 0.5 is off here" in caplog.text


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


def test_documents_begin_and_end_as_the_post_processor_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert (loaded.begin, loaded.end, loaded.stops) == ((0,), (1,), {1})
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert (loaded.begin, loaded.end) == ((), (1,))


def test_a_file_has_special_tokens_and_template_from_the_configuration_beside_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    values = {"eos_token": {"content": "a"}, "bos_token": "<s>", "pad_token": "<none>", "chat_template": "{{ x }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.end_of_text_id == loaded.id_of("a") == loaded.pretrained.eos_token_id
    assert (loaded.pretrained.bos_token, loaded.pretrained.pad_token) == ("<s>", None)
    assert loaded.pretrained.chat_template == "{{ x }}"
    (tmp_path / "chat_template.jinja").write_text("{{ y }}")
    assert load_tokenizer(tmp_path / "tokenizer.json").pretrained.chat_template == "{{ y }}"


def test_the_advice_for_a_tokenizer_without_end_of_text_works(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r'name the token that ends a text .*{"eos_token": "TOKEN"}$'):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    for given in (tmp_path / "tokenizer.json", tmp_path):
        assert load_tokenizer(given).end_of_text_id == 0


@pytest.mark.parametrize("setting", ["add_prefix_space", "split_special_tokens"])
def test_a_file_of_a_folder_with_a_class_is_read_as_the_folder(
    tokenizer: Tokenizer, tmp_path: Path, setting: str
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    values = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", setting: True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    theirs, text = AutoTokenizer.from_pretrained(tmp_path), "the cat</s>"
    for given in (tmp_path / "tokenizer.json", tmp_path):
        loaded = load_tokenizer(given)
        assert list(loaded.encode_batch([text])[0]) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("begins", [True, False])
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, begins: bool) -> None:
    made = small_tokenizer(begins)
    made.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "the lazy cat é\n"
    assert list(loaded.encode_batch([text])[0]) == made(text, add_special_tokens=False).input_ids
    assert (loaded.begin, loaded.end, loaded.stops) == ((1,) if begins else (), (2,), {2})
    assert (loaded.pretrained.chat_template, loaded.pretrained.eos_token) == (made.chat_template, "<turn>")
    assert loaded.vocab_size == len(made) == max(loaded.vocabulary.values()) + 1


def test_a_folder_without_a_tokenizer_that_is_fast_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=.*: the folder has no tokenizer\.json: give a"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=.*: transformers cannot load it \(") as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)


def test_the_files_of_a_tokenizer_are_found_with_all_its_templates(tmp_path: Path):
    (tmp_path / "additional_chat_templates").mkdir()
    taken = ("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.model")
    for name in (*taken, "model.safetensors", "config.json", "additional_chat_templates/secret.txt"):
        (tmp_path / name).write_text("{}")
    assert set(files_in(tmp_path)) == set(taken)
    assert has_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    assert not has_tokenizer(tmp_path)


def test_special_tokens_are_texts_or_mappings(tmp_path: Path):
    assert values_of(tmp_path) == {}
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert values_of(tmp_path) == {}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}, "bos_token": "b", "pad_token": 3}')
    values = values_of(tmp_path)
    assert [token_in(values, f"{name}_token") for name in ("eos", "bos", "pad", "unk")] == ["a", "b", None, None]

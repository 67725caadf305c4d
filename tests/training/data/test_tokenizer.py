"""The tokenizer that dataset.tokenizer names: bytes, a file, a folder or a model of the Hub."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from tests.training.helpers.hub_server import ask_here, hub_server
from tests.training.helpers.pretrained_folder import small_tokenizer
from training.data.tokenizer import ByteTokenizer, library_bytes, load_tokenizer, tokenizer_files
from training.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer().save_pretrained(made)
    return made


def test_without_a_path_ids_are_bytes_and_no_library_is_imported() -> None:
    assert isinstance(load_tokenizer(None), ByteTokenizer)
    code = (
        "import sys; from training.data.tokenizer import load_tokenizer; load_tokenizer(None).encode_batch(['a']);"
        " assert not {'transformers', 'tokenizers', 'huggingface_hub', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"^dataset\.tokenizer=absent\.json: no such file or folder: give a"):
        load_tokenizer("absent.json")


def test_ids_decode_to_their_text(folder: Path) -> None:
    for loaded in (ByteTokenizer(), load_tokenizer(folder / "tokenizer.json"), load_tokenizer(folder)):
        (ids,) = loaded.encode_batch(["the dog é\n"])
        assert loaded.decode([*map(int, ids), loaded.end_of_text_id]) == "the dog é\n"
        # A character whose last byte is missing.
        (ids,) = loaded.encode_batch(["a é"])
        assert loaded.decode(list(map(int, ids))[:-1]) == "a \ufffd"


def test_what_stands_around_a_document_may_be_given(folder: Path) -> None:
    loaded = load_tokenizer(folder, begin=None, end="<end>")
    assert (loaded.begin, loaded.end, loaded.stops) == ((), (0,), {0, 2})
    assert load_tokenizer(None, begin="<|endoftext|>", end=None).begin == (256,)
    assert (ByteTokenizer().begin, ByteTokenizer().end) == ((), (256,))
    with pytest.raises(UserError, match=r"^dataset\.end=<none>: is no token of dataset\.tokenizer=/.*: give the text"):
        load_tokenizer(folder, end="<none>")
    with pytest.raises(UserError, match=r"^dataset\.begin=a: is no token of dataset\.tokenizer=null"):
        load_tokenizer(None, begin="a")


def test_a_model_of_the_hub_brings_its_tokenizer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    models = {"me/chat": files | {"model.safetensors": b"large"}, "me/none": {"config.json": b"{}"}}
    monkeypatch.chdir(tmp_path)
    with hub_server(models) as address:
        ask_here(monkeypatch, address, tmp_path / "cache")
        loaded = load_tokenizer("me/chat")
        with pytest.raises(UserError, match=r"that model has no tokenizer\.json: give dataset\.tokenizer=FOLDER"):
            load_tokenizer("me/none")
        with pytest.raises(UserError, match=r"^dataset\.tokenizer=me/absent: no such .*no such model on the Hub"):
            load_tokenizer("me/absent")
    # Without the Hub it is in the client's cache, and nothing more.
    assert load_tokenizer("me/chat").begin == loaded.begin == (1,)
    assert not list((tmp_path / "cache").rglob("model.safetensors"))


TEXT = "a Größe\n\t\x00 \U0001f600 <x>"


def read_back(folder: Path, files: dict[str, bytes]):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate("abc")}, merges=[]))
    made.add_special_tokens(["</s>"])
    (tmp_path / "from").mkdir()
    made.save(str(tmp_path / "from" / "tokenizer.json"))
    return tmp_path / "from" / "tokenizer.json"


def test_bytes_have_the_same_ids(tmp_path: Path):
    found, own = read_back(tmp_path, tokenizer_files(None, longest=128)), load_tokenizer(None)
    assert found(TEXT).input_ids == list(own.encode_batch([TEXT])[0])
    assert found.decode(found(TEXT).input_ids) == TEXT
    assert (found.eos_token_id, len(found), found.model_max_length) == (own.end_of_text_id, own.vocab_size, 128)


def test_a_file_is_taken_as_it_is_with_those_beside_it(tmp_path: Path, file: Path):
    found = read_back(tmp_path, tokenizer_files(str(file), longest=16))
    assert found("cab").input_ids == [2, 0, 1]
    assert (found.eos_token, found.eos_token_id) == ("</s>", 3)
    beside = {"tokenizer_config.json": b'{"eos_token": "b"}', "chat_template.jinja": b"{{ x }}"}
    for name, content in {**beside, "model.safetensors": b"", "secret.txt": b"mine"}.items():
        (file.parent / name).write_bytes(content)
    assert tokenizer_files(str(file), longest=16) == {**beside, "tokenizer.json": file.read_bytes()}


def test_bytes_are_the_ids() -> None:
    ids = ByteTokenizer().encode_batch(["aé", "", "z"])
    assert [list(text) for text in ids] == [[97, 0xC3, 0xA9], [], [122]]
    assert (ByteTokenizer.vocab_size, ByteTokenizer.end_of_text_id) == (257, 256)
    assert (ByteTokenizer().begin, ByteTokenizer().end, ByteTokenizer.stops) == ((), (256,), {256})


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert list(ByteTokenizer().encode_batch(["a\ud800"])[0]) == [97, ord("?")]


def test_the_library_and_transformers_give_the_same_ids() -> None:
    own = ByteTokenizer()
    expected = list(own.encode_batch([TEXT])[0])
    assert library_bytes().encode(TEXT).ids == own.pretrained(TEXT).input_ids == expected
    assert (own.pretrained.eos_token_id, len(own.pretrained)) == (256, 257)
    assert (own.id_of(own.pretrained.eos_token), own.id_of("a")) == (256, None)

"""Weights bring the tokenizer that they were trained on; other ids than theirs are refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.llama import Llama
from tests.training.helpers.hub_server import ask_here, hub_server
from tests.training.helpers.in_process import TINY_RUN, components_of, composed, run_here
from tests.training.helpers.pretrained_folder import SIZES, STOPS, save_pretrained, small_tokenizer
from training.data.tokenizer import load_tokenizer, tokenizer_files
from training.errors import UserError
from training.planning.plan_only import plan_only
from training.weights.model_tokenizer import ends_of, is_of_bytes, origin_of, own_tokenizer, stops_of, values_in

TEXT = (*TINY_RUN, "dataset=text", "dataset.files=none.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "chat"
    save_pretrained(folder, "llama")
    return folder


def of_hf(folder: Path | str, *overrides: str) -> tuple[str, ...]:
    given = [entry for entry in TEXT if not entry.startswith("model.")]
    return (*given, "model=hf", f"model.source={folder}", *overrides)


def tokenizer_of(*overrides: str) -> str | None:
    return components_of(*overrides).config.dataset.tokenizer


def refusal_of(*overrides: str) -> str:
    with pytest.raises(UserError) as refusal:
        components_of(*overrides)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_loaded_weights_bring_their_tokenizer(model: Path):
    components = components_of(*of_hf(model))
    assert components.config.dataset.tokenizer == str(model)
    line = components.settled.reasons["dataset.tokenizer"]
    assert line == f"{model}, the tokenizer of model.weights={model}"
    # Bytes as ids of such a model were trained on without a word.
    shape = "{" + ", ".join(f"{key}: {value}" for key, value in {**SIZES, "rms_norm_eps": 1e-5}.items()) + "}"
    of_type = of_hf("llama", f"model.overrides={shape}")
    assert tokenizer_of(*of_type, f"model.weights={model}") == str(model)
    assert tokenizer_of(*of_type, f"model.weights={model}/model.safetensors") == str(model)


def test_weights_without_one_have_that_of_the_source(model: Path, tmp_path: Path):
    shutil.copy(model / "model.safetensors", tmp_path)
    assert tokenizer_of(*of_hf(model, f"model.weights={tmp_path}")) == str(model)


def test_a_model_from_the_seed_has_that_of_its_source_or_bytes(model: Path, tmp_path: Path):
    assert tokenizer_of(*of_hf(model, "model.weights=null")) == str(model)
    components = components_of(*TEXT)
    assert components.config.dataset.tokenizer is None
    assert components.settled.reasons["dataset.tokenizer"].startswith("bytes, because the weights begin from")
    shutil.copy(model / "config.json", tmp_path)
    assert tokenizer_of(*of_hf(tmp_path)) is None


def test_weights_that_bring_none_need_an_answer_and_each_answer_is_taken(model: Path, tmp_path: Path):
    save_file(Llama(vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2).state_dict(), tmp_path / "model.safetensors")  # fmt: skip
    job = (*TEXT, f"model.weights={tmp_path}")
    advice = refusal_of(*job)
    assert advice.endswith("give dataset.tokenizer=FOLDER with that of the model, or null if it was trained on bytes")
    assert "a model of pictures takes a dataset of pictures (dataset=captioned, say)" in advice
    assert tokenizer_of(*job, "dataset.tokenizer=null") is None
    assert tokenizer_of(*job, f"dataset.tokenizer={model}") == str(model)


def test_other_ids_than_those_of_the_weights_are_refused_and_the_advice_works(model: Path, tmp_path: Path):
    job = of_hf(model)
    line = refusal_of(*job, "dataset.tokenizer=null")
    assert line.startswith("dataset.tokenizer=null: its token 'Ā' has the id 0, which is '<end>' in the tokenizer that")
    small_tokenizer().save_pretrained(tmp_path)
    # The same tokens from elsewhere are the same ids.
    assert tokenizer_of(*job, f"dataset.tokenizer={tmp_path}") == str(tmp_path)
    assert tokenizer_of(*job, f"dataset.tokenizer={model}/tokenizer.json") == f"{model}/tokenizer.json"
    other = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    other.add_tokens(["<new>"])
    other.save(str(tmp_path / "tokenizer.json"))
    line = refusal_of(*job, f"dataset.tokenizer={tmp_path}/tokenizer.json")
    assert f"its token '<new>' has the id {other.token_to_id('<new>')}, which stands for nothing in" in line
    assert line.endswith(f"that of model.weights={model}: take dataset.tokenizer=auto")
    assert tokenizer_of(*job, *re.findall("dataset.tokenizer=auto", line)) == str(model)


def test_a_model_that_was_exported_with_bytes_has_bytes(tmp_path: Path):
    save_pretrained(tmp_path, tokenizer=False)
    for name, content in tokenizer_files(None, longest=32).items():
        (tmp_path / name).write_bytes(content)
    assert is_of_bytes(tmp_path / "tokenizer.json")
    assert tokenizer_of(*of_hf(tmp_path)) is None
    assert tokenizer_of(*of_hf(tmp_path, "dataset.tokenizer=null")) is None
    small_tokenizer().save_pretrained(tmp_path)
    assert not is_of_bytes(tmp_path / "tokenizer.json")


def test_a_checkpoint_brings_the_tokenizer_of_its_run(model: Path, tmp_path: Path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    run = (*TINY_RUN, "dataset=text", f"dataset.files={tmp_path}/a.txt", "steps=1", "checkpoint.every=1")
    for name, given in {"bytes": "auto", "words": str(model)}.items():
        run_here(tmp_path / name, *run, f"dataset.tokenizer={given}", "eval.every=null")
    weights = f"model.weights={tmp_path}/{{}}/checkpoints/step-00000001"
    assert tokenizer_of(*TEXT, weights.format("bytes")) is None
    assert tokenizer_of(*TEXT, weights.format("words")) == str(model)
    line = refusal_of(*TEXT, weights.format("bytes"), f"dataset.tokenizer={model}")
    assert line.startswith(f"dataset.tokenizer={model}: its token '<end>' has the id 0, which is 'Ā' in the tokenizer")


def test_a_plan_downloads_no_tokenizer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with hub_server({"me/chat": files}) as address:
        ask_here(monkeypatch, address, tmp_path / "cache")
        job = of_hf("me/chat", "hardware=h200", "sample.every=1", "sample.tokens=4")
        for given in ("auto", str(model), "null"):
            config, invocation = composed(*job, f"dataset.tokenizer={given}", run_dir=tmp_path)
            plan_only(config, invocation)
        assert not list((tmp_path / "cache").rglob("tokenizer*"))
    assert own_tokenizer(composed(*of_hf("me/chat", "model.weights=me/chat"))[0].model).value == "me/chat"
    assert "me/chat" in json.dumps(json.loads((tmp_path / "plan.json").read_text()))


JOB = (*(entry for entry in TINY_RUN if not entry.startswith("model.")), "dataset=text", "dataset.files=a", "model=hf")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_pretrained(folder)
    return folder


def test_weights_and_the_tokenizer_of_the_source_make_it_the_origin(base: Path, tmp_path: Path):
    job = (*JOB, f"model.source={base}")
    for given in ((), ("model.weights=null",), (f"model.weights={base}/model.safetensors",)):
        config = components_of(*job, *given).config
        assert origin_of(config) == base
        assert stops_of(config, load_tokenizer(config.dataset.tokenizer)) == {*STOPS}
    # Ids of its own: the numbers of the source mean other tokens.
    own = components_of(*job, "model.weights=null", "dataset.tokenizer=null").config
    assert origin_of(own) is None
    assert stops_of(own, load_tokenizer(None)) == {256}
    assert origin_of(components_of(*JOB, "model.source=qwen2").config) is None


def test_the_ends_of_both_files_count(tmp_path: Path):
    assert (ends_of(None), ends_of(tmp_path), values_in(tmp_path)) == ((), (), {})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert ends_of(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, None]}))
    assert ends_of(tmp_path) == (7, 5)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON: download it again"):
        ends_of(tmp_path)

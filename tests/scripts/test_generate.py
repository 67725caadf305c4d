"""scripts/generate.py: text of a checkpoint, in every mode the same, and its mistakes in one line."""

import io
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import generate
from tests.scripts.conftest import called
from tests.training.helpers.in_process import TINY_RUN, composed, conf_initialised, run_here, saved_run
from tests.training.helpers.pretrained_folder import save_pretrained
from training.config.modes import mode_options
from training.runs import invocation
from training.runs.directory import RunDirectory
from training.visible_text import visible_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after steps 2 and 4, and with the files that train.py writes around it."""
    text = ("dataset=stdlib", "dataset.max_tokens=20000")
    saved = ("steps=4", "checkpoint.every=2", "offload=layer_stream")
    return saved_run(tmp_path_factory.mktemp("run"), *TINY_RUN, *text, *saved)


@pytest.mark.slow
def test_the_text_is_the_same_in_every_mode(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = (run, "def main(", "--tokens", "8", "--temperature", "3", "--seed", "5")
    assert called(monkeypatch, generate, *asked) == 0
    text = capsys.readouterr().out
    # From here on conf/ is read once, not twice for each mode.
    monkeypatch.setattr(invocation, "initialize_config_dir", lambda *folder, **version: conf_initialised())
    assert text.startswith("def main(")
    assert all(line.isprintable() for line in text.split("\n"))
    for offload in mode_options():
        shards = ["offload.shards=2"] if offload == "shard_offload" else []
        assert called(monkeypatch, generate, *asked, f"offload={offload}", *shards) == 0
        assert capsys.readouterr().out == text, offload
    for other in ((run / "checkpoints" / "step-00000002", *asked[1:]), (*asked[:-1], "6")):
        assert called(monkeypatch, generate, *other) == 0
        assert capsys.readouterr().out != text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--top-p", "1.5"), "--top-p=1.5: must be"),
        (("--top-p", "nan"), "--top-p=nan: must be"),
        (("--temperature", "-1"), "--temperature=-1.0: must be at least 0"),
        (("--tokens", "0"), "--tokens=0: must be at least 1"),
        (("--picture", "a.png"), "trained no model=pipeline, which alone makes pictures of prompts"),
        (("--tokens", "1000000000000"), "a text of 1,000,000,000,001 tokens does not fit, its keys, values and"),
        (("offload=nothing",), "offload=nothing: there is no such option"),
        (("model.hidden_size=32",), "model.safetensors: tensor "),
        (("dataset=synthetic",), "SyntheticTokens has no key dataset.tokenizer"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_one_line(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    problem: str,
):
    assert called(monkeypatch, generate, run, "a", *arguments) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("error: ")
    assert problem in shown.err.splitlines()[-1]
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that begins with the weights of a model that chats, which it does not change."""
    folder = tmp_path_factory.mktemp("chats")
    save_pretrained(folder / "base", "llama")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    overrides = (*(entry for entry in TINY_RUN if not entry.startswith("model.")), "model=hf", "optimizer.lr=0")
    overrides = (*overrides, f"model.source={folder}/base", "dataset=text", f"dataset.files={folder}/a.txt")
    overrides = (*overrides, "steps=1", "checkpoint.every=1", "precision=fp32", "seq_len=16")
    return saved_run(folder, *overrides)


def talked(monkeypatch: pytest.MonkeyPatch, run: Path, said: str, *options: str) -> int | None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return called(monkeypatch, generate, run, "--chat", "--temperature", "0", *options)


@pytest.mark.slow
def test_a_conversation_is_what_transformers_makes_of_it(
    chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = AutoModelForCausalLM.from_pretrained(chats / "base")
    tokenizer = AutoTokenizer.from_pretrained(chats / "base")
    messages, expected = [], []
    for said in ("the cat", "the dog"):
        messages.append({"role": "user", "content": said})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        # Rows of the head beyond the tokenizer's ids are never drawn here.
        beyond = list(range(len(tokenizer), model.config.vocab_size))
        written = model.generate(prompt, max_new_tokens=9, do_sample=False, suppress_tokens=beyond)
        written = written[0, prompt.shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(written, skip_special_tokens=True)})
        expected.append(messages[-1]["content"])
    # What follows an empty line is not read.
    assert talked(monkeypatch, chats, "the cat\nthe dog\n\nthe fox\n", "--tokens", "9", "device=cpu") == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(visible_lines(answer) + "\n" for answer in expected)
    assert "the text may be longer than seq_len=16" in shown.err


@pytest.mark.slow
def test_a_model_without_a_template_does_not_chat_unless_it_is_given_one_without_channels(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert talked(monkeypatch, run, "a\n", "--tokens", "2") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: --chat: the model has no template of chats: give --template FILE, a template of Jinja"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert talked(monkeypatch, run, "a\n", "--tokens", "2", "--template", str(tmp_path / "t.jinja")) == 0
    assert capsys.readouterr().out
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<|channel|>final<|message|>{{ m.content }}{% endfor %}")
    assert talked(monkeypatch, run, "a\n", "--tokens", "2", "--template", str(tmp_path / "t.jinja")) == 1
    assert capsys.readouterr().err.startswith("error: --chat: answers in channels, as of gpt-oss, are not taken apart")
    assert called(monkeypatch, generate, run) == 1
    assert "PROMPT is missing: give a text to continue" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tokenizer_is_that_of_the_checkpoint_though_its_origin_is_gone(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    small = ["model.num_hidden_layers=1", "model.hidden_size=16", "model.intermediate_size=32", "model=tiny"]
    overrides = (*TINY_RUN, *small, "dataset=text", f"dataset.files={chats}/a.txt", "steps=1", "checkpoint.every=1")
    tokens = tmp_path / "tokens"
    shutil.copytree(chats / "base", tokens, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    run_here(tmp_path / "run", *overrides, f"dataset.tokenizer={tokens}")
    RunDirectory(tmp_path / "run").write_config(*composed(*overrides, run_dir=tmp_path / "run"))
    capsys.readouterr()
    assert called(monkeypatch, generate, tmp_path / "run", "the cat", "--tokens", "3") == 0
    assert capsys.readouterr().out.startswith("the cat")
    shutil.rmtree(tokens)
    assert called(monkeypatch, generate, tmp_path / "run", "the cat") == 1
    assert f"dataset.tokenizer={tokens}: no such file or folder" in capsys.readouterr().err
    given = f"dataset.tokenizer={chats}/base"
    assert called(monkeypatch, generate, tmp_path / "run", "the cat", "--tokens", "3", given) == 0

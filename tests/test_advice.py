"""The advice in messages about weights, tokenizers and saved runs: taken as it is written, it works."""

import re
from pathlib import Path

import pytest

from tests.test_any_model import COMMON
from tests.training.helpers.in_process import TINY_RUN, composed, run_here
from tests.training.helpers.pretrained_folder import save_pretrained, small_tokenizer
from training.errors import UserError
from training.runs.directory import RunDirectory
from training.saved_runs.export import export

SMALL = "{num_hidden_layers: 1, hidden_size: 16, intermediate_size: 32, num_attention_heads: 2, num_key_value_heads: 2}"
ADAPTER = ("adapter=lora", "adapter.rank=2", "adapter.alpha=3")


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return ("dataset=text", f"dataset.files={tmp_path}/a.txt", "steps=1", "precision=fp32")


def advice_of(line: str) -> list[str]:
    """The overrides that a message ends with; dictionaries have spaces."""
    assert "\n" not in line
    return re.findall(
        r"(?<!\S)[a-z_]+(?:\.[a-z_]+)*=(?:\{.*\}|[^\s,]+)", re.split(r": (?=give|take|begin|choose)", line)[-1]
    )


def refused(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as refusal:
        run_here(folder, *overrides)
    return advice_of(str(refusal.value))


def saved(folder: Path, *overrides: str) -> Path:
    run_here(folder, *overrides, "checkpoint.every=1")
    RunDirectory(folder).write_config(*composed(*overrides, "checkpoint.every=1", run_dir=folder))
    return folder / "checkpoints" / "step-00000001"


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ((*TINY_RUN, "model.vocab_size=100"), "model.vocab_size=300"),
        (
            (*COMMON, "model=hf", "model.source=qwen2", f"model.overrides={SMALL[:-1]}, vocab_size: 100}}"),
            "model.overrides={num_hidden_layers: 1, hidden_size: 16, intermediate_size: 32, num_attention_heads: 2,"
            " num_key_value_heads: 2, vocab_size: 300}",
        ),
        (
            (*COMMON, "model=hf", "model.source=gemma3", "model.overrides={text_config: {vocab_size: 100,"
             f" head_dim: 8, {SMALL[1:]}}}"),
            "model.overrides={text_config: {vocab_size: 300, head_dim: 8, num_hidden_layers: 1, hidden_size: 16,"
            " intermediate_size: 32, num_attention_heads: 2, num_key_value_heads: 2}}",
        ),
    ],
    ids=["llama", "hf", "part"],
)  # fmt: skip
def test_a_vocabulary_that_is_too_small_from_the_seed(
    tmp_path: Path, text: tuple[str, ...], model: tuple[str, ...], advice: str
):
    small_tokenizer().save_pretrained(tmp_path / "tokens")
    job = (*model, *text, f"dataset.tokenizer={tmp_path}/tokens/tokenizer.json")
    assert refused(tmp_path / "refused", *job) == [advice]
    run_here(tmp_path / "run", *job, advice)


def test_a_tokenizer_that_is_larger_than_the_loaded_model(tmp_path: Path, text: tuple[str, ...]):
    save_pretrained(tmp_path / "m", "llama")
    tokens = small_tokenizer()
    tokens.add_tokens([f"<{n}>" for n in range(40)])
    tokens.save_pretrained(tmp_path / "more")
    job = (*COMMON, *text, "model=hf", f"model.source={tmp_path}/m")
    advice = refused(tmp_path / "refused", *job, f"dataset.tokenizer={tmp_path}/more")
    assert advice == ["dataset.tokenizer=auto"]
    run_here(tmp_path / "run", *job, *advice)


@pytest.mark.slow
def test_a_changed_run_begins_anew_from_the_weights_of_its_model_or_of_its_adapter(
    tmp_path: Path, text: tuple[str, ...]
):
    for name, given in (("model", ()), ("adapter", ADAPTER)):
        checkpoint = saved(tmp_path / name, *TINY_RUN, *text, *given)
        job = (*TINY_RUN, *text, *given, "seq_len=16")
        with pytest.raises(UserError, match="begin a new run from these weights") as refusal:
            run_here(tmp_path / f"{name}-again", *job, f"resume={checkpoint}")
        (advice,) = re.findall(r"begin a new run from these weights, (\S+)$", str(refusal.value))
        assert advice == f"{name}.weights={checkpoint}"
        run_here(tmp_path / f"{name}-anew", *job, advice)


@pytest.mark.slow
def test_an_adapter_that_was_given_as_a_model(tmp_path: Path, text: tuple[str, ...]):
    checkpoint = saved(tmp_path / "run", *TINY_RUN, *text, *ADAPTER)
    line = refused(tmp_path / "refused", *TINY_RUN, *text, f"model.weights={checkpoint}")
    assert line == ["adapter=lora", "adapter.rank=2", "adapter.alpha=3.0", f"adapter.weights={checkpoint}"]
    run_here(tmp_path / "again", *TINY_RUN, *text, *line)


@pytest.mark.slow
def test_a_base_of_another_seed_or_loaded_is_named_with_what_gives_it(tmp_path: Path, text: tuple[str, ...]):
    saved(tmp_path / "run", *TINY_RUN, *text, *ADAPTER, "seed=3")
    with pytest.raises(UserError, match="the frozen base was made from seed=3, and is seed=4: give") as refusal:
        export(str(tmp_path / "run"), str(tmp_path / "out"), ["seed=4"], merge=True)
    export(str(tmp_path / "run"), str(tmp_path / "out"), advice_of(str(refusal.value)), merge=True)


@pytest.mark.slow
def test_quantised_weights_begin_a_run_of_their_format(tmp_path: Path, text: tuple[str, ...]):
    job = (*TINY_RUN, *text, "quantize=int8")
    checkpoint = saved(tmp_path / "run", *job)
    with pytest.raises(UserError, match="in a form that no library loads") as refusal:
        export(str(tmp_path / "run"), str(tmp_path / "out"), [])
    advice = advice_of(str(refusal.value))
    assert advice == ["quantize=int8", f"model.weights={checkpoint}"]
    run_here(tmp_path / "again", *TINY_RUN, *text, *advice)


def test_more_positions_than_a_model_has(tmp_path: Path, text: tuple[str, ...]):
    gpt2 = "model.overrides={n_layer: 1, n_embd: 16, n_head: 2, vocab_size: 300, n_positions: 16}"
    job = (*COMMON, *text, "model=hf", "model.source=gpt2", gpt2)
    with pytest.raises(UserError, match=r"^seq_len=32: the model has embeddings for 16 positions: take at most 16$"):
        run_here(tmp_path / "refused", *job)
    run_here(tmp_path / "run", *job, "seq_len=16")

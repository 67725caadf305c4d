"""An exported model leaves with what it came with, and stops there; one from the seed with what its run has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.training.helpers.in_process import TINY_RUN, components_of, saved_run
from tests.training.helpers.pretrained_folder import SIZES, STOPS, save_pretrained
from training.data.tokenizer_folder import files_in
from training.saved_runs.companions import companions
from training.saved_runs.export import export

JOB = (
    *(entry for entry in TINY_RUN if not entry.startswith("model.")),
    "dataset=text",
    "steps=1",
    "checkpoint.every=1",
)
JOB = (*JOB, "precision=fp32", "optimizer.lr=0", "seq_len=16")
LLAMA = tuple(f"model.{key}={value}" for key, value in SIZES.items() if key != "max_position_embeddings")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "chat"
    save_pretrained(folder, "llama")
    (folder.parent / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


def exported(run: Path, base: Path, *overrides: str, merge: bool = False) -> Path:
    given = (*JOB, f"dataset.files={base.parent}/a.txt", *overrides)
    export(str(saved_run(run, *given)), str(run / "out"), [], merge=merge)
    return run / "out"


def written(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


def small_files(folder: Path) -> dict[str, bytes]:
    names = {*files_in(folder), "generation_config.json"}
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "merge"),
    [
        (("model=hf", "model.source={base}"), False),
        (("model=hf", "model.source={base}", "adapter=lora"), True),
        (("model=hf", "model.source={base}", "adapter=lora"), False),
        (("model=hf", "model.source=llama", "model.overrides={sizes}", "model.weights={base}"), False),
        ((*LLAMA, "model.weights={base}"), False),
    ],
    ids=["whole", "merged", "adapter", "type", "llama"],
)
def test_it_leaves_with_what_it_came_with_and_stops_there(
    base: Path, tmp_path: Path, overrides: tuple[str, ...], merge: bool
):
    shape = "{" + ", ".join(f"{key}: {value}" for key, value in {**SIZES, "rms_norm_eps": 1e-5}.items()) + "}"
    given = [entry.replace("{base}", str(base)).replace("{sizes}", shape) for entry in overrides]
    out = exported(tmp_path, base, *given, merge=merge)
    assert small_files(out) == small_files(base)
    whole = merge or not any("adapter" in entry for entry in given)
    if whole:
        kept = ("eos_token_id", "bos_token_id", "pad_token_id", "max_position_embeddings", "use_cache")
        assert [written(out).get(key) for key in kept] == [written(base).get(key) for key in kept]
        model = AutoModelForCausalLM.from_pretrained(out)
    else:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
        assert not (out / "config.json").exists()
    assert model.generation_config.eos_token_id == STOPS
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    # Either token ends a text.
    original = AutoModelForCausalLM.from_pretrained(base)
    prompt = tokenizer("the quick", return_tensors="pt").input_ids
    for stop in STOPS:
        texts = []
        for made in (original, model):
            head = made.get_output_embeddings()
            # The third token, whatever was drawn before, is the one that ends a text.
            hook = head.register_forward_hook(_after(2, stop))
            texts.append(made.generate(input_ids=prompt, do_sample=False, max_new_tokens=12))
            hook.remove()
        assert torch.equal(*texts)
        assert (texts[0].shape[1], int(texts[0][0, -1])) == (prompt.shape[1] + 3, stop)


def _after(steps: int, token: int):
    count = [0]

    def changed(module, given, logits):
        logits = logits.clone()
        logits[..., list(STOPS)] = -1e9
        if count[0] == steps:
            logits[..., token] = 1e9
        count[0] += 1
        return logits

    return changed


@pytest.mark.slow
def test_a_model_from_the_seed_stops_where_its_run_ends_documents(base: Path, tmp_path: Path):
    for name, given, ends in (("bytes", (), (None, 256)), ("words", (f"dataset.tokenizer={base}",), (1, 2))):
        out = exported(tmp_path / name, base, *given)
        assert (written(out)["bos_token_id"], written(out)["eos_token_id"]) == ends
        model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == ends[1]
        assert GenerationConfig.from_pretrained(out).eos_token_id == ends[1]
        assert written(out)["max_position_embeddings"] == 16


@pytest.mark.slow
def test_what_a_checkpoint_was_made_of_is_known_after_a_second_run(base: Path, tmp_path: Path):
    exported(tmp_path / "first", base, *LLAMA, f"model.weights={base}")
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000001"
    out = exported(tmp_path / "second", base, *LLAMA, f"model.weights={checkpoint}")
    assert small_files(out) == small_files(base)
    assert written(out)["max_position_embeddings"] == SIZES["max_position_embeddings"]


def test_a_dataset_without_text_takes_nothing_away(base: Path):
    config = components_of(*JOB, "model=hf", f"model.source={base}", "dataset=synthetic").config
    assert companions(config).files == small_files(base)


def test_a_template_of_the_run_is_that_of_the_model(base: Path, tmp_path: Path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    job = (*JOB, "model=hf", f"model.source={base}", "dataset=chat", "dataset.files=none.jsonl")
    own = companions(components_of(*job).config).files
    assert own["chat_template.jinja"] == (base / "chat_template.jinja").read_bytes()
    given = companions(components_of(*job, f"dataset.template={tmp_path}/t.jinja").config).files
    assert given["chat_template.jinja"] == b"{{ messages }}"
    of_bytes = companions(components_of(*JOB, "dataset=chat", "dataset.files=none.jsonl").config).files
    assert b"messages" in of_bytes["chat_template.jinja"]
    assert json.loads(of_bytes["generation_config.json"])["eos_token_id"] == 256

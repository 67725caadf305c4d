"""Text that a language model writes ends where its document ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.helpers.in_process import TINY_RUN, components_of
from tests.training.helpers.pretrained_folder import STOPS, save_pretrained
from tests.training.helpers.scripted import Scripted
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.errors import UserError
from training.evaluation.held_out import observed
from training.tasks.text_samples import TextSampler, continued, pieces, prompt_ids, tokenizer_of


def text_of(*ids: int, **changes) -> str | None:
    settings = {
        "stops": ByteTokenizer().stops,
        "tokens": len(ids),
        "temperature": 0,
        "top_p": 1,
        "seed": 0,
        "device": torch.device("cpu"),
        **changes,
    }
    with observed(model := Scripted(*ids), 0, settings["device"]):
        return continued(model, ByteTokenizer(), (97,), **settings)


def test_a_sample_ends_with_its_document_and_has_no_separator():
    assert text_of(98, 256, 99) == "ab"
    assert text_of(98, 0xC3, 99) == "ab\ufffdc"
    answers = iter([False, True])
    assert text_of(98, 99, 100, stopped=lambda: next(answers)) is None


def test_an_empty_prompt_starts_a_document():
    assert prompt_ids(ByteTokenizer(), "") == (256,)
    assert prompt_ids(ByteTokenizer(), "é") == (0xC3, 0xA9)


def test_any_end_ends_a_text():
    assert text_of(98, 99, 100, stops=frozenset({99, 256})) == "ab"


def test_a_prompt_begins_as_a_document_does():
    tokenizer = ByteTokenizer()
    tokenizer.begin = (1, 2)
    assert prompt_ids(tokenizer, "a") == (1, 2, 97)
    assert prompt_ids(tokenizer, "\x01\x02a") == (1, 2, 97)
    assert prompt_ids(tokenizer, "") == (1, 2)
    tokenizer.begin, tokenizer.end = (), ()
    assert prompt_ids(tokenizer, "") == (256,)


def test_pieces_of_a_text_end_where_characters_do():
    drawn = [*"aé\U0001f600".encode(), 0xFF, 98, 0xC3, 256, 99]
    assert list(pieces(ByteTokenizer(), drawn, ByteTokenizer().stops)) == ["a", "é", "\U0001f600", "\ufffdb", "\ufffd"]


def test_samples_of_a_loaded_model_stop_at_its_ends_and_those_of_chats_answer_a_user(tmp_path: Path):
    save_pretrained(tmp_path, "llama")
    job = (*(entry for entry in TINY_RUN if not entry.startswith("model.")), "sample.tokens=4", "sample.prompt=the cat")
    job = (*job, "model=hf", f"model.source={tmp_path}")
    tokenizer = load_tokenizer(tmp_path)
    (cat,) = tokenizer.encode_batch(["the cat"])
    (turn,) = tokenizer.encode_batch(["<bos>user\nthe cat<turn>assistant\n"])
    for given, prompt in (("dataset=text", [1, *cat]), ("dataset=chat", list(turn))):
        components = components_of(*job, given, "dataset.files=none.jsonl")
        sampler = TextSampler.of(components.config, components.model)
        assert (sampler.prompt, sampler.stops) == (tuple(prompt), {*STOPS})
    given = ("dataset=text", "dataset.files=a", "dataset.begin=null", "dataset.end='<end>'")
    around = tokenizer_of(components_of(*job, *given).config, "it")
    assert (around.begin, around.end) == ((), (0,))


@pytest.mark.parametrize("asked", [{}, {"repetition_penalty": 1.05, "top_k": 20}])
def test_what_a_model_asks_for_and_texts_are_drawn_without_is_told(tmp_path: Path, asked: dict, caplog):
    save_pretrained(tmp_path, "llama")
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_beams": 1} | asked))
    job = (*(entry for entry in TINY_RUN if not entry.startswith("model.")), "sample.tokens=4", "model=hf")
    components = components_of(*job, f"model.source={tmp_path}", "dataset=text", "dataset.files=none.jsonl")
    TextSampler.of(components.config, components.model)
    told = "texts are drawn without repetition_penalty=1.05, top_k=20, which the model's generation_config.json has"
    assert caplog.messages == ([told] if asked else [])


def test_prompts_of_pictures_are_refused():
    components = components_of(*TINY_RUN, "sample.every=1", "sample.prompts=[a cat]")
    with pytest.raises(UserError, match=r"^sample\.every=1: sample\.prompts is for pictures of model=pipeline: give"):
        components.task.sampler(components.config, components.model)

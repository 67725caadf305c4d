"""Text that a language model writes ends where its document ends."""

from __future__ import annotations

import torch

from tests.training.helpers.scripted import Scripted
from training.data.tokenizer import ByteTokenizer
from training.evaluation.held_out import observed
from training.tasks.text_samples import continued, prompt_ids


def text_of(*ids: int, **changes) -> str | None:
    settings = {"tokens": len(ids), "temperature": 0, "top_p": 1, "seed": 0, "device": torch.device("cpu"), **changes}
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

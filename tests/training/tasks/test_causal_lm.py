"""Language modelling: what it counts, and what does not fit it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models.llama import Llama
from tests.models.helpers.hf_models import tiny
from tests.training.helpers.in_process import components_of, composed, run_here
from tests.training.helpers.pretrained_folder import save_pretrained, small_tokenizer
from training.errors import UserError
from training.tasks.causal_lm import CausalLM
from training.tasks.dpo import DPO


def test_tokens_are_what_it_counts():
    config, _ = composed("batch_size=48", "seq_len=2048")
    task = CausalLM()
    assert (task.unit, task.units(config), task.microbatches(config)) == ("tokens", 98304, 3)
    batch = task.meta_batch(config, 2)
    assert (batch.shape, batch.dtype, batch.device.type) == ((2, 2049), torch.int64, "meta")
    with torch.device("meta"):
        model = Llama(11, 32, 64, 2, 4, 2)
    assert task.flops(model, config) == 98304 * model.flops_per_token(2048)
    assert task.flops(nn.Linear(2, 2), config) is None


def test_a_dataset_without_tokens_and_a_small_vocabulary_are_named():
    config, _ = composed()
    with pytest.raises(UserError, match=r"^task=causal_lm: the dataset has no tokens"):
        CausalLM().check(config, SimpleNamespace(), nn.Identity())
    with pytest.raises(UserError, match=r": has 99999 ids, and the model"):
        CausalLM().check(config, SimpleNamespace(vocab_size=99999), SimpleNamespace(vocab_size=256))
    with pytest.raises(UserError, match=r"^task=causal_lm: Identity has no vocabulary"):
        CausalLM().check_model(config, nn.Identity())


@pytest.mark.parametrize("dataset", ["text", "chat"])
def test_ids_that_the_models_own_tokenizer_has_and_no_text_do_no_harm(tmp_path: Path, dataset: str):
    model, file = tmp_path / "model", tmp_path / "data.jsonl"
    (tokenizer := small_tokenizer()).add_tokens("<picture>")
    save_pretrained(model, vocab_size=len(tokenizer) - 1, tokenizer=False)
    tokenizer.save_pretrained(model)
    keys = (f"dataset={dataset}", f"dataset.files={file}", "model=hf", f"model.source={model}", "seq_len=32", "steps=1")
    keys += ("batch_size=2", "warmup_steps=0", "device=cpu", "hardware=h200", "tracking=disabled")
    for said in ("the lazy dog ", "the <picture>"):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
        file.write_text(json.dumps({"text": said * 20, "messages": messages}) + "\n")
        if "<picture>" not in said:
            run_here(tmp_path / "run", *keys)
    with pytest.raises(UserError, match=r"and the model \d+: leave out the texts with the ids from \d+ on$"):
        run_here(tmp_path / "refused", *keys)


@pytest.mark.parametrize("dataset", ["letters", "synthetic_images", "synthetic_video_latents"])
def test_a_plan_refuses_images_too(dataset: str):
    with pytest.raises(
        UserError, match=r"^task=causal_lm: the dataset has no tokens: take dataset=stdlib, text, hub or chat$"
    ):
        components_of(f"dataset={dataset}")


def test_a_sequence_beyond_the_models_positions_is_refused():
    """On a GPU such a position would end the process."""
    config, _ = composed("seq_len=17")
    CausalLM().check_model(config, SimpleNamespace(vocab_size=256, most_positions=17))
    CausalLM().check_model(config, SimpleNamespace(vocab_size=256, most_positions=None))
    with pytest.raises(UserError, match=r"^seq_len=17: the model has embeddings for 16 positions: take at most 16$"):
        CausalLM().check_model(config, SimpleNamespace(vocab_size=256, most_positions=16))


def test_the_auxiliary_loss_leaves_padding_out():
    model = tiny("mixtral_balanced").eval()
    ids, lengths = torch.arange(1, 22).view(3, 7), torch.tensor([7, 4, 2])
    model.hf.router_aux_loss_coef = 100.0
    real = torch.arange(7) < lengths[:, None]
    ids, labels = ids.masked_fill(~real, 0), ids.masked_fill(~real, -100)
    expected = model.hf(input_ids=ids, labels=labels, shift_labels=labels, attention_mask=real.long()).loss
    padded = {"input_ids": ids, "labels": labels, "lengths": lengths}
    torch.testing.assert_close(CausalLM().loss(model, padded), expected)
    assert not torch.allclose(model(ids, labels), expected)
    # The second and the third in one row.
    ends = torch.tensor([[0, 0, 0, 0, 1, 1, -1]])
    packed = {"segments": torch.cat([torch.zeros_like(ends), ends])}
    for name in ("input_ids", "labels"):
        first, second, third = padded[name]
        packed[name] = torch.stack([first, torch.cat([second[:4], third[:3]])])
    torch.testing.assert_close(CausalLM().loss(model, packed), expected)
    config, _ = composed("task=dpo", "dataset=preferences", "dataset.files=a.jsonl")
    with pytest.raises(UserError, match=r"^task=dpo: has no auxiliary loss of experts: take model\.overrides"):
        DPO().check_model(config, model)


CHAT = ("dataset=chat", "dataset.files=a.jsonl", "dataset.tokenizer=null", "seq_len=16")


def tiny_llama() -> Llama:
    return Llama(32, 16, 32, 2, 2, 1)


def chats(rows: int = 3) -> dict[str, torch.Tensor]:
    """Makes rows of 9, 6, 3 ... tokens, padded to the longest, of which the first third is not trained on."""
    lengths = torch.tensor([9 - 3 * row for row in range(rows)])
    ids = torch.randint(0, 32, (rows, 10), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    for row, length in enumerate(lengths.tolist()):
        labels[row, : length // 3] = -100
        labels[row, length:] = -100
    return {"input_ids": ids[:, :-1], "labels": labels, "lengths": lengths}


def test_the_loss_of_chats_is_the_mean_over_what_is_trained_on():
    batch, model, task = chats(), tiny_llama(), CausalLM()
    logits = model(batch["input_ids"])
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    assert torch.allclose(task.loss(model, batch), wanted, rtol=0, atol=1e-6)
    assert task.weight(batch) == 6 + 4 + 2
    assert task.units_in(batch) == 9 + 6 + 3


def test_packed_chats_have_the_loss_of_each_in_a_row_of_its_own():
    batch, model, task = chats(), tiny_llama(), CausalLM()
    lengths = batch["lengths"].tolist()
    parts = {
        name: torch.cat([batch[name][row, :n] for row, n in enumerate(lengths)])[None]
        for name in ("input_ids", "labels")
    }
    segments = torch.cat([torch.full((n,), row) for row, n in enumerate(lengths)])[None]

    packed = parts | {"segments": segments}
    assert torch.allclose(task.loss(model, packed), task.loss(model, batch), rtol=0, atol=1e-6)
    assert (task.weight(packed), task.units_in(packed)) == (task.weight(batch), task.units_in(batch))


def test_packed_rows_for_a_model_that_takes_none_are_refused_and_the_advice_works():
    for model, why in (
        (SimpleNamespace(vocab_size=300), "its forward has no argument that says which tokens belong together"),
        (SimpleNamespace(vocab_size=300, why_not_packed="its layers mix all tokens"), "its layers mix all tokens"),
    ):
        config, _ = composed(*CHAT, "dataset.packed=true")
        with pytest.raises(UserError, match=f"^dataset.packed=true: .*, because {why}: take dataset.packed=false$"):
            CausalLM().check_model(config, model)
        CausalLM().check_model(composed(*CHAT, "dataset.packed=false")[0], model)


def test_packed_rows_that_are_longer_than_a_model_takes_are_refused_and_the_advice_works():
    model = SimpleNamespace(vocab_size=300, most_packed=15, why_not_packed=None)
    with pytest.raises(UserError, match=r"^dataset.packed=true: packed rows .* at most 15 tokens.*: take seq_len=15"):
        CausalLM().check_model(composed(*CHAT, "dataset.packed=true")[0], model)
    CausalLM().check_model(composed(*CHAT, "dataset.packed=true", "seq_len=15")[0], model)
    CausalLM().check_model(composed(*CHAT)[0], model)


def test_packed_rows_may_be_longer_than_the_positions_of_a_model_but_no_chat_may():
    model = SimpleNamespace(vocab_size=300, most_positions=12, why_not_packed=None)
    config, _ = composed(*CHAT, "dataset.packed=true")
    CausalLM().check_model(config, model)
    CausalLM().check(config, SimpleNamespace(vocab_size=257, longest=12), model)
    with pytest.raises(UserError, match=r"^seq_len=16: a chat has 13: the model has embeddings for 12 positions"):
        CausalLM().check(config, SimpleNamespace(vocab_size=257, longest=13), model)
    with pytest.raises(UserError, match=r"^seq_len=16: the model has embeddings for 12 positions"):
        CausalLM().check_model(composed(*CHAT)[0], model)

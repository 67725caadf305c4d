from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from models.hf_head import use_plain_head
from models.loss import Head
from tests.models.helpers.hf_models import batch, tiny


@dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    aux_loss: Tensor | None = None


class Below(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, use_cache: bool | None = None) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        return SimpleNamespace(last_hidden_state=hidden if use_cache is None else hidden * 3)


class Model(nn.Module):
    """A model with the parts that transformers' have. `kind` is what its forward does to the logits."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.below, self.head = Below(), nn.Linear(4, 7, bias=kind == "bias")

    @property
    def base_model(self) -> nn.Module:
        return self if self.kind == "no base" else self.below

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.head = head

    def forward(self, input_ids: Tensor) -> Output:
        if self.kind == "mask":
            return Output(logits=self.head(self.below(input_ids, torch.ones_like(input_ids)).last_hidden_state))
        if self.kind == "other ids":
            return Output(logits=self.head(self.below(input_ids.flip(0)).last_hidden_state))
        options = {"input_ids": input_ids, "use_cache": False} if self.kind == "options" else None
        hidden = (self.below(**options) if options else self.below(input_ids)).last_hidden_state
        if self.kind == "hidden scaled":
            hidden = hidden * 2
        if self.kind == "last position":
            hidden = hidden[:, -1:]
        if self.kind == "slice":
            hidden = hidden[:, slice(0, None), :]
        logits = self.head(hidden)
        if self.kind == "twice":
            logits = self.head(hidden)
        if self.kind == "capped":
            logits = torch.tanh(logits)
        if self.kind == "scaled in place":
            logits /= 8
        if self.kind == "transposed":
            logits = logits.transpose(0, 1)
        auxiliary = hidden[0, 0, 0] if self.kind == "auxiliary" else None
        return Output(logits=logits, aux_loss=auxiliary)


CHANGED = ["bias", "no base", "mask", "other ids", "hidden scaled", "last position", "twice", "capped"]
CHANGED += ["scaled in place", "transposed", "auxiliary"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", CHANGED)
def test_logits_that_are_more_than_the_heads_product_stay_as_they_are(kind: str, device: str):
    with torch.device(device):
        model = Model(kind)
    head = model.head
    assert use_plain_head(model) is None
    assert model.head is head
    assert "forward" not in vars(head)
    assert "forward" not in vars(model.below)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["plain", "slice", "options"])
def test_a_plain_head_computes_the_loss(kind: str, device: str):
    with torch.device(device):
        model = Model(kind)
    weight = model.head.weight
    call = use_plain_head(model)
    assert type(model.head) is Head
    assert model.head.weight is weight
    ids = torch.randint(7, (2, 5), device=device)
    hidden = call.hidden(model, ids)
    assert hidden.shape == (2, 5, 4)
    if device == "cpu":
        # With the options that the model's own forward gives.
        assert torch.equal(model.head(hidden), model(ids).logits)


def test_a_head_with_hooks_stays():
    model = Model("plain")
    model.head.register_forward_hook(lambda module, given, output: output * 2)
    assert use_plain_head(model) is None


def test_hidden_states_of_float32_are_rounded_to_the_heads_dtype():
    """As transformers does for Mamba, whose residuals are float32 in a model of bf16."""
    model = tiny("mamba").bfloat16()
    ids, labels = batch("mamba")
    assert model.chunked_loss
    assert model.hf.backbone(ids).last_hidden_state.dtype == torch.float32
    logits = model.hf(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    assert torch.allclose(model(ids, labels), expected, rtol=1e-5)

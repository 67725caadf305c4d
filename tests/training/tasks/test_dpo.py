"""DPO: losses and figures against arithmetic by hand, its reference, and its refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from models.adapters import Lora, adapter_layers, initialise_adapters, inject, without_adapters
from models.initialise import initialise
from models.llama import Llama
from offload import KnobError
from tests.models.helpers.hf_models import tiny
from training.errors import UserError
from training.tasks.dpo import DPO, answer_log_probs

PAIRS = 3


def batch(reference: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (PAIRS, 2, 7), generator=generator)
    labels = torch.randint(40, (PAIRS, 2, 7), generator=generator)
    labels[:, :, :2] = -100
    labels[1, 0, 5:] = -100
    found = {"input_ids": ids, "labels": labels, "lengths": torch.tensor([[7, 7], [5, 7], [7, 7]])}
    return found | ({"reference": torch.randn(PAIRS, 2, generator=generator) * 3 - 18} if reference else {})


def llama() -> Llama:
    model = Llama(40, 16, 32, 2, 2, 2)
    initialise(model, 0)
    return model


class Fixed(nn.Module):
    """Gives the answers of each pair these log-probabilities, half of it at each of two labels."""

    def __init__(self, log_probs: list[list[float]]):
        super().__init__()
        self.log_probs = nn.Parameter(torch.tensor(log_probs))

    def forward(self, ids: Tensor, labels: Tensor, reduction: str) -> Tensor:
        assert reduction == "none"
        return -self.log_probs.reshape(-1, 1).expand(-1, 2) / 2


# By how much more the answers are probable than under the reference: 1 and -1; 0.5 and 2.
FOUND = [[-3.0, -6.0], [-4.5, -1.0]]
TWO = {
    "input_ids": torch.zeros(2, 2, 2, dtype=torch.int64),
    "labels": torch.tensor([[[1, 1], [1, 1]], [[-100, 1], [1, 1]]]),
    "lengths": torch.full((2, 2), 2),
    "reference": torch.tensor([[-4.0, -5.0], [-5.0, -3.0]]),
}


def nats(margin: float) -> float:
    return math.log1p(math.exp(-margin))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (nats(0.2) + nats(-0.15)) / 2),
        ({"beta": 0.5}, (nats(1.0) + nats(-0.75)) / 2),
        (
            {"label_smoothing": 0.25},
            (0.75 * nats(0.2) + 0.25 * nats(-0.2) + 0.75 * nats(-0.15) + 0.25 * nats(0.15)) / 2,
        ),
        (
            {"loss": "robust", "label_smoothing": 0.25},
            (0.75 * nats(0.2) - 0.25 * nats(-0.2) + 0.75 * nats(-0.15) - 0.25 * nats(0.15)) / 2 / 0.5,
        ),
        # Means of a token: 1/2 and -1/2; 0.5 and 2/2.
        ({"loss": "ipo"}, ((1.0 - 5) ** 2 + (0.5 - 1.0 - 5) ** 2) / 2),
    ],
)
def test_losses(keys: dict, expected: float) -> None:
    task, model = DPO(**keys), Fixed(FOUND)
    loss = task.loss(model, TWO)
    assert (loss.item(), loss.dtype) == (pytest.approx(expected, rel=1e-6), torch.float32)
    loss.backward()
    assert model.log_probs.grad.isfinite().all()


def test_figures_are_rewards() -> None:
    task = DPO(beta=0.5)
    loss, figures = task.loss_and_figures(Fixed(FOUND), TWO)
    found = {name: figure.item() for name, figure in zip(task.figures, figures, strict=True)}
    assert found == {
        "reward_chosen": pytest.approx(0.5 * (1 + 0.5) / 2),
        "reward_rejected": pytest.approx(0.5 * (-1 + 2) / 2),
        "reward_margin": pytest.approx(0.5 * (2 - 1.5) / 2),
        "reward_accuracy": 0.5,
    }
    assert not any(figure.requires_grad for figure in figures)
    assert {name: score.item() for name, score in task.scores(Fixed(FOUND), TWO).items()} == {
        "loss": loss.item()
    } | found


def test_an_equal_reward_is_not_right() -> None:
    even = TWO | {"reference": torch.tensor(FOUND)}
    assert DPO().scores(Fixed(FOUND), even)["reward_accuracy"].item() == 0
    assert DPO().loss(Fixed(FOUND), even).item() == pytest.approx(math.log(2))


def test_log_probabilities_are_those_of_the_answers_alone() -> None:
    given, model = batch(), llama()
    found = answer_log_probs(model, given)
    for pair in range(PAIRS):
        for place in (0, 1):
            # Without padding, and without the other rows.
            length = given["lengths"][pair, place]
            ids, labels = (given[name][pair, place, None, :length] for name in ("input_ids", "labels"))
            every = model(ids).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            torch.testing.assert_close(found[pair, place], every[labels != -100].sum())


def test_a_batch_weighs_its_pairs_and_counts_its_tokens() -> None:
    assert DPO().weight(batch()) == PAIRS
    assert DPO().units_in(batch()) == 7 * 5 + 5
    assert DPO().units(SimpleNamespace(batch_size=4, seq_len=16)) == 128


def test_a_reference_is_the_model_without_its_adapter() -> None:
    base, model = llama(), llama()
    inject(model, Lora(rank=2, alpha=4), torch.float32)
    with without_adapters(model):
        initialise(model, 0)
    initialise_adapters(model, 0)
    task, given = DPO(reference="adapter"), batch(reference=False)
    assert task.looks_ahead
    assert not task.needs_table
    assert task.loss(model, task.ahead(model, given)).item() == pytest.approx(math.log(2))
    for _, layer in adapter_layers(model):
        nn.init.normal_(layer.lora_B["default"].weight)
    with torch.no_grad():
        ahead = task.ahead(model, given)
        assert torch.equal(ahead["reference"], answer_log_probs(base, given))
        # An evaluation computes it beside the scores.
        assert task.scores(model, given)["loss"].item() == task.loss(model, ahead).item() != pytest.approx(math.log(2))


def test_the_model_trains_without_its_dropout_and_with_that_of_the_adapter() -> None:
    model = nn.Sequential(nn.Dropout(0.25), llama())
    inject(model, Lora(rank=2, alpha=4, dropout=0.125), torch.float32)
    assert "not 0.25" in DPO().fit(None, model)["dropout"]
    shares = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert (model[0].p, shares) == (0.0, {0.0, 0.125})
    assert DPO().fit(None, model) == {}


@pytest.mark.parametrize(
    ("name", "rates"),
    [("opt", {"attention_dropout": 0.2, "layerdrop": 0.5}), ("gemma", {"attention_dropout": 0.2}), ("gpt2", {})],
)
def test_nor_with_what_its_forward_drops_by_function(name: str, rates: dict[str, float]) -> None:
    """OPT by default 0.1 of every layer's output."""
    model, given = tiny(name, **rates).train(), batch()
    assert not torch.equal(answer_log_probs(model, given), answer_log_probs(model, given))
    DPO().fit(None, model)
    assert torch.equal(answer_log_probs(model, given), answer_log_probs(model.eval(), given))


def test_dropout_that_a_forward_reads_from_the_configuration_is_refused() -> None:
    model = tiny("falcon", hidden_dropout=0.1, attention_dropout=0.2)
    message = r"^task=dpo: .* falcon has some: take 'model.overrides=\{\w+_dropout: 0.0, \w+_dropout: 0.0\}'$"
    with pytest.raises(UserError, match=message):
        DPO().fit(None, model)
    DPO().fit(None, tiny("falcon", hidden_dropout=0.0, attention_dropout=0.0))


def test_a_copy_is_the_reference_of_an_evaluation_and_of_what_is_computed_ahead() -> None:
    model, copy = llama(), llama()
    nn.init.normal_(next(copy.parameters()))
    task, given = DPO(reference="copy"), batch(reference=False)
    assert task.looks_ahead
    assert task.needs_copy
    assert not task.needs_table
    task.reference_model = copy
    with torch.no_grad():
        expected = given | {"reference": answer_log_probs(copy, given)}
        assert torch.equal(task.ahead(copy, given)["reference"], expected["reference"])
        assert task.scores(model, given)["loss"].item() == task.loss(model, expected).item()


def test_a_cached_reference_is_found_by_the_index_of_samples() -> None:
    task = DPO(reference="cached")
    given = batch(reference=False) | {"index": torch.tensor([4, 0, 2])}
    assert task.needs_table
    assert not task.looks_ahead
    with pytest.raises(RuntimeError, match="not computed yet"):
        task.scores(llama(), task.prepared(given, 0))
    task.table = torch.arange(10.0).view(5, 2)
    prepared = task.prepared(given, 0)
    assert prepared["reference"].tolist() == [[8, 9], [0, 1], [4, 5]]
    assert "index" not in prepared
    assert "index" not in DPO(reference="adapter").prepared(given, 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"beta": 0.0}, "beta=0.0: must be above 0"),
        ({"loss": "hinge"}, "loss=hinge: must be sigmoid, robust or ipo"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing=0.1: has no effect on loss=ipo: take 0"),
        ({"loss": "robust"}, "label_smoothing=0.0: loss=robust needs one between 0 and 0.5"),
        ({"label_smoothing": 0.6}, "label_smoothing=0.6: must be at most 0.5"),
        ({"reference": "policy"}, "reference=policy: must be auto, adapter, cached or copy"),
    ],
)
def test_keys_that_cannot_be_right_are_refused(keys: dict, message: str) -> None:
    with pytest.raises(KnobError) as caught:
        DPO(**keys)
    assert str(caught.value) == message

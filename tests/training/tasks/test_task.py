"""The defaults of a task."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training.helpers.in_process import composed
from training.errors import UserError
from training.tasks.task import Task, loss_to_train


class Doubles(Task):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - 2 * batch["x"]).square().mean()


def test_defaults_are_those_of_examples():
    config, _ = composed("batch_size=6")
    task, model, batch = Doubles(), nn.Identity(), {"x": torch.ones(3, 1)}
    assert (task.unit, task.units(config), task.microbatches(config), task.flops(model, config)) == (
        "examples",
        6,
        1,
        None,
    )
    assert task.prepared(batch, 1) is batch
    assert {name: score.item() for name, score in task.scores(model, batch).items()} == {"loss": 1.0}


class OfTokens(Doubles):
    unit = "tokens"


def test_a_batch_counts_its_examples_or_the_tokens_that_have_a_label():
    rows = torch.arange(12).view(3, 4)
    labels = torch.tensor([[1, 2, -100], [-100, -100, -100], [-100, 5, -100]])
    masked = {"input_ids": torch.ones(3, 3), "labels": labels, "lengths": torch.tensor([3, 2, 2])}
    assert [(task.weight(rows), task.units_in(rows)) for task in (Doubles(), OfTokens())] == [(3, 3), (3, 9)]
    assert [(task.weight(masked), task.units_in(masked)) for task in (Doubles(), OfTokens())] == [(3, 3), (3, 7)]
    assert Doubles().weight({"images": torch.ones(4, 2, 2), "labels": torch.tensor([-100, 1, 2, 3])}) == 4


def test_a_dataset_without_shapes_and_a_task_without_samples_are_named():
    config, _ = composed("dataset=stdlib", "sample.every=3")
    with pytest.raises(UserError, match=r"^dataset=StdlibText: .*Doubles"):
        Doubles().meta_batch(config, 2)
    with pytest.raises(UserError, match=r"^sample\.every=3: Doubles has no samples"):
        Doubles().sampler(config, nn.Identity())


def test_a_loss_that_nothing_trains_for_is_refused():
    model, batch = nn.Linear(1, 1), {"x": torch.ones(3, 1)}
    assert loss_to_train(Doubles(), model, batch).requires_grad
    model.requires_grad_(False)
    with pytest.raises(UserError, match=r"^the loss depends on no parameter that trains: .* adapter\.targets$"):
        loss_to_train(Doubles(), model, batch)

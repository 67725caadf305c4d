"""One step of the loop: gradients by microbatch, their norm, clipping, and gradients that are not finite."""

import copy
import functools
import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from offload.modes.mode import Attached
from offload.modes.none import Resident
from offload.streams.stream_checker import CheckedStreams
from tests.models.helpers.small_diffusion import inputs_of, small
from tests.training.helpers.in_process import TINY_RUN, command_here, components_of, run_here
from training.batches import examples_in
from training.data.synthetic_images import SyntheticImages
from training.errors import UserError
from training.parallel.ranks import Share, shares_of
from training.planning.advice import nonfinite_advice
from training.run.loop import Loop, clip_scale, forward_backward, gradient_norm, looked_ahead
from training.run.recorder import Recorder
from training.tasks.causal_lm import CausalLM

SMALL = (*TINY_RUN, "steps=4", "log_every=1", "dataset=synthetic")


class Bigram(nn.Module):
    """A model of the next token given this one; forward returns the mean loss."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.dropout(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int = 5) -> Tensor:
    return torch.randint(11, (rows, 7), generator=torch.Generator().manual_seed(0))


def whole_batch(microbatches: int) -> Share:
    (share,) = shares_of(batch(), 1, microbatches, examples_in)
    return share


def with_gradients(*gradients: Tensor | None) -> nn.Module:
    model = nn.Module()
    for index, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        model.register_parameter(f"p{index}", parameter)
    return model


@functools.cache
def on_cpu(model: nn.Module) -> Attached:
    return Resident().attach(model, CheckedStreams(torch.device("cpu")))


@pytest.mark.parametrize("microbatches", [2, 3, 5])
def test_loss_and_gradients_are_those_of_the_whole_batch(microbatches: int):
    whole = Bigram()
    parts = copy.deepcopy(whole)
    one = forward_backward(CausalLM(), on_cpu(whole), whole_batch(1), seed=0, step=1).sum()
    found = forward_backward(CausalLM(), on_cpu(parts), whole_batch(microbatches), seed=0, step=1)
    assert found.shape == (microbatches,)
    other = found.sum()
    assert (other.shape, other.dtype) == ((), torch.float32)
    torch.testing.assert_close(one, other)
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


class Figured(CausalLM):
    """Shows the mean of the first tokens; looks ahead at their double."""

    figures = ("first", "rows")

    def loss_and_figures(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.loss(model, batch), (batch[:, 0].float().mean(), torch.tensor(float(len(batch))))

    def ahead(self, model: nn.Module, batch: Tensor) -> Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        return batch * 2


def test_figures_are_means_over_the_step_as_the_loss_is():
    model = Bigram()
    found = forward_backward(Figured(), on_cpu(model), whole_batch(2), seed=0, step=1)
    assert (found.shape, found.dtype) == ((2, 3), torch.float32)
    assert torch.equal(found[:, 0], forward_backward(CausalLM(), on_cpu(model), whole_batch(2), seed=0, step=1))
    _, first, rows = found.sum(0)
    assert first.item() == pytest.approx(batch()[:, 0].float().mean().item())
    # Three rows of five, and two of five.
    assert rows.item() == pytest.approx(3 * 0.6 + 2 * 0.4)


def test_what_a_task_wants_before_a_step_is_computed_without_a_trace():
    model = Bigram()
    found = looked_ahead(Figured(), on_cpu(model), whole_batch(2).parts)
    assert torch.equal(torch.cat(found), batch() * 2)
    assert model.training
    assert model.embed.weight.grad is None


class Masked(CausalLM):
    """Trains on the labels that are not 0; where there are none, the loss is 0/0."""

    def weight(self, batch: Tensor) -> int:
        return int((batch[:, 1:] != 0).sum())

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model.head(model.embed(batch[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


def test_a_microbatch_without_a_label_adds_nothing_though_its_loss_is_no_number():
    rows, whole = batch(6), Bigram()
    rows[[0, 3, 4, 5], 1:] = 0
    assert Masked().loss(whole, rows[:1]).isnan()
    parts = copy.deepcopy(whole)
    losses = []
    for model, microbatches in ((whole, 1), (parts, 6)):
        (share,) = shares_of(rows, 1, microbatches, Masked().weight)
        losses.append(forward_backward(Masked(), on_cpu(model), share, seed=0, step=1))
    torch.testing.assert_close(losses[0].sum(), losses[1].sum())
    assert (losses[1] == 0).tolist() == [True, False, False, True, True, True]
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_random_numbers_depend_on_seed_step_and_microbatch_alone():
    model = Bigram(dropout=0.5)
    losses = {
        (seed, step): forward_backward(CausalLM(), on_cpu(model), whole_batch(2), seed, step).sum().item()
        for seed in (0, 1)
        for step in (1, 2)
    }
    assert len(set(losses.values())) == 4
    torch.rand(5)
    assert forward_backward(CausalLM(), on_cpu(model), whole_batch(2), 1, 2).sum().item() == losses[1, 2]


def test_the_norm_is_that_of_all_gradients():
    model = with_gradients(torch.randn(5, 3), None, torch.randn(7))
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert gradient_norm(model, {}) == pytest.approx(expected.item(), rel=1e-6)


def test_norms_that_are_known_are_not_computed_again():
    model = with_gradients(torch.full((2,), math.nan), torch.tensor([4.0]))
    assert gradient_norm(model, {model.p0: torch.tensor(3.0)}) == pytest.approx(5.0)
    # A gradient that was released is in no `.grad`.
    model.p0.grad = None
    assert gradient_norm(model, {model.p0: torch.tensor(3.0)}) == pytest.approx(5.0)
    assert gradient_norm(model, {}) == pytest.approx(4.0)


def test_the_norm_of_bf16_gradients_is_float32():
    gradient = torch.randn(1000).bfloat16()
    model = with_gradients(gradient)
    expected = gradient.double().norm().item()
    assert gradient_norm(model, {}) == pytest.approx(expected, rel=1e-6)
    assert gradient.norm().item() != pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(value: float):
    model = with_gradients(torch.randn(5), torch.tensor([1.0, value]))
    assert not math.isfinite(gradient_norm(model, {}))


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 100.0])
def test_clipping_is_torchs(clip_norm: float):
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0))
    model = with_gradients(gradient.clone())
    scale = clip_scale(gradient_norm(model, {}), clip_norm)
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    torch.testing.assert_close(gradient * scale, model.p0.grad, rtol=1e-6, atol=0)


def test_small_gradients_are_not_scaled():
    assert clip_scale(5.0, None) == 1.0
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(0.0, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == pytest.approx(0.25)


def run(folder: Path, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    result = command_here(*SMALL, *overrides, f"hydra.run.dir={folder}")
    assert result.returncode == status, result.stdout + result.stderr
    return result


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_drawn_after_a_step_does_not_depend_on_its_microbatches(tmp_path: Path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Recorder, "end_step", lambda *_: drawn.append(torch.rand(1).item()))
    for count in (1, 2):
        run(tmp_path / str(count), f"microbatches={count}", "steps=2", "log_every=9")
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


# Adam moves every weight by lr, so activations overflow after one step.
OVERFLOW = ("optimizer.lr=1e30",)


def test_what_a_signal_asks_for_is_saved_once_all_ranks_have_ended_their_updates():
    """One that comes when they were not asked for that is for the step after."""
    calls = Mock()
    calls.due.return_value = False
    config = SimpleNamespace(steps=9)
    job = SimpleNamespace(components=SimpleNamespace(config=config), checkpoints=calls, ranks=calls)
    arriving = iter((None, *["SIGTERM"] * 3))
    stop = type("Stop", (), {"signal": property(lambda _: next(arriving))})()
    loop = Loop(job, calls, stop)
    assert not loop._save_or_stop(3, batch())
    calls.save.assert_not_called()
    next(arriving)
    assert loop._save_or_stop(4, batch())
    assert [name for name, *_ in calls.method_calls if name != "due"] == ["check_equal", "save"]


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("optimizer=host_adamw", "offload=layer_stream", "clip_norm=null"), marks=pytest.mark.slow)],
)
def test_stop_ends_the_run_with_one_line(tmp_path: Path, options: tuple[str, ...]):
    result = run(tmp_path, *options, *OVERFLOW, status=1)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: step 2: the gradient norm is ")
    assert "on_nonfinite=stop" in line
    assert f"take {nonfinite_advice(components_of(*SMALL, *options, *OVERFLOW).config)}" in line
    assert len(records(tmp_path)) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_values_of_the_data_that_are_not_finite_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = SyntheticImages.batch

    def damaged(self: SyntheticImages, index: int) -> dict[str, Tensor]:
        batch = whole(self, index)
        batch["images"][1, 0, 3, 3] = math.nan if index == 1 else 0
        return batch

    monkeypatch.setattr(SyntheticImages, "batch", damaged)
    images = ("dataset=synthetic_images", "dataset.shape=[1,16,16]", "dataset.num_classes=8", "batch_size=2")
    words = (
        r"^step 2: images of example 1 in its batch has values that are not finite \(examples 2 to 3 of the run, from"
        r" 0\): mend that example of SyntheticImages, or leave it out$"
    )
    with pytest.raises(UserError, match=words):
        run_here(tmp_path, "model=unet_small", *images, "steps=3", "tracking=disabled")


def test_captions_padded_without_a_mask_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = SyntheticImages.batch

    def padded(self: SyntheticImages, index: int) -> dict[str, Tensor]:
        batch = whole(self, index)
        batch["encoder_hidden_states"][1, 2:] = 0
        return batch

    monkeypatch.setattr(SyntheticImages, "batch", padded)
    small("ltx").network.save_config(tmp_path / "ltx")
    model = ("model=diffusers", f"model.source={tmp_path}/ltx", "model.weights=null", "task=flow_matching")
    noisy, condition = inputs_of("ltx")
    images = ("dataset=synthetic_images", f"dataset.shape={[*noisy.shape[1:]]}", "batch_size=2")
    texts = f"dataset.condition={{encoder_hidden_states:[5,{condition['encoder_hidden_states'].shape[-1]}]}}"
    words = "^step 1: encoder_hidden_states is padded with zeros .*: give encoder_attention_mask too, bool"
    with pytest.raises(UserError, match=words):
        run_here(tmp_path / "run", *model, *images, texts, "steps=2", "tracking=disabled")


def test_skip_continues_the_run_and_counts(tmp_path: Path):
    run(tmp_path, "optimizer=host_adamw", "offload=layer_stream", *OVERFLOW, "on_nonfinite=skip")
    written = records(tmp_path)
    assert [record["train/skipped_steps"] for record in written] == [0, 1, 2, 3]
    assert all(record["optimizer/gparams_per_s"] == 0 for record in written[2:])
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "ok"

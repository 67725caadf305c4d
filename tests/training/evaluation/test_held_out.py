"""Evaluation between steps: the same in every mode and after resuming, and without a trace in training."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload import acquire, release
from tests.models.helpers.small_diffusion import inputs_of, small
from tests.training.helpers.in_process import TINY_RUN, composed, run_here
from tests.training.helpers.modes import small_modes
from training.data.datasets import StdlibText
from training.errors import UserError
from training.evaluation.held_out import Evaluation, mean_scores, prepared_parts, scores_of_parts
from training.metrics import step_timer
from training.tasks.causal_lm import CausalLM
from training.tasks.flow_matching import FlowMatching

CPU = torch.device("cpu")
EVALUATES = ("eval.every=2", "eval.batches=2")
RUN = (*TINY_RUN, "dataset=stdlib", "dataset.max_tokens=20000", "dataset.eval_share=0.05", "checkpoint.on_signal=true")


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def values(folder: Path, *keys: str) -> list[tuple]:
    """Returns step and values of the records that have all `keys`."""
    return [
        (record["train/step"], *(record[key] for key in keys))
        for record in records(folder)
        if record.keys() >= set(keys)
    ]


class Noisy(nn.Module):
    """A model with dropout, of which one part stays in eval() in training; the loss is random while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 11)
        self.head.eval()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        logits = self.head(self.dropout(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(11, (size, 7), generator=generator) for size in sizes]


def never() -> bool:
    return False


def loss_of(model: nn.Module, given: list[torch.Tensor], rows: int, seed: int) -> float:
    parts = prepared_parts(CausalLM(), given, rows, seed)
    return mean_scores(scores_of_parts(CausalLM(), model, parts, seed, CPU, never))["loss"]


def test_the_loss_is_the_mean_over_sequences_and_nothing_else_changes():
    model, given = Noisy(), batches(5, 5, 2)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = torch.get_rng_state()
    loss = loss_of(model, given, 3, 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, module in model.named_modules() if module.training] == ["", "embed", "dropout"]
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.embed.weight.grad is None
    model.eval()
    with torch.no_grad():
        each = [model(row[None, :-1], row[None, 1:]).item() for batch in given for row in batch]
    assert loss == pytest.approx(sum(each) / 12, rel=1e-6)


def test_captions_padded_without_a_mask_are_refused():
    noisy, condition = inputs_of("ltx", tokens=5)
    condition["encoder_hidden_states"][1, 3:] = 0
    config, _ = composed(*TINY_RUN, "microbatches=1")
    evaluation, streams = Evaluation(config, FlowMatching(), ({"images": noisy, **condition},)), acquire("cpu")
    try:
        with pytest.raises(UserError, match="evaluation: encoder_hidden_states is padded with zeros in some examples"):
            evaluation.metrics(small("ltx"), streams, never)
    finally:
        release(streams)


def test_a_model_that_draws_draws_the_same_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nn.Dropout, "eval", lambda self: self)
    monkeypatch.setattr(nn.Module, "eval", lambda self: self)
    model, given = Noisy(), batches(4)
    losses = {loss_of(model, given, 4, seed) for seed in (7, 7, 8)}
    assert len(losses) == 2


def test_a_stop_or_an_error_leaves_the_model_as_it_was():
    model = Noisy()
    answers = iter([False, True])
    assert scores_of_parts(CausalLM(), model, batches(2, 2, 2), 0, CPU, lambda: next(answers)) is None
    assert model.dropout.training
    with pytest.raises(IndexError):
        loss_of(model, [torch.full((1, 3), 99)], 1, 0)
    assert model.dropout.training
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.usefixtures("small_activations")
def test_every_mode_evaluates_alike_and_trains_as_without(tmp_path: Path):
    # Updates that begin inside backward, and may last until the evaluation needs them; microbatches of 2, 1 and 1.
    updates = ("optimizer=host_adamw", "clip_norm=null")
    job = (*RUN, *updates, "precision=bf16", "microbatches=3", "steps=4", "log_every=3")
    run_here(tmp_path / "without", *job)
    trained = values(tmp_path / "without", "train/loss", "train/grad_norm")
    evaluated = None
    for offload, knobs in small_modes().items():
        folder = tmp_path / offload
        found = run_here(folder, *job, "eval.every=2", "eval.batches=1", f"offload={offload}", *knobs)
        assert values(folder, "train/loss", "train/grad_norm") == trained, offload
        losses = values(folder, "eval/loss")
        evaluated = evaluated or losses
        assert losses == evaluated, offload
        assert found["eval/final_loss"] == losses[-1][1]
    # Before the first step, at steps that are logged and at others, and after the last.
    assert [step for step, _ in evaluated] == [0, 2, 4]
    assert evaluated[-1][1] < evaluated[0][1]


@pytest.mark.slow
def test_an_evaluation_counts_in_no_time_and_no_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock, compute = [0.0], CausalLM.scores

    def slow(*arguments):
        clock[0] += 1
        return compute(*arguments)

    monkeypatch.setattr(step_timer, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(CausalLM, "scores", slow)
    monkeypatch.setattr("training.run.meters.StepMeter._speed", lambda self, step_s, _: {"perf/step_ms": step_s * 1e3})
    keys = ("transfer/h2d_gib", "transfer/d2h_gib", "perf/step_ms")
    for folder, overrides in (("with", EVALUATES), ("without", ())):
        run_here(tmp_path / folder, *RUN, "offload=layer_stream", *overrides)
    assert clock[0] == 4 * 2
    assert values(tmp_path / "with", *keys) == values(tmp_path / "without", *keys)
    assert values(tmp_path / "with", "perf/step_ms") == [(2, 0.0), (4, 0.0), (6, 0.0)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluates before the first step, after the third and after the last."""
    folder = tmp_path_factory.mktemp("whole")
    run_here(folder, *RUN, "eval.every=3", "eval.batches=3")
    return folder


@pytest.mark.parametrize("step", [0, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 6))])
def test_a_signal_ends_an_evaluation_and_the_resumed_run_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, step: int
):
    calls, compute = [], CausalLM.scores

    def signalled(*arguments):
        calls.append(1)
        # In the second of the three batches of an evaluation.
        if len(calls) == step + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "scores", signalled)
        stopped = run_here(tmp_path / "run", *RUN, "eval.every=3", "eval.batches=3")
    assert (stopped["status"], stopped["steps"], len(calls)) == ("stopped", step, step + 2)
    finished = run_here(tmp_path / "run", *RUN, "eval.every=3", "eval.batches=3", "resume=auto")
    assert finished["status"] == "ok"
    for keys in (("eval/loss",), ("train/loss", "train/grad_norm")):
        assert values(tmp_path / "run", *keys) == values(whole, *keys)
    assert finished["train/first_loss"] == values(whole, "train/first_loss")[0][1]


@pytest.mark.slow
def test_a_resumed_run_repeats_and_loses_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = (*RUN, *EVALUATES, "checkpoint.every=4")
    run_here(tmp_path / "run", *saved)
    whole = values(tmp_path / "run", "eval/loss")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    # Killed before its first checkpoint, when it had evaluated other weights; and after step 4.
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text('{"train/step": 0, "eval/loss": 1.0, "eval/ms": 1.0}\n')
    run_here(tmp_path / "first", *saved, "resume=auto")
    at_4 = f"resume={tmp_path / 'run' / 'checkpoints' / 'step-00000004'}"
    run_here(tmp_path / "run", *saved, at_4)
    run_here(tmp_path / "elsewhere", *saved, at_4, "offload=layer_stream")
    assert values(tmp_path / "first", "eval/loss") == values(tmp_path / "run", "eval/loss") == whole
    assert len(records(tmp_path / "run")) == len(lines)
    assert values(tmp_path / "elsewhere", "eval/loss") == whole[2:]
    # Other batches are refused, in number and in content; when to evaluate may change.
    with pytest.raises(UserError, match=r"eval\.batches: was 2, is 3: give the old values"):
        run_here(tmp_path / "new", *saved, at_4, "eval.batches=3")
    run_here(tmp_path / "new", *saved, at_4, "eval.every=5")
    assert [step for step, _ in values(tmp_path / "new", "eval/loss")] == [5, 6]
    monkeypatch.setattr(StdlibText, "eval_batches", lambda self, count: batches(4))
    with pytest.raises(UserError, match=r"the dataset has changed: its held-out batches are not the same; restore it"):
        run_here(tmp_path / "other", *saved, at_4)


def test_without_a_held_out_split_a_run_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(UserError) as refusal:
        run_here(tmp_path / "small", *RUN, *EVALUATES, "dataset.max_tokens=500")
    assert str(refusal.value).startswith("eval.every=2: the held-out text is too short for a sequence of seq_len=32: ")
    assert "a larger dataset.eval_share (it is 0.05)" in str(refusal.value)

    class Mine:
        vocab_size = 257

        def __init__(self, **arguments):
            self.inner = StdlibText(max_tokens=20000, **arguments)
            self.batch = self.inner.batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.data.datasets.instantiate", lambda node, **given: Mine(**given))
        patch.setattr(Evaluation, "due", lambda self, step: pytest.fail("it was built"))
        with pytest.raises(UserError, match=r"^eval\.every=2: Mine has no held-out split: give it a method eval_batch"):
            run_here(tmp_path / "mine", *RUN, *EVALUATES)

"""Samples between steps: the same in every mode and after resuming, and without a trace in training."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.helpers.in_process import TINY_RUN, composed, run_here
from tests.training.helpers.modes import small_modes
from tests.training.helpers.scripted import Scripted
from training.errors import UserError
from training.evaluation.samples import Samples
from training.planning.plan_only import plan_only
from training.tasks import text_samples
from training.tasks.causal_lm import CausalLM

# Updates that begin inside backward, and may last until the sample needs them.
UPDATES = ("optimizer=host_adamw", "clip_norm=null")
RUN = (*TINY_RUN, "dataset=stdlib", "dataset.max_tokens=20000", "checkpoint.on_signal=true", "precision=bf16", *UPDATES)
BYTES = "dataset.tokenizer=null"
SAMPLES = ("sample.every=4", "sample.tokens=12", "sample.prompt='def main('", "sample.temperature=2")


def records(folder: Path, name: str = "samples.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["train/loss"] for record in records(folder, "metrics.jsonl") if "train/loss" in record]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that samples before the first step, after the fourth and after the last."""
    folder = tmp_path_factory.mktemp("whole")
    run_here(folder, *RUN, *SAMPLES)
    return folder


def test_training_is_as_without_samples(whole: Path, tmp_path: Path):
    run_here(tmp_path, *RUN)
    assert losses(tmp_path) == losses(whole)
    assert not (tmp_path / "samples.jsonl").exists()
    given = records(whole)
    assert [(record["train/step"], record["prompt"]) for record in given] == [(n, "def main(") for n in (0, 4, 6)]
    assert all(record["text"].startswith("def main(") and len(record["text"]) > 12 for record in given)
    assert len({record["text"] for record in given}) == 3


# scripts/generate.py is tested with all modes.
@pytest.mark.parametrize("offload", ["layer_stream", "shard_offload", "bounce_linear_swap"])
@pytest.mark.slow
def test_modes_sample_and_train_alike(whole: Path, tmp_path: Path, offload: str):
    run_here(tmp_path, *RUN, *SAMPLES, f"offload={offload}", *small_modes()[offload], "recompute=block")
    assert records(tmp_path) == records(whole)
    assert losses(tmp_path) == losses(whole)


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_signal_ends_a_sample_and_the_resumed_run_makes_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
):
    calls, generate = [], text_samples.generate

    def signalled(*arguments, **settings):
        calls.append(1)
        for token in generate(*arguments, **settings):
            if len(calls) == [0, 4, 6].index(step) + 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield token

    with monkeypatch.context() as patch:
        patch.setattr(text_samples, "generate", signalled)
        stopped = run_here(tmp_path, *RUN, *SAMPLES)
    assert (stopped["status"], stopped["steps"]) == ("stopped", step)
    assert run_here(tmp_path, *RUN, *SAMPLES, "resume=auto")["status"] == "ok"
    assert records(tmp_path) == records(whole)
    assert losses(tmp_path) == losses(whole)


def test_a_rewound_run_drops_later_samples_even_without_making_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_here(tmp_path, *RUN, *SAMPLES, "checkpoint.every=4")
    lines = [line for line in capsys.readouterr().out.split("\n") if line.startswith("sample after step ")]
    assert len(lines) == 3
    assert all(line.isprintable() and ": def main(" in line for line in lines)
    at_4 = f"resume={tmp_path / 'checkpoints' / 'step-00000004'}"
    run_here(tmp_path, *RUN, at_4)
    assert [record["train/step"] for record in records(tmp_path)] == [0, 4]


def test_logits_that_are_not_finite_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config, _ = composed(*RUN, *SAMPLES, BYTES)
    model = Scripted(98)
    model.register_forward_hook(lambda module, given, logits: logits * float("nan"))
    assert Samples.of(config, CausalLM(), model).sample(model, torch.device("cpu"), lambda: False) is None
    assert "no sample: the model's logits are not finite" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((), "sample.every=4: SyntheticTokens has no key dataset.tokenizer"),
        (
            ("dataset=stdlib", BYTES, "sample.tokens=24"),
            "sample.tokens=24: with a prompt of 9 tokens that is more than seq_len=32: ",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_one_line(overrides: tuple[str, ...], problem: str):
    config, invocation = composed(*TINY_RUN, *SAMPLES, *overrides)
    with pytest.raises(UserError) as refusal:
        Samples.of(config, CausalLM(), Scripted())
    assert str(refusal.value).startswith(problem)
    with pytest.raises(UserError) as of_plan:
        plan_only(config, invocation)
    assert str(of_plan.value) == str(refusal.value)


def test_a_model_without_a_cache_is_refused():
    config, _ = composed(*RUN, *SAMPLES)
    with pytest.raises(
        UserError, match=r"^sample\.every=4: Linear cannot generate text: give it a method key_value_cache"
    ):
        Samples.of(config, CausalLM(), nn.Linear(1, 1))

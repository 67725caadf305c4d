"""The cached reference: computed once, kept beside checkpoints, and refused where it is another's."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.helpers.in_process import SMALL_MODEL, composed, run_here
from training.data.chats.preferences import Preferences
from training.errors import UserError
from training.evaluation.reference import beginning_of, fill_reference, saved_reference
from training.run.build import build
from training.runs.files import REFERENCE_FILE

WORDS = ("red", "green", "blue", "grey")


def rows(count: int = 12) -> list[dict[str, str]]:
    return [
        {"prompt": f"Name {number}", "chosen": WORDS[number % 4], "rejected": "no " * (number % 3) + str(number)}
        for number in range(count)
    ]


@pytest.fixture
def overrides(tmp_path: Path) -> tuple[str, ...]:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    given = "task=dpo", "dataset=preferences", f"dataset.files={pairs}", "dataset.eval_share=0.25", "seq_len=48"
    small = (key for key in SMALL_MODEL if not key.startswith("dataset"))
    return (*small, *given, "steps=4", "log_every=1", "warmup_steps=1", "tracking=disabled")


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[dict]:
    keys = ("train/step", "train/loss", "train/grad_norm", "eval/loss", "train/reward_margin", "eval/reward_chosen")
    return [{key: record[key] for key in keys if key in record} for record in records(folder)]


def test_the_first_loss_is_that_of_no_difference_and_rewards_follow(tmp_path: Path, overrides) -> None:
    run_here(tmp_path / "run", *overrides, "eval.every=2", "steps=8", "optimizer.lr=0.01")
    before, first, *_, last = records(tmp_path / "run")
    assert before["eval/loss"] == first["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert before["eval/reward_margin"] == pytest.approx(0, abs=1e-5)
    assert last["train/loss"] < 0.5
    assert last["train/reward_margin"] > 0.5
    assert last["eval/reward_margin"] == pytest.approx(
        last["eval/reward_chosen"] - last["eval/reward_rejected"], abs=1e-5
    )
    table = load_file(tmp_path / "run" / REFERENCE_FILE)["reference"]
    assert table.shape == (12, 2)
    assert (table < 0).all()


@pytest.mark.slow
def test_a_run_resumes_with_the_adapter_that_is_switched_off(tmp_path: Path, overrides) -> None:
    keys = (*overrides, "eval.every=2", "optimizer.lr=0.01", "adapter=lora", "adapter.dropout=0.1")
    run_here(tmp_path / "whole", *keys)
    run_here(tmp_path / "parts", *keys, "steps=2", "checkpoint.every=2")
    run_here(tmp_path / "parts", *keys, "resume=auto")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert not (tmp_path / "parts" / REFERENCE_FILE).exists()


def test_a_run_that_resumes_has_the_reference_of_its_beginning(tmp_path: Path, overrides) -> None:
    keys = (*overrides, "eval.every=2", "optimizer.lr=0.01")
    run_here(tmp_path / "whole", *keys)
    run_here(tmp_path / "parts", *keys, "steps=2", "checkpoint.every=2")
    run_here(tmp_path / "parts", *keys, "resume=auto")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    # Also elsewhere, from where its own checkpoints resume then.
    checkpoint = tmp_path / "parts/checkpoints/step-00000002"
    run_here(tmp_path / "other", *keys, f"resume={checkpoint}", "checkpoint.every=3", "steps=3")
    run_here(tmp_path / "other", *keys, "resume=auto")
    assert curve(tmp_path / "other")[-1] == curve(tmp_path / "whole")[-1]


def test_pairs_of_which_none_is_held_out_are_not_evaluated_on(tmp_path: Path, overrides) -> None:
    with pytest.raises(UserError) as caught:
        run_here(tmp_path / "run", *overrides, "eval.every=2", "dataset.eval_share=0.01")
    given = "eval.every=2: no example is held out: give a larger dataset.eval_share (it is 0.01), or eval.every=null"
    assert str(caught.value) == given


def test_another_reference_is_refused(tmp_path: Path, overrides) -> None:
    run_here(tmp_path / "run", *overrides, "checkpoint.every=4")
    checkpoint, path = tmp_path / "run/checkpoints/step-00000004", tmp_path / "run" / REFERENCE_FILE
    config, _ = composed(*overrides)
    keys = {"files": str(tmp_path / "pairs.jsonl"), "seed": 0, "seq_len": 48, "batch_size": 4, "eval_share": 0.25}
    pairs = Preferences(**keys)
    kept = path.read_bytes()

    def message() -> str:
        with pytest.raises(UserError) as caught:
            saved_reference(checkpoint, config, pairs)
        found = str(caught.value)
        assert found.startswith(f"resume={checkpoint}: {path} ")
        assert found.endswith(f": restore it, or begin a new run from these weights, model.weights={checkpoint}")
        return found

    assert torch.equal(saved_reference(checkpoint, config, pairs), load_file(path)["reference"])
    others = Preferences(**keys | {"eval_share": 0.5})
    with pytest.raises(UserError, match="is the reference of other data"):
        saved_reference(checkpoint, config, others)
    config.seed = 1
    assert "is the reference of a run that began from other weights" in message()
    config.seed = 0
    origin = {"data_sha256": pairs.data_sha256, "beginning_sha256": beginning_of(config)}
    save_file({"reference": torch.zeros(3, 2)}, path, origin)
    assert "is not the reference of 12 pairs" in message()
    path.write_bytes(kept[:50])
    assert "cannot be read" in message()
    path.unlink()
    assert "is missing, the reference of the run" in message()


def test_a_request_to_stop_ends_it_early(tmp_path: Path, overrides) -> None:
    config, invocation = composed(*overrides, run_dir=tmp_path)
    with build(config, invocation) as job:
        looks = iter([False, False, True])
        assert not fill_reference(job.components, job.attached.trained, job.dataset, job.ranks, lambda: next(looks))
        assert job.components.task.table is None
        assert not (tmp_path / REFERENCE_FILE).exists()
        assert fill_reference(job.components, job.attached.trained, job.dataset, job.ranks, lambda: False)
        assert job.components.task.table.isfinite().all()


def test_log_probabilities_that_are_not_finite_are_refused(tmp_path: Path, overrides) -> None:
    config, invocation = composed(*overrides, run_dir=tmp_path)
    with build(config, invocation) as job:
        with torch.no_grad():
            job.components.model.lm_head.weight.fill_(torch.nan)
        with pytest.raises(UserError, match="the model gives sample 0 a log-probability that is not finite"):
            fill_reference(job.components, job.attached.trained, job.dataset, job.ranks, lambda: False)

"""Batches whose examples have unequally many labels: every split of a step, and every mode, trains on its one mean."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.helpers.in_process import TINY_RUN, run_here
from tests.training.helpers.modes import small_modes
from tests.training.parallel.conftest import run_ranks
from tests.training.run.test_loop import records
from training.data.datasets import SyntheticTokens
from training.errors import UserError

RUN = (
    *TINY_RUN, "steps=4", "log_every=1", "eval.every=3", "eval.batches=3", "precision=fp32", "dataset.vocab_size=257",
)  # fmt: skip
# The labels of each row, of seq_len=32: some have none, first, last, between, and two in a row, the half of a batch.
LABELS = [(30, 0, 3, 11), (0, 7, 1, 0), (0, 0, 32, 2), (5, 1, 0, 0)]


def labelled(tokens: Tensor, counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Returns rows of which the last tokens, `counts` of each row, are trained on."""
    labels = tokens[:, 1:].clone()
    for row, count in zip(labels, counts, strict=True):
        row[: len(row) - count] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels, "lengths": torch.full((len(tokens),), labels.shape[1])}


@pytest.fixture(autouse=True)
def _masked(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, held_out = SyntheticTokens.batch, SyntheticTokens.eval_batches
    monkeypatch.setattr(SyntheticTokens, "batch", lambda self, index: labelled(drawn(self, index), LABELS[index % 4]))
    monkeypatch.setattr(
        SyntheticTokens,
        "eval_batches",
        lambda self, count: [
            labelled(batch, counts) for batch, counts in zip(held_out(self, count), LABELS[:count], strict=True)
        ],
    )


def curve(folder: Path) -> list[tuple[float, ...]]:
    """Returns step, loss, norm of the gradients and held-out loss of each record, -1 for what it lacks."""
    keys = ("train/step", "train/loss", "train/grad_norm", "eval/loss")
    return [tuple(record.get(key, -1.0) for key in keys) for record in records(folder)]


def close(one: list[tuple], other: list[tuple]) -> bool:
    return all(left == pytest.approx(right, rel=2e-5) for left, right in zip(one, other, strict=True))


def test_every_split_trains_and_evaluates_as_the_whole_batch(tmp_path: Path):
    for parts in (1, 2, 4):
        run_here(tmp_path / f"{parts}", *RUN, f"microbatches={parts}")
    whole = curve(tmp_path / "1")
    assert [step for step, *_, held_out in whole if held_out > 0] == [0, 3, 4]
    assert close(curve(tmp_path / "2"), whole)
    assert close(curve(tmp_path / "4"), whole)


@pytest.mark.slow
@pytest.mark.usefixtures("small_activations")
def test_every_mode_trains_alike_with_microbatches_without_a_label(tmp_path: Path):
    updates = ("optimizer=host_adamw", "clip_norm=null", "microbatches=4")
    run_here(tmp_path / "without", *RUN, *updates)
    for offload, knobs in small_modes().items():
        run_here(tmp_path / offload, *RUN, *updates, f"offload={offload}", *knobs)
        assert curve(tmp_path / offload) == curve(tmp_path / "without"), offload


@pytest.mark.slow
def test_ranks_that_divide_rows_train_and_evaluate_as_one_device_though_one_has_no_label(tmp_path: Path):
    """Of several rows the first rank has no label, and two microbatches have none at all."""
    run_here(tmp_path / "one", *RUN, "microbatches=4")
    run_ranks(tmp_path / "two", "devices=2", "parallel.sequence=2", run=(*RUN, "microbatches=4"))
    assert close(curve(tmp_path / "two"), curve(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("offload=layer_stream", "optimizer=host_adamw", "parallel.homes=shared")])
def test_ranks_train_as_one_device_though_one_has_no_label(tmp_path: Path, keys: tuple[str, ...]):
    # In place of those of `run_ranks`.
    given = ("checkpoint.every=null", "steps=4", "eval.batches=3", "precision=fp32", "dataset.vocab_size=257", *keys)
    for microbatches in (1, 2):
        run_here(tmp_path / f"one{microbatches}", *RUN, *keys[:2], f"microbatches={2 * microbatches}")
        run_ranks(tmp_path / f"two{microbatches}", *given, f"microbatches={microbatches}", "devices=2")
    assert curve(tmp_path / "two1") == curve(tmp_path / "one1")
    # Each rank adds its own microbatches first.
    assert close(curve(tmp_path / "two2"), curve(tmp_path / "one2"))


def test_a_step_without_a_label_ends_the_run_and_names_its_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = (*TINY_RUN, "microbatches=2")
    monkeypatch.setitem(globals(), "LABELS", [(1, 1, 1, 1), (0, 0, 0, 0), *LABELS[2:]])
    with pytest.raises(UserError) as refusal:
        run_here(tmp_path / "numbers", *job)
    assert str(refusal.value) == (
        "step 2: nothing in its batch is trained on (examples 4 to 7 of the run, from 0): leave such examples out of"
        " the data, or take a larger batch_size"
    )
    names = {1: "chats.jsonl lines 5 to 8"}
    monkeypatch.setattr(SyntheticTokens, "names", lambda self, index: names[index], raising=False)
    with pytest.raises(UserError, match=r"^step 2: nothing in its batch is trained on \(chats\.jsonl lines 5 to 8\): "):
        run_here(tmp_path / "names", *job)


def test_an_evaluation_without_a_label_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "LABELS", [(0, 0, 0, 0)] * 3 + [(1, 1, 1, 1)])
    with pytest.raises(UserError, match=r"^eval\.every=3: nothing in the 3 held-out batches has a label: hold out "):
        run_here(tmp_path, *RUN)
    assert not (tmp_path / "metrics.jsonl").exists()

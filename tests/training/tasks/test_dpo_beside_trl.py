"""DPO beside TRL's DPOTrainer: the same files, template and order give the same losses, gradients and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers.pretrained_folder import save_pretrained
from tests.training.tasks.beside_trl import LORA, ROWS, STEPS, adapter_of, assert_alike, ours, records_of, trainer
from training.data.chats.preferences import Preferences

OURS = ("task=dpo", "dataset=preferences", "seq_len=100")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]


def rows() -> list[dict[str, Any]]:
    """Pairs of different lengths, with one turn and with two before the answer."""
    found = []
    for number in range(STEPS * ROWS):
        prompt = [{"role": "user", "content": " ".join(WORDS[: 1 + number % 5])}]
        if number % 3 == 0:
            prompt += [{"role": "assistant", "content": "and"}, {"role": "user", "content": "more"}]
        chosen = [{"role": "assistant", "content": " ".join(WORDS[number % 4 : 5 + number % 4])}]
        rejected = [{"role": "assistant", "content": " ".join(WORDS[-1 - number % 7 :])}]
        found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters of it (one that changes nothing yet), and a file of pairs."""
    from transformers import AutoModelForCausalLM

    made = tmp_path_factory.mktemp("dpo")
    save_pretrained(made / "model")
    for name in ("new", "trained"):
        model = adapter_of(AutoModelForCausalLM.from_pretrained(made / "model"))
        if name == "trained":
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(made / name)
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return made


def theirs(folder: Path, run_dir: Path, adapter: str | None, **keys: Any) -> list[dict[str, float]]:
    from datasets import Dataset

    sizes = {"seed": 0, "seq_len": 100, "batch_size": ROWS}
    pairs = Preferences(str(folder / "pairs.jsonl"), tokenizer=str(folder / "model"), **sizes)
    given, losses = rows(), []
    data = Dataset.from_list([given[number] for step in range(STEPS) for number in pairs.batch(step)["index"].tolist()])
    made = trainer("DPO", folder, data, losses, adapter, output_dir=str(run_dir), **keys)
    made.train()
    names = {"reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected"}
    names |= {"reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies", "grad_norm": "grad_norm"}
    return records_of(made, losses, names)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), {}),
        (("task.beta=0.5", "task.loss=ipo"), {"beta": 0.5, "loss_type": "ipo"}),
        (("task.loss=robust", "task.label_smoothing=0.2"), {"loss_type": "robust", "label_smoothing": 0.2}),
    ],
)
def test_a_whole_model_with_a_cached_reference(folder: Path, tmp_path: Path, keys: tuple, expected: dict) -> None:
    found = ours(folder, tmp_path / "ours", "pairs", *OURS, *keys, "microbatches=2")
    assert_alike(found, theirs(folder, tmp_path / "theirs", None, **expected))


@pytest.mark.parametrize("reference", ["adapter", "cached"])
def test_a_new_adapter(folder: Path, tmp_path: Path, reference: str) -> None:
    keys = *LORA, f"adapter.weights={folder / 'new'}", f"task.reference={reference}"
    assert_alike(ours(folder, tmp_path / "ours", "pairs", *OURS, *keys), theirs(folder, tmp_path / "theirs", "new"))


def test_an_adapter_that_was_trained_before_is_its_own_reference(folder: Path, tmp_path: Path) -> None:
    found = ours(folder, tmp_path / "ours", "pairs", *OURS, *LORA, f"adapter.weights={folder / 'trained'}")
    assert found[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert_alike(found, theirs(folder, tmp_path / "theirs", "trained"))

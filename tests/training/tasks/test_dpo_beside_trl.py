"""DPO beside TRL's DPOTrainer: the same files, template and order give the same losses, gradients and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers.in_process import run_here
from tests.training.helpers.pretrained_folder import save_pretrained
from training.data.chats.preferences import Preferences

trl = pytest.importorskip("trl")

STEPS, PAIRS, LR = 4, 4, 1e-3
CLOSE = {"abs": 1e-5, "rel": 1e-5}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
PEFT = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def rows() -> list[dict[str, Any]]:
    """Pairs of different lengths, with one turn and with two before the answer."""
    found = []
    for number in range(STEPS * PAIRS):
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
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = tmp_path_factory.mktemp("dpo")
    save_pretrained(made / "model")
    for name in ("new", "trained"):
        torch.manual_seed(1)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(made / "model"), LoraConfig(**PEFT))
        if name == "trained":
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(made / name)
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return made


def ours(folder: Path, run_dir: Path, *keys: str) -> list[dict[str, float]]:
    run_here(
        run_dir,
        "task=dpo",
        "dataset=preferences",
        f"dataset.files={folder / 'pairs.jsonl'}",
        "dataset.eval_share=0",
        "model=hf",
        f"model.source={folder / 'model'}",
        "seq_len=100",
        f"batch_size={PAIRS}",
        f"steps={STEPS}",
        "log_every=1",
        "warmup_steps=1",
        "device=cpu",
        "hardware=h200",
        "tracking=disabled",
        f"optimizer.lr={LR}",
        "optimizer.weight_decay=0.01",
        *keys,
    )
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def theirs(folder: Path, run_dir: Path, adapter: str | None, **keys: Any) -> list[dict[str, float]]:
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class InOrder(trl.DPOTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **more: Any) -> torch.Tensor:
            loss = super().compute_loss(*arguments, **more)
            losses.append(loss.item())
            return loss

    losses: list[float] = []
    pairs = Preferences(
        str(folder / "pairs.jsonl"), tokenizer=str(folder / "model"), seed=0, seq_len=100, batch_size=PAIRS
    )
    given = rows()
    ordered = [given[number] for step in range(STEPS) for number in pairs.batch(step)["index"].tolist()]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, folder / adapter, is_trainable=True)
    config = trl.DPOConfig(
        output_dir=str(run_dir),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        **keys,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = InOrder(model, args=config, train_dataset=Dataset.from_list(ordered), processing_class=tokenizer)
    trainer.train()
    steps = [record for record in trainer.state.log_history if "loss" in record]
    names = {"reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected"}
    names |= {"reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies", "grad_norm": "grad_norm"}
    return [
        {"train/loss": loss} | {f"train/{name}": record[theirs] for name, theirs in names.items()}
        for loss, record in zip(losses, steps, strict=True)
    ]


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == STEPS
    for step, (record, other) in enumerate(zip(found, expected, strict=True)):
        for name, value in other.items():
            assert record[name] == pytest.approx(value, **CLOSE), (step, name)
    # It trains: these are no losses of the first step.
    assert abs(found[-1]["train/loss"] - found[0]["train/loss"]) > 1e-3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), {}),
        (("task.beta=0.5", "task.loss=ipo"), {"beta": 0.5, "loss_type": "ipo"}),
        (("task.loss=robust", "task.label_smoothing=0.2"), {"loss_type": "robust", "label_smoothing": 0.2}),
    ],
)
def test_a_whole_model_with_a_cached_reference(folder: Path, tmp_path: Path, keys: tuple, expected: dict) -> None:
    found = ours(folder, tmp_path / "ours", *keys, "microbatches=2")
    assert_alike(found, theirs(folder, tmp_path / "theirs", None, **expected))


@pytest.mark.parametrize("reference", ["adapter", "cached"])
def test_a_new_adapter(folder: Path, tmp_path: Path, reference: str) -> None:
    adapter = "adapter=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.targets=[q_proj,v_proj,down_proj]"
    keys = *adapter, f"adapter.weights={folder / 'new'}", f"task.reference={reference}"
    assert_alike(ours(folder, tmp_path / "ours", *keys), theirs(folder, tmp_path / "theirs", "new"))


def test_an_adapter_that_was_trained_before_is_its_own_reference(folder: Path, tmp_path: Path) -> None:
    adapter = "adapter=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.targets=[q_proj,v_proj,down_proj]"
    found = ours(folder, tmp_path / "ours", *adapter, f"adapter.weights={folder / 'trained'}")
    assert found[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert_alike(found, theirs(folder, tmp_path / "theirs", "trained"))

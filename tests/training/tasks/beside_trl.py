"""The comparisons with TRL's trainers share a run of ours, a trainer that keeps the order, and the comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers.in_process import run_here

trl = pytest.importorskip("trl")

STEPS, ROWS, LR = 4, 4, 1e-3
CLOSE = {"abs": 1e-5, "rel": 1e-5}
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.targets=[q_proj,v_proj,down_proj]")
# The same in every trainer of TRL.
CONFIG = {
    "max_steps": STEPS,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": None,
    "per_device_train_batch_size": ROWS,
}


def ours(folder: Path, run_dir: Path, file: str, *keys: str) -> list[dict[str, float]]:
    """Trains the model of `folder` on a file in it; returns the records of the steps."""
    run_here(
        run_dir,
        f"dataset.files={folder / file}.jsonl",
        "dataset.eval_share=0",
        "model=hf",
        f"model.source={folder / 'model'}",
        f"model.weights={folder / 'model'}",
        f"batch_size={ROWS}",
        f"steps={STEPS}",
        "log_every=1",
        "warmup_steps=1",
        "device=cpu",
        "hardware=h200",
        "tracking=disabled",
        f"optimizer.lr={LR}",
        "optimizer.weight_decay=0.01",
        "schedule=constant",
        "schedule.warmup=0",
        *keys,
    )
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def adapter_of(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model with the adapter of LORA, new from seed 1."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))


def trainer(kind: str, folder: Path, data: Any, losses: list[float], adapter: str | None = None, **keys: Any) -> Any:
    """Makes TRL's trainer `kind` of the model of `folder`, which takes `data` in its order and appends its losses."""
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class InOrder(getattr(trl, f"{kind}Trainer")):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **more: Any) -> torch.Tensor:
            loss = super().compute_loss(*arguments, **more)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, folder / adapter, is_trainable=True)
    config = getattr(trl, f"{kind}Config")(**{**CONFIG, **keys})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return InOrder(model, args=config, train_dataset=data, processing_class=tokenizer)


def records_of(trained: Any, losses: Iterable[float], names: dict[str, str]) -> list[dict[str, float]]:
    """Returns the loss of each step, and by our names what TRL logs under its own."""
    logged = [record for record in trained.state.log_history if "loss" in record]
    return [
        {"train/loss": loss} | {f"train/{name}": record[theirs] for name, theirs in names.items()}
        for loss, record in zip(losses, logged, strict=True)
    ]


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == STEPS
    for step, (record, other) in enumerate(zip(found, expected, strict=True)):
        for name, value in other.items():
            assert record[name] == pytest.approx(value, **CLOSE), (step, name)
    # It trains: these are no losses of the first step.
    assert abs(found[-1]["train/loss"] - found[0]["train/loss"]) > 1e-3

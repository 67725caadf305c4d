"""Chats beside TRL's SFTTrainer: the same files, template and order give the same losses, gradients and weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.helpers.in_process import run_here
from tests.training.helpers.pretrained_folder import save_pretrained
from training.data.chats.chat import Chats

trl = pytest.importorskip("trl")

STEPS, ROWS, LR, LENGTH = 4, 4, 1e-3, 200
CLOSE = {"abs": 1e-5, "rel": 1e-5}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}"
    "{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "größer", "猫"]
PEFT = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.targets=[q_proj,v_proj,down_proj]")


def chats() -> list[dict[str, Any]]:
    """Conversations of one to three turns, whose answers differ much in length."""
    found = []
    for number in range(40):
        messages = [{"role": "system", "content": "be brief"}] if number % 4 == 1 else []
        for turn in range(1 + number % 3):
            said = " ".join(WORDS[(number + turn) % 7 : (number + turn) % 7 + 1 + number % 4])
            answer = " ".join(WORDS[-1 - (number * 5 + turn) % 11 :])
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found


def pairs() -> list[dict[str, Any]]:
    """The same with all but the last turn given."""
    return [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats()]


GIVEN = {"chats": chats, "pairs": pairs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a template that marks turns, an adapter of it, and files of chats."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = tmp_path_factory.mktemp("sft")
    save_pretrained(made / "model", max_position_embeddings=256)
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made / "model")
    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(made / "model"), LoraConfig(**PEFT))
    model.save_pretrained(made / "adapter")
    for name, rows in GIVEN.items():
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return made


def ours(folder: Path, run_dir: Path, file: str, *keys: str) -> list[dict[str, float]]:
    run_here(
        run_dir,
        "dataset=chat",
        f"dataset.files={folder / file}.jsonl",
        "dataset.eval_share=0",
        "model=hf",
        f"model.source={folder / 'model'}",
        f"model.weights={folder / 'model'}",
        f"seq_len={LENGTH}",
        f"batch_size={ROWS}",
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


def order(folder: Path, file: str, **keys: Any) -> list[list[list[int]]]:
    """The samples of each row of each step, as this loop has them: none is left out of the file."""
    data = Chats(
        str(folder / f"{file}.jsonl"),
        tokenizer=str(folder / "model"),
        seed=0,
        seq_len=LENGTH,
        batch_size=ROWS,
        **keys,
    )
    assert len(data._samples.rows) == len(GIVEN[file]())
    rows = data._training
    return [[[int(n) for n in rows.members(row)] for row in rows.rows_of(step)] for step in range(STEPS)]


def theirs(
    folder: Path,
    run_dir: Path,
    file: str,
    steps: Sequence[Sequence[Sequence[int]]],
    adapter: bool = False,
    packed: bool = False,
    **keys: Any,
) -> list[dict[str, float]]:
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class InOrder(trl.SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **more: Any) -> torch.Tensor:
            loss = super().compute_loss(*arguments, **more)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    def trainer(data: Dataset, **more: Any) -> trl.SFTTrainer:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        if adapter:
            model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
        config = trl.SFTConfig(
            output_dir=str(run_dir),
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
            **{"per_device_train_batch_size": ROWS, **keys, **more},
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        return InOrder(model, args=config, train_dataset=data, processing_class=tokenizer)

    losses: list[float] = []
    given = GIVEN[file]()
    rows = [row for step in steps for row in step]
    made = trainer(Dataset.from_list([given[number] for row in rows for number in row]))
    if packed:
        # TRL packs rows of as many tokens, of which ours have one less a sample: so it is given ours.
        samples = iter(made.train_dataset)
        joined = [_joined([next(samples) for _ in row]) for row in rows]
        made = trainer(Dataset.from_list(joined), padding_free=True, dataset_kwargs={"skip_prepare_dataset": True})
    made.train()
    records = [record for record in made.state.log_history if "loss" in record]
    each = np.array(losses).reshape(STEPS, -1).sum(axis=1)
    return [
        {"train/loss": loss, "train/grad_norm": record["grad_norm"]} for loss, record in zip(each, records, strict=True)
    ]


def _joined(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in samples[0] if isinstance(samples[0][name], list)]
    row = {name: [token for sample in samples for token in sample[name]] for name in names}
    return row | {"seq_lengths": [len(sample["input_ids"]) for sample in samples]}


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == STEPS
    for step, (record, other) in enumerate(zip(found, expected, strict=True)):
        for name, value in other.items():
            assert record[name] == pytest.approx(value, **CLOSE), (step, name)
    # It trains: these are no losses of the first step.
    assert abs(found[-1]["train/loss"] - found[0]["train/loss"]) > 1e-3


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("file", "train_on", "keys"),
    [
        ("chats", "assistant", {"assistant_only_loss": True}),
        pytest.param("chats", "all", {}, marks=pytest.mark.slow),
        ("pairs", "assistant", {"completion_only_loss": True}),
    ],
)
def test_a_sample_a_row(
    folder: Path, tmp_path: Path, file: str, train_on: str, keys: dict[str, bool], microbatches: int
):
    """Microbatches have unequal numbers of labels; TRL accumulates as many batches."""
    batch = {"per_device_train_batch_size": ROWS // microbatches, "gradient_accumulation_steps": microbatches}
    steps = order(folder, file, train_on=train_on)
    expected = theirs(folder, tmp_path / "theirs", file, steps, **keys, **batch)
    found = ours(folder, tmp_path / "ours", file, f"dataset.train_on={train_on}", f"microbatches={microbatches}")
    assert_alike(found, expected)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("train_on", ["assistant", pytest.param("all", marks=pytest.mark.slow)])
def test_packed_rows(folder: Path, tmp_path: Path, train_on: str, microbatches: int):
    batch = {"per_device_train_batch_size": ROWS // microbatches, "gradient_accumulation_steps": microbatches}
    only = {"assistant_only_loss": True} if train_on == "assistant" else {}
    steps = order(folder, "chats", train_on=train_on, packed=True)
    assert max(len(row) for step in steps for row in step) > 2
    expected = theirs(folder, tmp_path / "theirs", "chats", steps, packed=True, **only, **batch)
    keys = "dataset.packed=true", f"dataset.train_on={train_on}", f"microbatches={microbatches}"
    assert_alike(ours(folder, tmp_path / "ours", "chats", *keys), expected)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_adapter(folder: Path, tmp_path: Path, packed: bool):
    steps = order(folder, "chats", packed=packed)
    expected = theirs(
        folder, tmp_path / "theirs", "chats", steps, adapter=True, packed=packed, assistant_only_loss=True
    )
    keys = (*LORA, f"adapter.weights={folder / 'adapter'}", f"dataset.packed={packed}")
    assert_alike(ours(folder, tmp_path / "ours", "chats", *keys), expected)

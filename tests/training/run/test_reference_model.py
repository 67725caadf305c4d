"""The second, frozen model of task.reference=copy: where it lives, that it never moves, what a resumed run takes."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.quantise import stored_tensors
from tests.training.helpers.in_process import SMALL_MODEL, composed, run_here
from training.config.validation import check
from training.errors import UserError
from training.run import reference_model
from training.run.build import build
from training.run.loop import train
from training.runs.files import REFERENCE_FILE, REFERENCE_ORIGIN

COPY = "task.reference=copy"
STREAMED = "offload=layer_stream", "optimizer=host_adamw"
LORA = "adapter=lora", "adapter.dropout=0.1"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = ({"prompt": f"Say {n}", "chosen": f"{n} " * (1 + n % 5), "rejected": "no " * (n % 3)} for n in range(20))
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (key for key in SMALL_MODEL if not key.startswith("dataset"))
    given = "task=dpo", "dataset=preferences", f"dataset.files={pairs}", "dataset.eval_share=0.25", "seq_len=48"
    run = "steps=3", "log_every=1", "warmup_steps=1", "eval.every=2", "optimizer.lr=0.01", "tracking=disabled"
    return (*small, *given, *run)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, overrides) -> str:
    """Returns the weights of a run, from which others begin."""
    folder = tmp_path_factory.mktemp("weights")
    run_here(folder, *overrides, "seed=7", "steps=1", "checkpoint.every=1", "eval.every=null")
    return f"model.weights={folder / 'checkpoints/step-00000001'}"


def test_the_compiler_is_imported_before_the_models_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []

    def import_slowly(name: str) -> None:
        time.sleep(0.1)
        imported.append(name)

    monkeypatch.setattr(reference_model, "import_module", import_slowly)
    monkeypatch.setattr(reference_model, "attached", lambda *_: nullcontext())
    monkeypatch.setattr(reference_model, "without_scores", lambda _: nullcontext())
    components = SimpleNamespace(device=torch.device("cuda"), recomputed_blocks=["a block"], reference=None)
    with reference_model.attached_models(components, streams=None):
        assert imported == ["torch._dynamo"]


def curve(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = ("train/step", "train/loss", "train/grad_norm", "eval/loss")
    return [{key: value for key, value in line.items() if key in keys or "/reward_" in key} for line in lines]


@pytest.mark.parametrize("adapter", [(), pytest.param(LORA, marks=pytest.mark.slow)], ids=["whole", "adapter"])
def test_losses_are_those_of_the_cached_reference(adapter, overrides, weights: str, tmp_path: Path) -> None:
    keys = (*overrides, *adapter, weights, "microbatches=2", "schedule.warmup=0")
    run_here(tmp_path / "cached", *keys, "task.reference=cached")
    run_here(tmp_path / "copy", *keys, COPY, *STREAMED)
    found, expected = curve(tmp_path / "copy"), curve(tmp_path / "cached")
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        # The batches of a cached reference are others, in which products are rounded otherwise.
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert found[-1]["train/loss"] < 0.69
    assert (tmp_path / "copy" / REFERENCE_ORIGIN).is_file()
    assert not (tmp_path / "copy" / REFERENCE_FILE).exists()


@pytest.mark.parametrize("offload", [(), STREAMED], ids=["none", "layer_stream"])
def test_the_reference_is_frozen_and_has_not_moved(offload, overrides, weights: str, tmp_path: Path) -> None:
    config, invocation = composed(*overrides, *offload, weights, COPY, "eval.every=null", run_dir=tmp_path)
    check(config)
    with build(config, invocation) as job:
        model, task = job.components.reference.model, job.components.task
        assert task.reference_model is model
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not any(module.training for module in model.modules())
        train(job)
        job.optimizer.finish()
        begun = load_file(next(Path(weights.removeprefix("model.weights=")).glob("*model*.safetensors")))
        named = dict(model.named_parameters())
        assert named
        for name, parameter in named.items():
            for key, stored in stored_tensors(name, parameter).items():
                assert stored.cpu().equal(begun[key]), key
        trained = dict(job.components.model.named_parameters())
        assert not any(torch.equal(trained[name], parameter) for name, parameter in named.items())
        kept = {parameter for group in job.optimizer.param_groups for parameter in group["params"]}
        assert kept.isdisjoint(named.values())
    assert task.reference_model is None


def test_an_adapter_that_begins_from_files_is_compared_with_its_base(overrides, tmp_path: Path) -> None:
    keys = (*overrides, *LORA, "eval.every=null", "steps=2")
    run_here(tmp_path / "first", *keys, "checkpoint.every=2")
    start = f"adapter.weights={tmp_path / 'first/checkpoints/step-00000002'}"
    run_here(tmp_path / "copy", *keys, start, COPY)
    run_here(tmp_path / "off", *keys, start, "task.reference=adapter")
    assert curve(tmp_path / "copy") == curve(tmp_path / "off")
    assert abs(curve(tmp_path / "copy")[0]["train/reward_margin"]) > 1e-3


@pytest.mark.parametrize("adapter", [(), pytest.param(LORA, marks=pytest.mark.slow)], ids=["whole", "adapter"])
def test_a_run_resumes_with_the_weights_of_its_beginning(adapter, overrides, weights: str, tmp_path: Path) -> None:
    keys = (*overrides, *STREAMED, *adapter, weights, COPY)
    run_here(tmp_path / "whole", *keys)
    run_here(tmp_path / "parts", *keys, "steps=2", "checkpoint.every=2")
    run_here(tmp_path / "parts", *keys, "resume=auto")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    # No checkpoint has it.
    checkpoint = tmp_path / "parts/checkpoints/step-00000002"
    files = (file for file in checkpoint.glob("*.safetensors"))
    assert not any("reference" in name for file in files for name in load_file(file))


def test_a_resumed_run_whose_beginning_is_another_or_not_known_is_refused(overrides, weights, tmp_path: Path) -> None:
    begun = tmp_path / "begun.safetensors"
    (saved,) = Path(weights.removeprefix("model.weights=")).glob("*model*.safetensors")
    content = saved.read_bytes()
    begun.write_bytes(content)
    keys = (*overrides, COPY, "dataset.tokenizer=null", "eval.every=null", "steps=2")
    run_here(tmp_path, *keys, "checkpoint.every=1", f"model.weights={begun}")
    checkpoint = tmp_path / "checkpoints/step-00000001"
    resumed = (*keys, f"resume={checkpoint}", f"model.weights={begun}")
    save_file({name: tensor + 1 for name, tensor in load_file(saved).items()}, begun)
    with pytest.raises(UserError, match="with other contents: give files with the same SHA-256"):
        run_here(tmp_path / "other", *resumed)
    begun.write_bytes(content)
    (tmp_path / REFERENCE_ORIGIN).unlink()
    with pytest.raises(UserError, match=r"reference\.json is missing, .* model\.weights=") as error:
        run_here(tmp_path / "third", *resumed)
    assert "\n" not in str(error.value)
    # Its last advice.
    run_here(tmp_path / "third", *keys, f"model.weights={checkpoint}")


def test_metrics_count_the_copies_of_both_models(overrides, tmp_path: Path) -> None:
    keys = (*overrides, *STREAMED, "eval.every=null", "microbatches=1")
    for reference in ("copy", "cached"):
        run_here(tmp_path / reference, *keys, f"task.reference={reference}")
    copied, plain = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("copy", "cached")
    )
    # Forward alone, and forward and backward, which find the last units in their slots.
    assert plain["transfer/h2d_gib"] < copied["transfer/h2d_gib"] <= 2.01 * plain["transfer/h2d_gib"]
    assert copied["transfer/d2h_gib"] == plain["transfer/d2h_gib"]


@pytest.mark.slow
@pytest.mark.parametrize("mapped", ["memory", "mapped"])
def test_quantised_and_mapped_weights(mapped: str, overrides, weights: str, tmp_path: Path) -> None:
    keys = (*overrides, *LORA, weights, "offload=layer_stream", f"offload.source={mapped}")
    run_here(tmp_path / "copy", *keys, COPY)
    run_here(tmp_path / "off", *keys)
    assert curve(tmp_path / "copy") == curve(tmp_path / "off")

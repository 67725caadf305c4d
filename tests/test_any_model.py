"""Models of transformers and diffusers in the loop: every mode computes the resident model's numbers, and resumes."""

import errno
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import generate
from tests.training.helpers.in_process import TINY_RUN, composed, hydra_as_before, run_here
from tests.training.helpers.modes import small_modes
from training.errors import UserError
from training.runs.directory import RunDirectory
from training.runs.files import SAMPLES_FILE
from training.runs.records import read_metrics, stream_metrics

COMMON = (*(o for o in TINY_RUN if not o.startswith("model.")), "log_every=1", "clip_norm=null", "precision=bf16")
UPDATES = ("optimizer=host_adamw",)
GPT2 = ("model=hf", "model.source=gpt2", "model.overrides={n_layer: 2, n_embd: 32, n_head: 2, vocab_size: 300}")
UNET = (
    "model=diffusers", "model.source=UNet2DModel",
    "model.overrides={sample_size: 8, in_channels: 1, out_channels: 1, block_out_channels: [8, 16],"
    " down_block_types: [DownBlock2D, DownBlock2D], up_block_types: [UpBlock2D, UpBlock2D],"
    " norm_num_groups: 4, num_class_embeds: 4, layers_per_block: 1}",
    "task=flow_matching", "task.null_class=3", "task.sample_steps=2", "task.sample_count=3", "dataset=glyphs",
    "dataset.characters=abc", "dataset.size=8", "dataset.count=100",
)  # fmt: skip
# Each way of moving weights, and one of activations; tests/test_train.py has the others.
MODES = ("none", "bounce_linear", "shard_offload", "layer_stream_swap")
TASKS = {"gpt2": (*GPT2, "microbatches=2"), "unet": (*UNET, "eval.every=2", "eval.batches=1", "sample.every=4")}


def curve(folder: Path) -> list[dict]:
    kept = ("train/", "eval/loss")
    return [{k: v for k, v in record.items() if k.startswith(kept)} for record in read_metrics(folder)]


def pictures(folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)) for path in sorted((folder / "samples").glob("*.png"))]


@pytest.mark.parametrize("job", TASKS.values(), ids=TASKS)
@pytest.mark.slow
@pytest.mark.usefixtures("small_activations")
def test_every_mode_trains_alike_and_a_run_resumes(tmp_path: Path, job: tuple):
    job = (*COMMON, *UPDATES, *job, "steps=2")
    modes = {name: knobs for name, knobs in small_modes().items() if name in MODES}
    for offload, knobs in modes.items():
        moved = run_here(tmp_path / offload, *job, f"offload={offload}", *knobs)
        assert (moved["transfer/h2d_gib"] > 0) == (offload != "none")
        assert curve(tmp_path / offload) == curve(tmp_path / "none"), offload
    drawn = {offload: pictures(tmp_path / offload) for offload in modes}
    for offload, found in drawn.items():
        assert all(np.array_equal(*pair) for pair in zip(found, drawn["none"], strict=True)), offload
    stopped, whole = (*job, "steps=1", "checkpoint.every=1"), tmp_path / "none"
    run_here(tmp_path / "resumed", *stopped)
    run_here(tmp_path / "resumed", *stopped, "steps=2", "offload=bounce_linear", "resume=auto")
    assert curve(tmp_path / "resumed")[-1] == curve(whole)[-1]
    assert curve(whole)[-1]["train/loss"] < 10


@pytest.mark.slow
def test_text_is_the_same_in_every_mode_between_steps_and_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (*COMMON, *GPT2, "dataset=stdlib", "dataset.max_tokens=20000", "precision=fp32")
    job = (*text, "steps=1", "sample.every=1", "sample.tokens=12", "checkpoint.every=1")
    modes = {name: knobs for name, knobs in small_modes().items() if name in MODES}
    for offload, knobs in modes.items():
        run_here(tmp_path / offload, *job, f"offload={offload}", *knobs)
    samples = {offload: list(stream_metrics(tmp_path / offload, SAMPLES_FILE)) for offload in modes}
    assert [record["train/step"] for record in samples["none"]] == [0, 1]
    assert all(found == samples["none"] for found in samples.values())
    run = tmp_path / "none"
    RunDirectory(run).write_config(*composed(*job, run_dir=run))
    capsys.readouterr()
    shown = set()
    for offload in modes:
        asked = ["generate.py", str(run), "def", "--tokens", "12", "--temperature", "2", f"offload={offload}"]
        monkeypatch.setattr(sys, "argv", asked)
        with hydra_as_before():
            generate.main()
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1
    assert len(shown.pop()) > len("def")


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def full(self, *arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    summary = run_here(tmp_path, *COMMON, *UNET, "steps=1", "sample.every=1")
    assert summary["status"] == "ok"
    assert "the sample after step 1 could not be written (No space left on device)" in caplog.text
    assert read_metrics(tmp_path)[-1]["train/step"] == 1


@pytest.mark.slow
def test_slips_are_one_line(tmp_path: Path):
    for overrides, problem in (
        (("model=hf", "model.source=qwen9"), "model.source=qwen9: "),
        (("model=hf", "model.source=gpt2", "model.overrides={n_layers: 2}"), "model.source=gpt2: "),
        (
            ("model=hf", "model.source=openai-gpt", "model.overrides={n_layer: 1, n_embd: 12}", "sample.every=1"),
            "sample.every=1: openai-gpt cannot generate text here, because transformers keeps no keys and values of it",
        ),
        (("model=diffusers", "model.source=UNet2DModel"), "task=causal_lm: DiffusionModel has no vocabulary"),
        (("dataset=glyphs",), "task=causal_lm: the dataset has no tokens"),
        (("task=flow_matching",), "task=flow_matching: Llama is a language model"),
        ((*UNET, "eval.every=2", "dataset.eval_share=0"), "eval.every=2: no example is held out"),
    ):
        with pytest.raises(UserError) as refusal:
            run_here(tmp_path, *COMMON, *overrides)
        assert str(refusal.value).startswith(problem)
        assert "\n" not in str(refusal.value)

"""FSDP2 with CPU offload trains in the loop, and its curve is the resident one, bit for bit."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.models.helpers.tiny_pipelines import saved
from tests.peers.helpers.runs import ON_GPU, curve, notes
from tests.test_any_diffusion import job
from tests.training.helpers.captioned import draw_pictures, given
from tests.training.helpers.in_process import run_here
from training.runs.records import read_metrics


@pytest.mark.parametrize(
    "overrides",
    [("precision=fp32", "microbatches=2"), ("precision=bf16", "clip_norm=null", "recompute=block")],
    ids=["clipped", "bf16"],
)
@pytest.mark.slow
def test_the_curve_is_the_resident_one(tmp_path: Path, overrides: tuple[str, ...]):
    expected = curve(tmp_path / "none", *overrides)
    assert curve(tmp_path / "fsdp2", "offload=fsdp2", *overrides) == expected
    assert not dist.is_initialized()
    assert notes(tmp_path / "fsdp2") == ["float32 masters are the parameters, and are copied in as float32"]


def test_an_evaluation_is_the_resident_one(tmp_path: Path):
    overrides = ("dataset=stdlib", "dataset.max_tokens=20000", "eval.every=2", "eval.batches=1", "steps=2")
    assert curve(tmp_path / "fsdp2", "offload=fsdp2", *overrides) == curve(tmp_path / "none", *overrides)


@pytest.mark.parametrize("name", ["unet", pytest.param("sd3", marks=pytest.mark.slow)])
def test_inputs_and_buffers_keep_their_dtypes(
    tmp_path: Path, name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """Times in float32, and a table in bf16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if name == "sd3":
        run = given(name, saved(name, tmp_path_factory), draw_pictures(tmp_path / "pictures"), "precision=bf16")
    else:
        run = job(name)
    asked = (*run, "optimizer=adamw", "steps=1")
    for mode in ("none", "fsdp2"):
        run_here(tmp_path / mode, *asked, f"offload={mode}")
    assert read_metrics(tmp_path / "fsdp2")[0]["train/loss"] == read_metrics(tmp_path / "none")[0]["train/loss"]


@pytest.mark.gpu
def test_on_a_gpu_losses_are_the_resident_ones_but_for_rounding(tmp_path: Path):
    """Norms are taken and updates made on the host, the resident ones on the GPU."""
    own, expected = curve(tmp_path / "fsdp2", "offload=fsdp2", *ON_GPU), curve(tmp_path / "none", *ON_GPU)
    assert own[0] == (expected[0][0], pytest.approx(expected[0][1], rel=1e-5))
    assert own == [(pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2)) for loss, norm in expected]

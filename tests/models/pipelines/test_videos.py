"""Which pipelines make videos, of how many frames, and what they tell their networks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.pipelines.videos import check_frames, check_makes_videos, rate_of
from tests.models.helpers.tiny_pipelines import made


def folder_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(("WanPipeline", None), ("LTXPipeline", 25), ("HunyuanVideoPipeline", None), ("MochiPipeline", None)),
        *(("SanaVideoPipeline", None), ("LattePipeline", None)),
    ],
)
def test_a_pipeline_of_videos_has_its_rate(tmp_path: Path, name: str, rate: float | None):
    folder = folder_of(tmp_path, name)
    check_makes_videos(folder)
    assert rate_of(folder) == rate


def test_a_pipeline_of_pictures_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^FluxPipeline makes pictures and no videos$"):
        check_makes_videos(folder_of(tmp_path, "FluxPipeline"))


def test_the_vae_decides_the_number_of_frames():
    wan, ltx = made("wan"), made("ltx")
    assert (wan.vae_scale_factor_temporal, ltx.vae_temporal_compression_ratio) == (4, 4)
    for frames in (5, 9, 81):
        check_frames(wan, frames)
        check_frames(ltx, frames)
    ltx.vae_temporal_compression_ratio = 8
    check_frames(ltx, 121)
    for pipeline, frames, message in (
        (wan, 80, r"WanPipeline takes a multiple of 4 plus 1: give dataset\.frames=77 or 81$"),
        (wan, 3, r".*give dataset\.frames=5$"),
        (ltx, 6, r"LTXPipeline takes a multiple of 8 plus 1: give dataset\.frames=9$"),
        (made("flux"), 5, r"FluxPipeline has no VAE of videos$"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            check_frames(pipeline, frames)

"""Pictures are encoded once, under the run's mode, and train their pipeline's network alike under each."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.video_processor import VideoProcessor

from models.pipelines.latents import encoded, normalisation
from tests.models.helpers.tiny_pipelines import PIPELINES, made, saved
from tests.training.helpers.captioned import draw_pictures, given
from tests.training.helpers.in_process import components_of, run_here
from tests.training.helpers.results import content, curve, losses
from tests.training.helpers.videos import draw_videos
from training.data.captioned.videos import frames_of
from training.data.datasets import build_dataset
from training.errors import UserError
from training.run import encoding
from training.run.encoding import encode_missing, encode_prompts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def pipeline_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}
    return lambda name: folders.setdefault(name, folders.get(name) or saved(name, tmp_path_factory))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in PIPELINES), "qwen_image"])
def test_losses_are_equal_under_each_mode_and_encoders_run_once(
    name: str, pipeline_of, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    overrides = given(name, pipeline_of(name), pictures)
    expected: list[float] = []
    for mode in ("none", "layer_stream", "shard_offload"):
        run_here(tmp_path / mode, *overrides, f"offload={mode}", "microbatches=2")
        found = losses(tmp_path / mode)
        assert len(found) == 2
        expected = expected or found
        assert found == expected, mode
        # All later runs have what this one has encoded.
        monkeypatch.setattr(encoding, "opened", None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PIPELINES)
def test_on_a_gpu_losses_and_samples_are_equal(name: str, pipeline_of, pictures: Path, tmp_path: Path):
    overrides = [*given(name, pipeline_of(name), pictures), "device=cuda", "precision=bf16", "task.sample_steps=2"]
    found = {}
    for mode in ("none", "layer_stream"):
        run_here(tmp_path / mode, *overrides, f"offload={mode}", "sample.every=2", "sample.prompts=[cat]")
        samples = sorted((tmp_path / mode / "samples").iterdir())
        found[mode] = losses(tmp_path / mode), [sample.read_bytes() for sample in samples]
        assert len(samples) == 2
    assert found["none"] == found["layer_stream"]


@pytest.mark.parametrize("mode", ["layer_stream", "bounce_linear"])
def test_encoders_under_a_mode_make_what_they_make_on_the_device(
    mode: str, pipeline_of, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = {}
    for offload in ("none", mode):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / offload))
        components = components_of(*given("flux", pipeline_of("flux"), pictures), f"offload={offload}")
        dataset = build_dataset(components.config, components.model, tmp_path)
        encode_missing(dataset, components)
        assert not dataset.missing()
        made[offload] = dataset.batch(0)
    assert made["none"].keys() == made[mode].keys()
    assert all(torch.equal(tensor, made[mode][key]) for key, tensor in made["none"].items())


def test_a_run_in_bf16_has_the_latents_of_a_vae_in_float32(pipeline_of, pictures: Path, tmp_path: Path):
    """As diffusers' training scripts for SDXL and SD3. The network and the text encoders are in bf16."""
    components = components_of(*given("sdxl", pipeline_of("sdxl"), pictures), "precision=bf16")
    dataset = build_dataset(components.config, components.model, tmp_path)
    encode_missing(dataset, components)
    vae = made("sdxl").vae
    for picture in dataset._pictures:
        pixels = dataset.cropped(picture, dataset._views[0]).pixels
        found = dataset.encoded.read(dataset._key(picture, dataset._views[0]))["latents"]
        assert torch.equal(found, encoded(vae, pixels, found.shape[1:]))


def test_a_plan_before_pictures_are_encoded_says_so(pipeline_of, pictures: Path, tmp_path: Path):
    overrides = given("sd3", pipeline_of("sd3"), pictures)
    with pytest.raises(UserError, match=r"^dataset=captioned: its pictures are not encoded yet"):
        components_of(*overrides).task.meta_batch(components_of(*overrides).config, 2)


def test_a_folder_that_is_no_pipeline_is_refused(pipeline_of, pictures: Path, tmp_path: Path):
    folder = pipeline_of("sd3")
    overrides = [each for each in given("sd3", folder, pictures) if not each.startswith("model.source")]
    with pytest.raises(UserError, match=r"^model\.source=.*: it has no model_index\.json: give the folder of"):
        run_here(tmp_path / "part", *overrides, f"model.source={folder / 'transformer'}")


def test_a_run_that_was_ended_goes_on_where_it_was(
    pipeline_of, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    overrides = given("sd3", pipeline_of("sd3"), pictures)
    whole, encoded = encoding.encoded, []

    def ends(*arguments: object):
        if len(encoded) == 4:
            raise KeyboardInterrupt
        encoded.append(arguments)
        return whole(*arguments)

    monkeypatch.setattr(encoding, "encoded", ends)
    with pytest.raises(KeyboardInterrupt):
        run_here(tmp_path / "first", *overrides)
    monkeypatch.setattr(encoding, "encoded", lambda *arguments: encoded.append(arguments) or whole(*arguments))
    run_here(tmp_path / "second", *overrides)
    assert len(encoded) == 6


def test_a_network_with_overrides_is_called_as_its_own(
    pipeline_of, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its pipeline asks whether it takes a guidance: with the call of another it would train without one."""
    overrides = [*given("stable_diffusion", pipeline_of("stable_diffusion"), pictures), "model.weights=null"]
    guided = "model.overrides={time_cond_proj_dim: 8}"
    run_here(tmp_path / "others", *overrides)
    run_here(tmp_path / "after", *overrides, guided)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    run_here(tmp_path / "alone", *overrides, guided)
    assert losses(tmp_path / "after") == losses(tmp_path / "alone") != losses(tmp_path / "others")


def test_a_run_that_resumes_within_an_epoch_equals_one_that_ran_through(pipeline_of, pictures: Path, tmp_path: Path):
    others = draw_pictures(tmp_path / "others", count=3)
    overrides = [
        *given("sdxl", pipeline_of("sdxl"), pictures), f"dataset.folder={{{pictures}: 1, {others}: 2}}", "steps=6",
        "offload=layer_stream", "optimizer=host_adamw", "dataset.flip=true", "dataset.crops=2", "dataset.masked=true",
        "dataset.eval_share=0.3", "ema=0.9", "eval.every=2", "sample.every=2", "sample.prompts=[cat]",
        "task.sample_steps=1", "checkpoint.every=3", "checkpoint.keep=2",
    ]  # fmt: skip
    run_here(tmp_path / "whole", *overrides)
    run_here(tmp_path / "rest", *overrides, f"resume={tmp_path / 'whole/checkpoints/step-00000003'}")
    assert curve(tmp_path / "rest") == [each for each in curve(tmp_path / "whole") if each["train/step"] > 3]
    states = [content(tmp_path / run / "checkpoints" / "step-00000006") for run in ("whole", "rest")]
    assert states[0] == states[1]
    samples = sorted((tmp_path / "rest" / "samples").iterdir())
    assert len(samples) == 2
    assert all(each.read_bytes() == (tmp_path / "whole" / "samples" / each.name).read_bytes() for each in samples)


def test_another_dataset_is_refused(pipeline_of, pictures: Path):
    overrides = [each for each in given("sd3", pipeline_of("sd3"), pictures) if not each.startswith("dataset")]
    with pytest.raises(UserError, match=r"^model=pipeline trains on captioned pictures: take dataset=captioned"):
        components_of(*overrides, "dataset=synthetic_images")


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_videos_train_alike_under_modes_on_the_latents_of_the_pipelines_own_vae(name: str, pipeline_of, tmp_path: Path):
    folder = draw_videos(tmp_path / "videos", 9)
    overrides = [*given(name, pipeline_of(name), folder), "dataset.frames=5", "batch_size=1", "steps=4"]
    overrides.append("precision=fp32")
    for mode in ("none", "layer_stream"):
        run_here(tmp_path / mode, *overrides, f"offload={mode}")
    assert losses(tmp_path / "none") == losses(tmp_path / "layer_stream")
    components = components_of(*overrides)
    dataset = build_dataset(components.config, components.model, tmp_path)
    assert not dataset.missing()
    assert dataset.facts()["pictures"].startswith("4 in 4 sizes, 2 of them videos; ")
    pipeline = made(name)
    videos = [picture for picture in dataset._pictures if len(picture.size) == 3]
    assert sorted(picture.size for picture in videos) == sorted([(5, 64, 64), (5, 32, 96)])
    for picture in videos:
        # LTX tells its network 25 frames a second; these videos have 10.
        frames = list(frames_of(picture.path, 5, 25 if name == "ltx" else None))
        height, width = picture.size[1:]
        if frames[0].size == (width, height):
            pixels = VideoProcessor().preprocess_video(frames, height=height, width=width)
            with torch.no_grad():
                mean = pipeline.vae.encode(pixels).latent_dist.mode()
            shift, scale = normalisation(pipeline.vae, mean.ndim)
            found = dataset.encoded.read(dataset._key(picture, dataset._views[0]))["latents"][0]
            assert found.shape[1] == 2
            torch.testing.assert_close(found, ((mean - shift) * scale)[0], rtol=1e-4, atol=1e-5)
    assert {batch["images"].shape[2] for batch in map(dataset.batch, range(4))} == {1, 2}


def test_a_number_of_frames_that_the_pipeline_does_not_take_is_refused(pipeline_of, tmp_path: Path):
    overrides = [*given("wan", pipeline_of("wan"), draw_videos(tmp_path / "videos", 5)), "dataset.frames=4"]
    with pytest.raises(UserError, match=r"^model\.source=.*: WanPipeline takes a multiple of 4 plus 1: give dataset"):
        run_here(tmp_path / "run", *overrides)


@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.parametrize(("more", "cut"), [(" and more", False), (" and more" * 100, True)])
def test_captions_that_are_cut_off_are_said_so_once(
    more: str, cut: bool, name: str, pipeline_of, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd
):
    pictures = draw_pictures(tmp_path / "pictures", count=2)
    for number in (0, 1):
        (pictures / f"{number}.txt").write_text(f"a ball {number}{more}")
    components = components_of(*given(name, pipeline_of(name), pictures))
    capfd.readouterr()
    encode_missing(build_dataset(components.config, components.model, tmp_path), components)
    warnings = [record.message for record in caplog.records if record.name == encoding.__name__]
    assert len(warnings) == cut
    assert all(line.startswith("texts are longer than a text encoder takes") for line in warnings)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.parametrize(("more", "cut"), [(" and more", False), (" and more" * 100, True)])
def test_prompts_of_samples_that_are_cut_off_are_said_so(
    more: str, cut: bool, name: str, pipeline_of, pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    prompts = ("sample.every=1", f"sample.prompts=['a ball{more}']")
    components = components_of(*given(name, pipeline_of(name), pictures, *prompts))
    encode_missing(build_dataset(components.config, components.model, tmp_path), components)
    encode_prompts([f"a cube{more}"], components)
    assert sum(record.name == encoding.__name__ for record in caplog.records) == 2 * cut


@pytest.mark.parametrize("asked", ["sample.every=1", "eval.every=1"])
def test_what_the_run_cannot_do_is_refused_before_anything_is_encoded(
    asked: str, pipeline_of, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(encoding, "opened", lambda *_: pytest.fail("pictures are encoded"))
    with pytest.raises(UserError, match=rf"^{asked}: (give sample\.prompts|no picture is held out: give a larger)"):
        run_here(tmp_path / "run", *given("sdxl", pipeline_of("sdxl"), pictures, asked, "dataset.size=128"))

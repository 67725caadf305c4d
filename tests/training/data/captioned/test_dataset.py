"""Batches of encoded pictures: latents drawn anew, conditions with their captions or without, masks."""

from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from models.pipelines.calls import ASKED
from tests.models.helpers.tiny_pipelines import made, saved
from tests.training.helpers.captioned import draw_pictures, overrides_of
from tests.training.helpers.in_process import components_of
from training.data.captioned import pictures
from training.data.captioned.dataset import BucketBatches, Captioned, View
from training.data.captioned.pictures import CaptionedPicture, cropped
from training.data.datasets import build_dataset
from training.data.pictures import LOSS_MASK
from training.errors import UserError
from training.run.encoding import encode_missing

TEXT = f"{ASKED}encoder_hidden_states"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("sdxl", tmp_path_factory)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # One for all tests: what is encoded depends on its content.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "captioned"))


def dataset_of(pipeline: Path, pictures: Path, *overrides: str) -> Captioned:
    components = components_of(*overrides_of(pipeline, pictures, "noise_prediction"), *overrides)
    made = build_dataset(components.config, components.model, pictures)
    encode_missing(made, components)
    return made


def test_a_batch_is_a_function_of_its_number_and_has_pictures_of_one_size(pipeline: Path, tmp_path: Path):
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a"))
    sizes = set()
    for number in range(4):
        batch, again = dataset.batch(number), dataset.batch(number)
        assert batch.keys() == again.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in batch.items())
        assert batch["images"].shape[0] == 2
        sizes.add(batch["images"].shape[2:])
    assert len(sizes) == 2
    assert dataset.num_blocks == 8
    assert dataset.facts() == {
        "pictures": "6 in 2 sizes; an epoch shows 6, 2 of them once more to fill batches of one size"
    }


def test_a_picture_of_which_much_is_cut_off_is_told(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = draw_pictures(tmp_path / "a", count=1)
    for name, width in (("long", 320), ("longer", 640)):
        Image.new("RGB", (width, 64)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a banner")
    told = dataset_of(pipeline, folder, "batch_size=1").facts()["pictures"]
    assert told.endswith(f"; 1 longer than 5:1 lose more than a fifth by the cut: {folder / 'longer.png'}")


def test_latents_are_drawn_anew_from_one_distribution(pipeline: Path, tmp_path: Path):
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a", count=1), "batch_size=1")
    first, second = dataset.batch(0)["images"], dataset.batch(1)["images"]
    assert not torch.equal(first, second)
    (picture,) = dataset._pictures
    mean, std = dataset.encoded.read(dataset._key(picture, dataset._views[0]))["latents"]
    drawn = torch.cat([(dataset.batch(number)["images"][0] - mean) / std for number in range(30)])
    assert drawn.mean().abs() < 0.05
    assert (drawn.std() - 1).abs() < 0.05


@pytest.mark.parametrize("share", [0, 1])
def test_captions_are_dropped_and_sizes_are_not(pipeline: Path, tmp_path: Path, share: int):
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a"), f"dataset.caption_dropout={share}")
    first, second = dataset.batch(0)[TEXT]
    assert torch.equal(first, second) == bool(share)
    sizes = dataset.batch(0)[f"{ASKED}added_cond_kwargs.time_ids"]
    assert {tuple(row[:2].tolist()) for row in sizes} <= {(64, 64), (48, 96)}


def test_half_of_the_pictures_are_mirrored(pipeline: Path, tmp_path: Path):
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a", count=1), "dataset.flip=true", "batch_size=1")
    (picture,) = dataset._pictures
    means = [dataset.encoded.read(dataset._key(picture, view))["latents"][0] for view in dataset._views]
    near = [
        min((0, 1), key=lambda flip, batch=batch: float((batch["images"][0] - means[flip]).abs().sum()))
        for batch in map(dataset.batch, range(30))
    ]
    assert 5 <= sum(near) <= 25


@pytest.mark.parametrize("overrides", [[], ["dataset.flip=true"], ["dataset.crops=3", "dataset.flip=true"]])
def test_an_example_has_the_latents_and_the_sizes_of_one_part_of_its_picture(
    pipeline: Path, tmp_path: Path, overrides: list[str]
):
    (tmp_path / "a").mkdir()
    noise = np.random.default_rng(3).integers(0, 256, (80, 95, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a" / "0.png")
    (tmp_path / "a" / "0.txt").write_text("noise")
    dataset = dataset_of(pipeline, tmp_path / "a", *overrides, "batch_size=1")
    (picture,) = dataset._pictures
    mirrored = [False, True] if "dataset.flip=true" in overrides else [False]
    places = [None] if len(overrides) < 2 else [dataset._variation(picture, View(False, crop)) for crop in range(3)]
    options = {"ground": "white", "alpha_mask": False}
    parts = [cropped(picture, flip=flip, variation=place, **options) for flip in mirrored for place in places]
    assert len({part.crop for part in parts}) >= len(places)
    means = [dataset.encoded.read(dataset._key(picture, view))["latents"] for view in dataset._views]
    vae, seen = made("sdxl").vae, set()
    for part, (mean, _) in zip(parts, means, strict=True):
        with torch.no_grad():
            expected = vae.encode(part.pixels[None]).latent_dist.mean[0] * vae.config.scaling_factor
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-5)
    for number in range(24):
        batch = dataset.batch(number)
        apart = [float(((batch["images"][0] - mean) / std).abs().mean()) for mean, std in means]
        near = apart.index(min(apart))
        seen.add(near)
        # Those of diffusers' train_text_to_image_sdxl.py: the size of the file, the part that was cut, its size.
        expected = [80, 95, *parts[near].crop, *picture.size]
        assert batch[f"{ASKED}added_cond_kwargs.time_ids"].tolist() == [expected]
    assert seen == set(range(len(parts)))


def test_pictures_of_one_size_are_cut_at_places_of_their_own(pipeline: Path, tmp_path: Path):
    """As by the random crops of diffusers' scripts; in each run at the same ones."""
    for number in range(8):
        Image.new("RGB", (95, 80), (number, 0, 0)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("plain")
    overrides = (*overrides_of(pipeline, tmp_path, "noise_prediction"), "dataset.crops=2")
    found = []
    for seed in (1, 2):
        config = components_of(*overrides, f"seed={seed}")
        dataset = build_dataset(config.config, config.model, tmp_path)
        pictures = sorted(dataset._pictures, key=lambda picture: picture.path)
        found.append([dataset.cropped(picture, dataset._views[0]).crop for picture in pictures])
    assert len({*found[0]}) > 3
    assert found[0] == found[1]


def test_a_pipeline_that_is_not_told_places_keeps_a_caption_once(tmp_path_factory: pytest.TempPathFactory):
    folder = draw_pictures(tmp_path_factory.mktemp("pictures"), count=1)
    config = components_of(*overrides_of(saved("sd3", tmp_path_factory), folder), "dataset.crops=4")
    missing = build_dataset(config.config, config.model, folder).missing()
    assert (len(missing.pictures), len(missing.captions)) == (4, 2)


def test_a_mask_is_that_of_the_picture_in_latents(pipeline: Path, tmp_path: Path):
    folder = draw_pictures(tmp_path / "a", count=1)
    mask = Image.new("L", (96, 48), 0)
    mask.paste(255, (0, 0, 48, 48))
    mask.save(folder / "0-mask.png")
    batch = dataset_of(pipeline, folder, "dataset.masked=true", "batch_size=1").batch(0)
    found = batch[LOSS_MASK]
    assert found.shape == (1, *batch["images"].shape[2:])
    half = found.shape[2] // 2
    assert (found[..., : half - 1] == 1).all()
    assert (found[..., half + 1 :] == 0).all()


def test_a_mask_that_is_not_asked_for_is_not_read(pipeline: Path, tmp_path: Path):
    folder = draw_pictures(tmp_path / "a", count=1)
    # With dataset.masked it would leave nothing to train on.
    Image.new("L", (96, 48), 0).save(folder / "0-mask.png")
    dataset = dataset_of(pipeline, folder, "dataset.crops=2", "batch_size=1")
    assert LOSS_MASK not in dataset.batch(0)
    (picture,) = dataset._pictures
    assert dataset.cropped(picture, View(False, 1)).crop == dataset._asked(picture, View(False, 1)).crop


def test_held_out_pictures_are_in_no_batch(pipeline: Path, tmp_path: Path):
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a"), "dataset.eval_share=0.34", "batch_size=1")
    held = {picture.path for picture in dataset._held_out}
    assert len(held) == 2
    assert held.isdisjoint(picture.path for picture in dataset._pictures)
    batches = dataset.eval_batches(5)
    assert len(batches) == 2
    assert all(
        torch.equal(one["images"], two["images"]) for one, two in zip(batches, dataset.eval_batches(5), strict=True)
    )


def test_copies_of_held_out_pictures_are_held_out(pipeline: Path, tmp_path: Path):
    """Of two folders, with other names and captions."""
    first, second = (draw_pictures(tmp_path / name) for name in "ab")
    for number in range(6):
        (second / f"{number}.txt").write_text("a copy")
    folders = f"dataset.folder={{{first}: 1, {second}: 2}}"
    dataset = dataset_of(pipeline, first, folders, "dataset.eval_share=0.34", "batch_size=1")
    held, shown = ({picture.path.read_bytes() for picture in part} for part in (dataset._held_out, dataset._pictures))
    assert held.isdisjoint(shown)
    assert (len(dataset._held_out), len(dataset._pictures)) == (2 * len(held), 2 * len(shown))
    assert len(dataset.eval_batches(20)) == 2 * len(held)
    for number in range(1, 6):
        (first / f"{number}.png").write_bytes((first / "0.png").read_bytes())
    with pytest.raises(UserError, match=r"^dataset\.eval_share=0\.34: holds out all pictures, which are the same"):
        Captioned(folder=str(first), size=64, pipeline=str(pipeline), eval_share=0.34, seed=0, batch_size=1)


def test_a_call_that_is_lost_is_asked_for_again(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a"))
    batch, lost = dataset.batch(0), sorted(dataset.encoded.path.glob("call-*.pt"))
    lost[0].unlink()
    missing = dataset.missing()
    assert (len(missing.sizes), len(missing.pictures)) == (1, 0)
    again = dataset_of(pipeline, tmp_path / "a")
    assert lost[0].is_file()
    assert not again.missing()
    assert all(torch.equal(tensor, again.batch(0)[name]) for name, tensor in batch.items())


def test_a_plans_batch_has_the_shapes_of_a_run(pipeline: Path, tmp_path: Path):
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a"))
    found = Captioned.meta_batch(2, size=64, multiple=32, pipeline=str(pipeline), precision="fp32")
    real = max((dataset.batch(number) for number in range(4)), key=lambda batch: batch["images"].numel())
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in real.items()
    }


def test_a_dataset_with_columns_has_the_batches_of_a_folder(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = draw_pictures(tmp_path / "a")
    rows = [
        {"image": path.read_bytes(), "text": path.with_suffix(".txt").read_text()}
        for path in sorted(folder.glob("*.png"))
    ]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    found = dataset_of(pipeline, folder, "dataset.folder=null", f"dataset.name={tmp_path / 'rows.parquet'}")
    expected = dataset_of(pipeline, folder)
    assert found.data_sha256 == expected.data_sha256
    for name, tensor in expected.batch(0).items():
        assert torch.equal(found.batch(0)[name], tensor)


@pytest.mark.parametrize("given", [{}, {"folder": "a", "name": "me/data"}])
def test_pictures_come_from_one_place(pipeline: Path, given: dict[str, str]):
    with pytest.raises(UserError, match=r"^dataset=captioned: give dataset\.folder=DIR or dataset\.name="):
        Captioned(**given, pipeline=str(pipeline), seed=0, batch_size=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("text_column", "caption"), ("image_column", "photo"), ("split", "test")),
        *(("config_name", "en"), ("revision", "v2")),
    ],
)
def test_a_key_of_columns_beside_a_folder_is_refused(pipeline: Path, key: str, value: str):
    with pytest.raises(UserError, match=rf"^dataset\.{key}={value}: is of dataset\.name: captions of a folder are in"):
        Captioned(folder="a", **{key: value}, pipeline=str(pipeline), seed=0, batch_size=1)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("FluxPipeline", {}, r"dataset\.frames=5: FluxPipeline makes pictures and no videos: take a pipeline"),
        ("LTXPipeline", {"fps": 16.0}, r"dataset\.fps=16\.0: the pipeline tells its network 25: take null"),
        ("LTXPipeline", {"folder": None, "name": "a"}, r"dataset\.frames=5: has no effect without dataset\.folder,"),
        ("LTXPipeline", {"frames": None, "fps": 16.0}, r"dataset\.fps=16\.0: .* without dataset\.frames: give that"),
    ],
)
def test_videos_that_the_pipeline_does_not_make_are_refused(tmp_path: Path, name: str, keys: dict, message: str):
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{name}"}}')
    with pytest.raises(UserError, match=f"^{message}"):
        Captioned(**{"folder": "a", "frames": 5} | keys, pipeline=str(tmp_path), seed=0, batch_size=1)


def test_without_a_pipeline_it_is_refused():
    with pytest.raises(UserError, match=r"dataset=captioned: take model=pipeline model\.source=SOURCE"):
        Captioned.meta_batch(1)
    with pytest.raises(UserError, match=r"dataset=captioned: take model=pipeline model\.source=SOURCE"):
        Captioned.meta_batch(1, pipeline="unet_small")


def test_pictures_are_read_once_and_not_by_batches(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = dataset_of(pipeline, draw_pictures(tmp_path / "a"), "dataset.flip=true")
    monkeypatch.setattr(pictures, "opened", None)
    assert dataset.batch(0).keys() == dataset.batch(1).keys()
    assert not dataset.missing()


def pictures_of(*counts: tuple[tuple[int, int], int, int]) -> list[CaptionedPicture]:
    """Returns pictures: for each (size, repeats, count)."""
    return [
        CaptionedPicture(Path(f"{size}/{number}.png"), "", repeats, size, size, None)
        for size, repeats, count in counts
        for number in range(count)
    ]


PICTURES = pictures_of(((64, 64), 1, 7), ((32, 128), 3, 2), ((64, 64), 2, 3), ((128, 32), 1, 1))


def epoch_of(batches: BucketBatches, epoch: int) -> list[list[int]]:
    steps = batches.steps_per_epoch
    return [batches.of_step(step) for step in range(epoch * steps, (epoch + 1) * steps)]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5])
def test_a_batch_has_one_size_and_an_epoch_each_picture(batch_size: int) -> None:
    batches = BucketBatches(PICTURES, batch_size, seed=0)
    # 13 squares, 6 wide ones, 1 tall one.
    assert batches.steps_per_epoch == sum(-(-count // batch_size) for count in (13, 6, 1))
    for epoch in range(3):
        shown = epoch_of(batches, epoch)
        assert all(len(batch) == batch_size for batch in shown)
        assert all(len({PICTURES[number].size for number in batch}) == 1 for batch in shown)
        times = Counter(number for batch in shown for number in batch)
        assert all(times[number] >= picture.repeats for number, picture in enumerate(PICTURES))
        assert times.total() == batch_size * batches.steps_per_epoch
        if batch_size == 1:
            assert times == {number: picture.repeats for number, picture in enumerate(PICTURES)}


def test_a_batch_that_is_not_full_is_filled_with_pictures_of_its_bucket() -> None:
    pictures = pictures_of(((64, 64), 1, 5))
    for epoch in range(8):
        first, second = epoch_of(BucketBatches(pictures, 4, seed=1), epoch)
        (rest,) = set(range(5)).difference(max(first, second, key=lambda batch: len(set(batch))))
        assert {*first, *second} == set(range(5))
        assert sorted(Counter(first + second).values()) == [1, 1, 2, 2, 2]
        assert len(set(first)) == len(set(second)) == 4
        assert rest in first + second


def test_a_bucket_with_less_than_a_batch_repeats_its_pictures_evenly() -> None:
    (batch,) = epoch_of(BucketBatches(pictures_of(((64, 64), 1, 3)), 8, seed=0), 0)
    assert sorted(Counter(batch).values()) == [2, 3, 3]


def test_batches_depend_on_seed_and_step_alone() -> None:
    batches, again = (BucketBatches(PICTURES, 2, seed=5) for _ in range(2))
    expected = [batches.of_step(step) for step in range(40)]
    for step in (39, 3, 17, 0, 39, 12):
        assert again.of_step(step) == expected[step]
    assert [BucketBatches(PICTURES, 2, seed=6).of_step(step) for step in range(40)] != expected


def test_epochs_differ_in_the_order_of_pictures_and_of_buckets() -> None:
    batches = BucketBatches(PICTURES, 2, seed=0)
    epochs = [epoch_of(batches, epoch) for epoch in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    assert len({str([PICTURES[batch[0]].size for batch in epoch]) for epoch in epochs}) > 1
    assert len({str(sorted(map(sorted, epoch))) for epoch in epochs}) > 1


def test_a_bucket_is_shown_in_the_same_order_whatever_the_other_buckets() -> None:
    pictures = pictures_of(((64, 64), 1, 7))
    alone = epoch_of(BucketBatches(pictures, 2, seed=0), 0)
    joined = epoch_of(BucketBatches(pictures + pictures_of(((32, 128), 1, 3)), 2, seed=0), 0)
    assert sorted(alone) == sorted(batch for batch in joined if max(batch) < 7)

"""Pictures and captions in columns: of local datasets, and of the Hub; what is refused in one line."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from tests.training.helpers.hub_server import ask_here, hub_server
from training.data.captioned.columns import pictures_in_columns
from training.data.captioned.pictures import content_key, cropped, find_pictures, in_buckets
from training.errors import UserError

CAPTIONS = ["a red\ncat ", ""]
# Nobody answers there.
NOBODY = "http://127.0.0.1:9"
BUCKETS = {"size": 64, "multiple": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # The library would draw bars.
    datasets.disable_progress_bars()


def files() -> list[bytes]:
    found = []
    for number in range(2):
        levels = np.random.default_rng(number).integers(0, 256, (40, 60 + number, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(levels).save(file, "PNG")
        found.append(file.getvalue())
    return found


def rows(captions: list[Any] = CAPTIONS, typed: bool = True) -> datasets.Dataset:
    pictures = [{"bytes": content, "path": None} for content in files()] if typed else files()
    return datasets.Dataset.from_dict({"image": pictures, "text": captions}).cast_column(
        "image", datasets.Image() if typed else datasets.Value("binary")
    )


def in_folder(folder: Path) -> Path:
    for number, (content, caption) in enumerate(zip(files(), CAPTIONS, strict=True)):
        (folder / f"{number}.png").write_bytes(content)
        (folder / f"{number}.txt").write_text(caption)
    return folder


def saved(folder: Path) -> Path:
    rows().save_to_disk(folder / "saved")
    return folder / "saved"


def parquet(folder: Path) -> Path:
    rows(typed=False).to_parquet(folder / "train.parquet")
    return folder / "train.parquet"


def parquet_folder(folder: Path) -> Path:
    rows().to_parquet(folder / "train.parquet")
    return folder


def image_folder(folder: Path) -> Path:
    (folder / "images").mkdir()
    lines = []
    for number, (content, caption) in enumerate(zip(files(), CAPTIONS, strict=True)):
        (folder / "images" / f"{number}.png").write_bytes(content)
        lines.append(f'{{"file_name": "{number}.png", "text": {caption!r}}}'.replace("'", '"'))
    (folder / "images" / "metadata.jsonl").write_text("\n".join(lines))
    return folder / "images"


@pytest.mark.parametrize("made", [saved, parquet, parquet_folder, image_folder])
def test_a_local_dataset_is_as_a_folder_with_the_same_pictures(tmp_path: Path, made: Callable[[Path], Path]):
    (tmp_path / "data").mkdir()
    (tmp_path / "folder").mkdir()
    found = in_buckets(pictures_in_columns(str(made(tmp_path / "data"))), **BUCKETS)
    expected = find_pictures({in_folder(tmp_path / "folder"): 1}, **BUCKETS)
    assert [picture.caption for picture in found] == ["a red\ncat", ""]
    for one, other in zip(found, expected, strict=True):
        assert content_key(one, ground="white") == content_key(other, ground="white")
        options = {"flip": False, "ground": "white", "alpha_mask": False}
        assert cropped(one, **options).pixels.equal(cropped(other, **options).pixels)


def test_columns_have_any_names(tmp_path: Path):
    renamed = rows().rename_columns({"image": "photo", "text": "says"}).add_column("n", [1, 2])
    renamed.to_parquet(tmp_path / "a.parquet")
    found = list(pictures_in_columns(str(tmp_path), image_column="photo", text_column="says"))
    assert [place.read() for place, _ in found] == files()
    assert str(found[1][0]) == f"{tmp_path}[1]"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image_column": "photo"}, r"dataset\.image_column=photo: no such column in .*; it has image, text$"),
        ({"text_column": "says"}, r"dataset\.text_column=says: no such column in .*; it has image, text$"),
        ({"text_column": "image"}, r"dataset\.text_column=image: contains dict, not text"),
        ({"image_column": "text"}, r"dataset\.image_column=text: contains str, not the bytes of pictures, in .*\[0\]"),
        ({"split": "test"}, r"dataset\.name=.* dataset\.split=test: Unknown split"),
    ],
)
def test_other_columns_are_refused(tmp_path: Path, columns: dict[str, str], message: str):
    rows().to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=f"^{message}") as refusal:
        in_buckets(pictures_in_columns(str(tmp_path), **columns), **BUCKETS)
    assert "\n" not in str(refusal.value)


def test_missing_captions_and_damaged_pictures_are_named(tmp_path: Path):
    rows(["a", None]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"1 of 2 pictures have no caption, the first is .*\[1\]: write an empty text"):
        list(pictures_in_columns(str(tmp_path)))
    broken = datasets.Dataset.from_dict({"image": [b"no picture"], "text": ["a"]})
    broken.to_parquet(tmp_path / "broken.parquet")
    with pytest.raises(UserError, match=r"cannot use the picture .*\[0\]: it has no known format"):
        in_buckets(pictures_in_columns(str(tmp_path / "broken.parquet")), **BUCKETS)


def test_a_dataset_of_the_hub_is_read_once_and_then_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(name: str, message: str) -> None:
        with pytest.raises(UserError, match=f"^dataset.{message}"):
            list(pictures_in_columns(name, image_column="photo"))

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    # It has no pictures.
    there = r"image_column=photo: no such column in me/tiny; it has text, n$"
    with hub_server() as address:
        for endpoint in (address, NOBODY):
            ask_here(monkeypatch, endpoint, tmp_path / "hub")
            monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
            refused("me/tiny", there)
            why = "no such dataset on the Hub" if endpoint == address else ".*did not answer.*or give dataset.folder="
            refused("me/none", f"name=me/none: {why}")


def test_a_folder_of_webdataset_is_read_and_its_file_alone_refused(tmp_path: Path):
    file = tmp_path / "shards" / "0.tar"
    file.parent.mkdir()
    with tarfile.open(file, "w") as archive:
        for number, content in enumerate(files()):
            for ending, value in (("png", content), ("txt", CAPTIONS[number].encode())):
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(value)
                archive.addfile(info, io.BytesIO(value))
    found = pictures_in_columns(str(file.parent), image_column="png", text_column="txt")
    assert [(picture.read(), caption) for picture, caption in found] == list(
        zip(files(), [each.strip() for each in CAPTIONS], strict=True)
    )
    with pytest.raises(UserError, match=r"0\.tar: of files only \.parquet is read: give the folder"):
        list(pictures_in_columns(str(file)))


@pytest.mark.parametrize(
    ("made", "given", "key"),
    [
        (saved, {"split": "test"}, "split=test"),
        (parquet, {"config_name": "en"}, "config_name=en"),
        (image_folder, {"revision": "v2"}, "revision=v2"),
    ],
)
def test_keys_without_effect_on_a_local_dataset_are_refused(tmp_path: Path, made: Callable, given: dict, key: str):
    with pytest.raises(UserError, match=rf"^dataset\.{key}: has no effect on dataset\.name=/.*, a local one: leave"):
        list(pictures_in_columns(str(made(tmp_path)), **given))

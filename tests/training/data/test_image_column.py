"""Pictures in parquet files with the layout of a dataset on the Hub."""

import io
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from training.data.image_column import ImageColumn
from training.errors import UserError

SIZES = {"seed": 0, "batch_size": 4, "size": 4}
ROWS = 20


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library waits for threads of a reader, five seconds an epoch, whether there are any or not."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (level, 0, 255)).save(file, "PNG")
    return file.getvalue()


def write(folder: Path, split: str, levels: list[int], content=png) -> None:
    """Writes pictures whose level of red is ten times their label, plus a number below ten."""
    folder.mkdir(exist_ok=True, parents=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    rows = {"image": [{"bytes": content(n), "path": None} for n in levels], "label": [n // 10 for n in levels]}
    # In two files, as shards.
    for shard in range(2):
        part = {name: values[shard::2] for name, values in rows.items()}
        datasets.Dataset.from_dict(part, features=features).to_parquet(folder / f"{split}-{shard}.parquet")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("repository")
    write(folder, "train", list(range(ROWS)))
    write(folder, "validation", [90, 91])
    return str(folder)


def red(batch: dict[str, torch.Tensor]) -> list[int]:
    return ((batch["images"][:, 0, 0, 0] + 1) * 127.5).round().int().tolist()


def alike(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_an_epoch_has_each_picture_with_its_label(repository: str) -> None:
    dataset = ImageColumn(repository, **SIZES, shuffle_buffer=8)
    assert (dataset.num_classes, dataset.class_names) == (10, [str(number) for number in range(10)])
    epochs = []
    for epoch in range(2):
        batches = [dataset.batch(epoch * 5 + index) for index in range(5)]
        assert all(batch["labels"].tolist() == [level // 10 for level in red(batch)] for batch in batches)
        epochs.append([level for batch in batches for level in red(batch)])
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))
    assert epochs[0] != epochs[1]
    assert (batches[0]["images"].shape, batches[0]["images"].dtype) == ((4, 3, 4, 4), torch.float32)


def test_earlier_calls_do_not_change_a_batch(repository: str) -> None:
    sequential, jumping = (ImageColumn(repository, **SIZES, shuffle_buffer=8) for _ in range(2))
    expected = [sequential.batch(index) for index in range(8)]
    for index in (3, 6, 1, 1, 7):
        assert alike(jumping.batch(index), expected[index])
    assert not alike(ImageColumn(repository, **SIZES | {"seed": 1}).batch(0), expected[0])


def test_meta_batches_are_alike(repository: str) -> None:
    for column in ("label", None):
        real = ImageColumn(repository, label_column=column, **SIZES).batch(0)
        meta = ImageColumn.meta_batch(4, name=repository, size=4, label_column=column, crop="centre")
        assert {k: (v.shape, v.dtype) for k, v in real.items()} == {k: (v.shape, v.dtype) for k, v in meta.items()}


def test_held_out_pictures_are_in_no_epoch(repository: str) -> None:
    dataset = ImageColumn(repository, **SIZES, eval_share=0.4)
    held_out = {level for batch in dataset.eval_batches(100) for level in red(batch)}
    assert 2 < len(held_out) < 15
    trained = {level for index in range(10) for level in red(dataset.batch(index))}
    assert trained == set(range(ROWS)) - held_out
    assert len(dataset.eval_batches(1)[0]["labels"]) <= 4
    assert ImageColumn(repository, **SIZES).eval_batches(3) == []


def test_plain_columns_of_bytes_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"picture": [png(level) for level in (1, 12)], "kind": [0, 1]})
    parquet.write_table(table, tmp_path / "train.parquet")
    options = {"image_column": "picture", "label_column": "kind", **SIZES, "batch_size": 2}
    batch = ImageColumn(str(tmp_path), num_classes=2, **options).batch(0)
    assert sorted(zip(red(batch), batch["labels"].tolist(), strict=True)) == [(1, 0), (12, 1)]
    with pytest.raises(UserError, match=r"^dataset\.num_classes=null: the dataset does not tell how many labels kind"):
        ImageColumn(str(tmp_path), **options)
    with pytest.raises(UserError, match=r"^dataset\.label_column=kind: contains 1, not a whole number from 0 to 0"):
        ImageColumn(str(tmp_path), num_classes=1, **options).batch(0)


def test_a_transparent_picture_lies_on_the_ground(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (6, 4), (255, 0, 0, 0)).save(file, "PNG")
    write(tmp_path, "train", [0, 1], content=lambda _: file.getvalue())
    for ground, level in (({}, 1.0), ({"ground": "black"}, -1.0)):
        assert ImageColumn(str(tmp_path), **SIZES, **ground).batch(0)["images"].unique().tolist() == [level]


def test_damaged_pictures_are_named_by_their_hash(tmp_path: Path) -> None:
    write(tmp_path, "train", [0, 1], content=lambda level: png(level)[:30])
    with pytest.raises(UserError, match=r"^dataset: cannot use the picture of .* with SHA-256 [0-9a-f]{64}: .*repair"):
        ImageColumn(str(tmp_path), **SIZES).batch(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ground": "#0000"}, r"dataset\.ground=#0000: the ground of transparent pictures must be opaque; give a name"),
        ({"label_column": "kind"}, r"dataset\.label_column=kind: no such column in .*; it has image, label"),
        ({"image_column": "label"}, r"dataset\.image_column=label: contains int, not the bytes of pictures"),
    ],
)
def test_values_that_do_not_fit_are_refused(repository: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as refusal:
        ImageColumn(**{"name": repository, **SIZES, **options}).batch(0)
    assert "\n" not in str(refusal.value)

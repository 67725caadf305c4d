"""Folders of pictures: classes, order, held-out pictures and refusals."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from training.data.images import ImageFolder
from training.errors import UserError

SIZES = {"seed": 0, "batch_size": 4}
LEVELS = {"cat": 0, "dog": 100, "emu": 200}


def write(path: Path, level: int, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, 0, 255)).save(path)


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Three classes of four pictures; the level of red tells class and number."""
    for name, level in LEVELS.items():
        for number in range(4):
            write(tmp_path / name / f"{number}.png", level + number)
    return tmp_path


def red(batch: dict[str, torch.Tensor]) -> list[int]:
    return ((batch["images"][:, 0, 0, 0] + 1) * 127.5).round().int().tolist()


def test_folders_are_classes_in_the_order_of_names(animals: Path) -> None:
    dataset = ImageFolder(animals, size=4, **SIZES)
    assert (dataset.num_classes, dataset.num_blocks) == (3, 12)
    assert dataset.class_names == sorted(entry.name for entry in animals.iterdir() if entry.is_dir())
    seen = []
    for index in range(3):
        batch = dataset.batch(index)
        assert (batch["images"].shape, batch["images"].dtype) == ((4, 3, 4, 4), torch.float32)
        assert batch["labels"].dtype == torch.int64
        assert batch["labels"].tolist() == [level // 100 for level in red(batch)]
        assert batch["images"][:, 2].unique().tolist() == [1.0]
        seen += red(batch)
    assert sorted(seen) == sorted(level + number for level in LEVELS.values() for number in range(4))


def test_without_labels_all_folders_are_one(animals: Path) -> None:
    write(animals / "loose.jpg", 7)
    dataset = ImageFolder(animals, size=4, labels=False, **SIZES)
    assert (dataset.num_classes, dataset.num_blocks) == (None, 13)
    assert list(dataset.batch(0)) == ["images"]


def test_pictures_below_class_folders_count_and_hidden_ones_do_not(animals: Path) -> None:
    write(animals / "cat" / "more" / "5.PNG", 5)
    write(animals / "cat" / ".hidden.png", 6)
    write(animals / ".trash" / "7.png", 7)
    (animals / "notes.txt").write_text("no picture")
    dataset = ImageFolder(animals, size=4, **SIZES)
    assert (dataset.num_classes, dataset.num_blocks) == (3, 13)


def test_linked_folders_are_followed_but_not_in_circles(animals: Path) -> None:
    root = animals / "links"
    root.mkdir()
    (root / "cat").symlink_to(animals / "cat", target_is_directory=True)
    (root / "other").mkdir()
    (root / "other" / "dog").symlink_to(animals / "dog", target_is_directory=True)
    (root / "other" / "again").symlink_to(root, target_is_directory=True)
    (animals / "dog" / "cats").symlink_to(animals / "cat", target_is_directory=True)
    (animals / "cat" / "dogs").symlink_to(animals / "dog", target_is_directory=True)
    dataset = ImageFolder(root, size=4, **SIZES)
    assert (dataset.num_classes, dataset.num_blocks) == (2, 16)


def test_a_folder_that_cannot_be_read_is_named(animals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By another way than permissions, which do not hold for root.
    listed = os.scandir

    def scandir(*path: object):
        # Also code beside this test may list folders, by numbers, and pytest as it shows a failure.
        if path and str(path[0]).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path[0]))
        return listed(*path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        with pytest.raises(
            UserError, match=r"^dataset\.folder: the folder .*dog cannot be read \(Permission denied\): "
        ):
            ImageFolder(animals, size=4, **SIZES)


def test_meta_batches_are_alike(animals: Path) -> None:
    for labels in (True, False):
        real = ImageFolder(animals, size=4, labels=labels, **SIZES).batch(0)
        meta = ImageFolder.meta_batch(4, folder="none", size=4, labels=labels, crop="centre")
        assert {k: (v.shape, v.dtype) for k, v in real.items()} == {k: (v.shape, v.dtype) for k, v in meta.items()}


def test_held_out_pictures_are_of_all_classes_and_never_trained_on(animals: Path) -> None:
    dataset = ImageFolder(animals, size=4, eval_share=0.5, **SIZES)
    held_out = [level for batch in dataset.eval_batches(9) for level in red(batch)]
    trained = {level for index in range(6) for level in red(dataset.batch(index))}
    assert len(held_out) == len(trained) == 6
    assert trained.isdisjoint(held_out)
    assert len({level // 100 for level in held_out}) > 1
    other = ImageFolder(animals, size=4, eval_share=0.5, seed=5, batch_size=2)
    assert sorted(level for batch in other.eval_batches(9) for level in red(batch)) == sorted(held_out)


def test_a_transparent_picture_lies_on_the_ground(tmp_path: Path) -> None:
    Image.new("RGBA", (6, 4), (255, 0, 0, 0)).save(tmp_path / "a.png")
    for ground, level in (({}, 255), ({"ground": "black"}, 0), ({"ground": "gray"}, 128)):
        batch = ImageFolder(tmp_path, size=4, labels=False, seed=0, batch_size=1, **ground).batch(0)
        assert batch["images"].unique().tolist() == pytest.approx([level / 127.5 - 1], abs=1e-6)


@pytest.fixture
def stripes(tmp_path: Path) -> Path:
    """One wide picture whose squares differ."""
    image = Image.new("RGB", (64, 8))
    for column in range(64):
        image.paste((column * 4, 0, 0), (column, 0, column + 1, 8))
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "wide.png")
    image.save(tmp_path / "a" / "wider.png")
    return tmp_path


def test_squares_change_with_epoch_and_seed_and_stay_in_an_evaluation(stripes: Path) -> None:
    options = {"size": 8, "batch_size": 1, "eval_share": 0.5}
    dataset, again, other = (ImageFolder(stripes, seed=seed, **options) for seed in (0, 0, 1))
    epochs = [dataset.batch(index)["images"] for index in range(8)]
    assert len({image.numpy().tobytes() for image in epochs}) > 4
    assert torch.equal(again.batch(5)["images"], epochs[5])
    assert any(not torch.equal(other.batch(index)["images"], epochs[index]) for index in range(3))
    assert torch.equal(dataset.eval_batches(1)[0]["images"], other.eval_batches(1)[0]["images"])


def test_centre_without_flip_is_the_same_in_every_epoch(stripes: Path) -> None:
    dataset = ImageFolder(stripes, size=8, crop="centre", flip=False, seed=0, batch_size=2)
    assert torch.equal(dataset.batch(0)["images"], dataset.batch(1)["images"])


def test_the_digest_tells_other_files(animals: Path) -> None:
    def digest(**options: object) -> str:
        return ImageFolder(animals, **{"size": 4, **SIZES, **options}).data_sha256

    before = digest()
    assert digest(seed=3, batch_size=1) == before
    assert len({before, digest(size=5), digest(crop="centre"), digest(flip=False), digest(ground="black")}) == 5
    os.rename(animals / "cat" / "0.png", animals / "dog" / "9.png")
    assert digest() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "none"}, r"dataset\.folder=none: no such folder"),
        ({"folder": ""}, r"dataset\.folder=: no such folder"),
        ({"size": 0}, r"dataset\.size=0: must be at least 1"),
        ({"crop": "left"}, r"dataset\.crop=left: must be random or centre"),
        ({"ground": "whyte"}, r"dataset\.ground=whyte: .*give a name of CSS"),
    ],
)
def test_values_that_do_not_fit_are_refused(animals: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        ImageFolder(**{"folder": animals, **SIZES, **options})


def test_folders_without_classes_or_pictures_are_refused(animals: Path, tmp_path: Path) -> None:
    write(animals / "loose.png", 7)
    with pytest.raises(UserError, match=r"^dataset\.labels=true: loose\.png is in no class folder of .*labels=false"):
        ImageFolder(animals, **SIZES)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^dataset\.folder=.*empty: no pictures in it; they end in \.png"):
        ImageFolder(tmp_path / "empty", **SIZES)


def test_a_class_folder_without_pictures_is_refused(animals: Path) -> None:
    (animals / "beetle" / "none yet").mkdir(parents=True)
    (animals / ".hidden").mkdir()
    with pytest.raises(UserError, match=r"the class folder beetle has no pictures: remove it, or fill it$"):
        ImageFolder(animals, size=4, seed=0, batch_size=1)
    assert ImageFolder(animals, size=4, seed=0, batch_size=1, labels=False).num_classes is None


def test_a_picture_that_is_damaged_gone_or_a_pipe_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.png"
    write(path, 1)
    dataset = ImageFolder(tmp_path, size=4, seed=0, batch_size=1)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=r"^dataset: cannot use the picture .*x\.png: .*; repair or remove it$"):
        dataset.batch(0)
    path.unlink()
    with pytest.raises(UserError, match=r"x\.png: no such file; repair"):
        dataset.batch(0)
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"x\.png: it is not a file; repair"):
        dataset.batch(0)

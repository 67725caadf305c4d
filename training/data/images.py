"""Pictures in a folder."""

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from training.data.examples import NumberedExamples
from training.data.packing import epoch_order
from training.data.pictures import Square, as_images, check_ground, decoded, meta_images
from training.errors import UserError
from training.runs.files import home_expanded

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# In the key of random numbers: which pictures are held out.
HELD_OUT = 0x68656C64


class ImageFolder(NumberedExamples):
    """Pictures in a folder: one folder for each class, or without labels in any folders.

    A batch has `images`, float32 [B, 3, size, size] from -1 to 1, and with labels `labels`, int64 [B]: the number of
    the class folder in the order of names, below `num_classes`. A picture is read when it is needed; its short side
    becomes `size`. Hidden files and folders, and files that do not have the extension of a picture, are left out; links
    are followed. conf/dataset/images.yaml explains the keys.

    Raises UserError if there are no pictures, or the folders do not fit `labels`; in `batch` if a picture cannot be
    used.
    """

    def __init__(
        self,
        folder: str | Path,
        size: int = 64,
        labels: bool = True,
        crop: str = "random",
        flip: bool = True,
        ground: str = "white",
        *,
        seed: int,
        batch_size: int,
        eval_share: float = 0.0,
    ):
        self._square, self._ground = Square(size, crop, flip), ground
        check_ground(ground)
        self._root = existing_folder(folder)
        self._files = files_below(self._root)
        if not self._files:
            raise UserError(f"dataset.folder={folder}: no pictures in it; they end in {', '.join(EXTENSIONS)}")
        classes = sorted({file.partition("/")[0] for file in self._files}) if labels else []
        loose = [file for file in self._files if "/" not in file]
        if labels and loose:
            raise UserError(
                f"dataset.labels=true: {loose[0]} is in no class folder of {folder}: take dataset.labels=false, or move"
                " it"
            )
        if labels and (empty := sorted(_folders_in(self._root).difference(classes))):
            # Else the numbers of the classes behind it would change when it gets its first picture.
            raise UserError(
                f"dataset.folder={folder}: the class folder {empty[0]} has no pictures: remove it, or fill it"
            )
        self.num_classes, self.class_names = (len(classes), classes) if labels else (None, [])
        self._class_of = {name: number for number, name in enumerate(classes)}
        # The last of them are held out. In the order of names these would be those of one class.
        self._order = epoch_order(len(self._files), HELD_OUT, 0)
        super().__init__(len(self._files), seed=seed, batch_size=batch_size, eval_share=eval_share)

    @staticmethod
    def meta_batch(rows: int, *, size: int = 64, labels: bool = True, **_others: object) -> dict[str, Tensor]:
        """Returns a batch of `rows` examples on the meta device, for these keys of the dataset's option."""
        return meta_images(rows, 3, size, size, labels=labels)

    @cached_property
    def data_sha256(self) -> str:
        """The SHA-256 of names and lengths of all files, and of the keys that make images of them, not of contents."""
        square = self._square
        digest = hashlib.sha256(f"{square.size} {square.crop} {square.flip} {self._ground} {self._count}".encode())
        for file in self._files:
            digest.update(f"\n{file} {(self._root / file).stat().st_size}".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def examples(self, numbers: Sequence[int], epochs: Sequence[int]) -> dict[str, Tensor]:
        """Returns `images` and `labels`, by seed, picture and epoch alone. Raises UserError for a damaged picture."""
        files = [self._files[self._order[number]] for number in numbers]
        squares = [
            self._square.of(decoded(path, str(path), self._ground), None if epoch < 0 else (self._seed, number, epoch))
            for path, number, epoch in zip([self._root / file for file in files], numbers, epochs, strict=True)
        ]
        batch = {"images": as_images(squares)}
        if self.num_classes is not None:
            batch["labels"] = torch.tensor([self._class_of[file.partition("/")[0]] for file in files])
        return batch


def existing_folder(folder: str | Path) -> Path:
    """Returns the folder of dataset.folder, `~` replaced. Raises UserError if there is none."""
    path = home_expanded("dataset.folder", folder)
    if not str(folder) or not path.is_dir():
        raise UserError(f"dataset.folder={folder}: no such folder (looked from {Path.cwd()})")
    return path


def _folders_in(root: Path) -> set[str]:
    entries = (entry for entry in root.iterdir() if not entry.name.startswith("."))
    return {entry.name for entry in entries if entry.is_dir() and not _leads_back(str(root), entry.name)}


def files_below(root: Path, endings: tuple[str, ...] = EXTENSIONS) -> list[str]:
    """Returns the paths, relative to `root`, of the files below it with these endings, sorted, without hidden ones.

    Raises UserError for a folder that cannot be read.
    """
    found = []
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and not _leads_back(folder, name)]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(endings):
                found.append(Path(folder, name).relative_to(root).as_posix())
    return sorted(found)


def _leads_back(folder: str, name: str) -> bool:
    """Tells whether a folder is a link to one that it is in, below which a walk would not end."""
    path = Path(folder, name)
    return path.is_symlink() and path.resolve() in {above.resolve() for above in path.parents}


def _unreadable(error: OSError) -> None:
    raise UserError(
        f"dataset.folder: the folder {error.filename} cannot be read ({error.strerror}): change its permissions, or"
        " move it"
    )

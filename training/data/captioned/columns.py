"""Pictures with captions in two columns of a dataset of the Hugging Face Hub, or of a local one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from training.data.corpus import check_column, import_datasets, is_text
from training.data.hub_client import ask_hub
from training.errors import UserError, first_line
from training.runs.files import home_expanded

# In a folder that `save_to_disk` has written.
SAVED = "state.json"


@dataclass(frozen=True, eq=False)
class ColumnPicture:
    """The picture in `column` of row `number` of `rows`, a dataset that is called `name` in messages."""

    rows: Any
    number: int
    column: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}[{self.number}]"

    def read(self) -> bytes | Path:
        """Returns the file's bytes, or where it is. Raises UserError for a column of something else."""
        value = self.rows[self.number][self.column]
        if isinstance(value, dict):
            value = value.get("bytes") or (value.get("path") and Path(value["path"]))
        if not isinstance(value, bytes | Path):
            raise UserError(
                f"dataset.image_column={self.column}: contains {type(value).__name__}, not the bytes of pictures, in"
                f" {self}; name another column"
            )
        return value


def pictures_in_columns(
    name: str,
    config_name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    image_column: str = "image",
    text_column: str = "text",
) -> Iterator[tuple[ColumnPicture, str]]:
    """Yields the pictures of a dataset with their captions, row by row.

    The library `datasets` keeps a dataset of the Hub in its own cache, and takes it from there without a network.

    Args:
        name: OWNER/NAME on the Hub, a folder with files of a layout that `datasets.load_dataset` knows, one that
            `save_to_disk` wrote, or a .parquet file.
        config_name: the dataset's configuration (subset); None where it has only one.
        split: the name of the split.
        revision: a commit, tag or branch.
        image_column: of the type Image, or with the bytes of picture files.
        text_column: the captions; an empty one is a caption, null is none.

    Raises UserError for a dataset, a configuration, a split or a column that is not there, and for other values.
    """
    datasets = import_datasets()
    rows = _loaded(name, config_name, split, revision)
    for key, column in {"image_column": image_column, "text_column": text_column}.items():
        check_column(column, rows.column_names, name, key)
    if isinstance(rows.features[image_column], datasets.Image):
        # The library would decode without a limit.
        rows = rows.cast_column(image_column, datasets.Image(decode=False))
    captions = list(rows[text_column])
    if lacking := [number for number, caption in enumerate(captions) if caption is None]:
        raise UserError(
            f"dataset.name={name}: {len(lacking)} of {len(captions)} pictures have no caption, the first is"
            f" {name}[{lacking[0]}]: write an empty text, or leave these rows out"
        )
    for number, caption in enumerate(captions):
        is_text(caption, text_column, name)
        yield ColumnPicture(rows, number, image_column, name), caption.strip()


def _loaded(name: str, config_name: str | None, split: str, revision: str | None) -> Any:
    datasets, path = import_datasets(), home_expanded("dataset.name", name)
    refusal = None if path.exists() else _refusal_of_hub(name, revision)
    try:
        if (path / SAVED).is_file():
            return datasets.load_from_disk(str(path))
        if path.is_file():
            return datasets.load_dataset("parquet", data_files=str(path), split=split)
        return datasets.load_dataset(
            str(path) if path.is_dir() else name,
            config_name,
            split=split,
            revision=revision,
            # Else it would try again for half a minute before it looks into its cache.
            download_config=datasets.DownloadConfig(local_files_only=refusal is not None),
        )
    # About ten types of error, without a common base class.
    except Exception as error:
        asked = f"dataset.name={name} dataset.config_name={config_name} dataset.split={split}"
        raise (refusal or UserError(f"{asked}: {first_line(error)}")) from error


def _refusal_of_hub(name: str, revision: str | None) -> UserError | None:
    """Returns what is wrong where the Hub does not answer, or not know the dataset."""
    from huggingface_hub import HfApi

    given = f"dataset.name={name}" + (f" dataset.revision={revision}" if revision else "")
    request = partial(HfApi().dataset_info, revision=revision)
    try:
        ask_hub(request, name, given, "dataset", "or give dataset.folder=DIR")
    except UserError as error:
        return error
    return None

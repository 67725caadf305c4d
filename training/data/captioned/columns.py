"""Pictures with captions in two columns of a dataset of the Hugging Face Hub, or of a local one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.hub_client import ask_for_dataset, refuse_keys_of_hub
from training.data.hub_rows import SAVED
from training.data.local_files import check_column, import_datasets, is_text
from training.errors import UserError, first_line
from training.runs.files import home_expanded


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
    """Yields the pictures of a dataset with their captions, row by row; conf/dataset/captioned.yaml explains the keys.

    The library `datasets` keeps a dataset of the Hub in its own cache, and takes it from there without a network.
    Raises UserError for a dataset, configuration, split or column that does not exist, and for a row without a caption.
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
    refusal: UserError | None = None
    if path.is_file() and path.suffix != ".parquet":
        raise UserError(f"dataset.name={name}: of files only .parquet is read: give the folder of others (.tar)")
    saved = (path / SAVED).is_file()
    if path.exists():
        alone = saved or path.is_file()
        refuse_keys_of_hub(name, revision=revision, config_name=config_name if alone else None)
        refuse_keys_of_hub(name, split=split if saved and split != "train" else None)
    try:
        if not path.exists():
            ask_for_dataset(name, revision, "or give dataset.folder=DIR")
    except UserError as error:
        refusal = error
    try:
        if saved:
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

"""Opens a dataset of the Hugging Face Hub, or a local folder of the same layout, as rows that are read when needed."""

import os
from functools import partial
from typing import Any

from training.data.corpus import import_datasets
from training.data.hub_client import ask_hub
from training.errors import UserError, first_line


def open_rows(
    name: str,
    config_name: str | None,
    split: str,
    *,
    revision: str | None,
    folder: str,
    otherwise: str,
    split_key: str = "split",
) -> Any:
    """Returns an iterable dataset of the library `datasets`, which stores nothing but metadata, in `folder`.

    Args:
        name: `owner/name` on the Hub, or a local folder.
        otherwise: what to do without the Hub, for the message.
        split_key: the key that named `split`, for the message.

    Raises:
        UserError: within seconds, if there is no network or no such dataset, configuration or split.
    """
    datasets = import_datasets()
    if not os.path.isdir(name):
        _keep_client_files_in(folder)
        from huggingface_hub import HfApi

        given = f"dataset.name={name}" + (f" dataset.revision={revision}" if revision else "")
        ask_hub(partial(HfApi().dataset_info, revision=revision), name, given, "dataset", otherwise)
    try:
        rows = datasets.load_dataset(
            name,
            config_name,
            split=split,
            revision=revision,
            streaming=True,
            cache_dir=folder,
            download_config=datasets.DownloadConfig(cache_dir=os.path.join(folder, "downloads")),
        )
        # Where the columns are not known, this reads the first row.
        columns_of(rows)
    except Exception as error:  # the library raises about ten types of error, without a common base class
        asked = f"dataset.name={name} dataset.config_name={config_name} dataset.{split_key}={split}"
        raise UserError(f"{asked}: {first_line(error)}") from error
    return rows


def columns_of(rows: Any) -> list[str]:
    """Returns the names of the columns of `open_rows`; from the first row where the files do not tell."""
    return rows.column_names or list(next(iter(rows), {}))


def _keep_client_files_in(folder: str) -> None:
    """Makes the Hub's client write below `folder`, not in the home directory. It still reads a login from there."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = os.path.join(folder, "hub")
    # The Xet transport writes caches and logs of its own, and does not speed up reading rows in order.
    constants.HF_HUB_DISABLE_XET = True
    # With telemetry, the client asks the Hub for a list of known callers first, and stores it in the home directory.
    constants.HF_HUB_DISABLE_TELEMETRY = True

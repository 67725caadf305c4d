"""Rows of a dataset of the Hugging Face Hub, or of a local folder of the same layout, which are read when needed."""

import os
from typing import Any

from training.data.hub_client import ask_for_dataset, refuse_keys_of_hub
from training.data.local_files import import_datasets
from training.errors import as_user_error

# A folder with this file is a dataset of `save_to_disk`, which `load_dataset` refuses.
SAVED = "state.json"


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
    """Returns an iterable dataset of `datasets`, metadata in `folder`. Raises UserError, naming `split_key`."""
    datasets = import_datasets()
    saved = os.path.isfile(os.path.join(name, SAVED))
    if os.path.isdir(name):
        refuse_keys_of_hub(name, revision=revision, config_name=config_name if saved else None)
    else:
        _keep_client_files_in(folder)
        ask_for_dataset(name, revision, otherwise)
    asked = f"dataset.name={name} dataset.config_name={config_name} dataset.{split_key}={split}: "
    where = {"cache_dir": folder, "download_config": datasets.DownloadConfig(cache_dir=f"{folder}/downloads")}
    # The library raises about ten types of error, without a common base class.
    with as_user_error(asked, Exception):
        if saved:
            if split != "train":
                raise ValueError("it was saved without splits: give train")
            rows = datasets.load_from_disk(name).with_format(None).to_iterable_dataset()
        else:
            rows = datasets.load_dataset(name, config_name, split=split, revision=revision, streaming=True, **where)
        # Where the columns are not known, this reads the first row.
        columns_of(rows)
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
